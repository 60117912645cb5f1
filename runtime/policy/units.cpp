#include "runtime/policy/units.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "memhandover/base/error.hpp"

namespace sluice::policy {
namespace {

struct unit {
  std::string_view name;
  std::uint64_t size;
};

constexpr std::array<unit, 5> byte_units{{{"B", 1},
                                          {"KiB", std::uint64_t{1} << 10U},
                                          {"MiB", std::uint64_t{1} << 20U},
                                          {"GiB", std::uint64_t{1} << 30U},
                                          {"TiB", std::uint64_t{1} << 40U}}};
constexpr std::array<unit, 5> duration_units{
    {{"us", 1}, {"ms", 1'000}, {"s", 1'000'000}, {"m", 60'000'000}, {"h", 3'600'000'000}}};
constexpr std::array<unit, 1> percent_units{{{"%", 1}}};

// What fits is the same for all amounts: durations are signed 64-bit counts.
constexpr auto largest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

[[noreturn]] void refuse(std::string const& why) {
  throw error{error_kind::invalid_argument, why};
}

/// Words that people write for a unit of ours and that mean something else, or nothing.
struct synonym {
  std::string_view written;
  std::string_view meant;
};
constexpr std::array<synonym, 19> synonyms{{{"K", "KiB"},
                                            {"KB", "KiB"},
                                            {"kB", "KiB"},
                                            {"M", "MiB"},
                                            {"MB", "MiB"},
                                            {"G", "GiB"},
                                            {"GB", "GiB"},
                                            {"gb", "GiB"},
                                            {"T", "TiB"},
                                            {"TB", "TiB"},
                                            {"b", "B"},
                                            {"sec", "s"},
                                            {"secs", "s"},
                                            {"msec", "ms"},
                                            {"usec", "us"},
                                            {"\xc2\xb5s", "us"},
                                            {"min", "m"},
                                            {"mins", "m"},
                                            {"percent", "%"}}};

std::string names_of(std::span<unit const> units) {
  std::string names;
  for (std::size_t i = 0; i < units.size(); ++i) {
    names += i == 0 ? "" : i + 1 == units.size() ? " or " : ", ";
    names += units[i].name;
  }
  return names;
}

/// The unit that was probably meant; nothing without a good guess.
std::optional<std::string_view> meant_by(std::string_view written, std::span<unit const> units) {
  for (auto const& [other, ours] : synonyms) {
    for (auto const& candidate : units) {
      if (other == written && ours == candidate.name) {
        return ours;
      }
    }
  }
  return std::nullopt;
}

struct amount {
  std::string_view digits;  ///< with its fraction
  std::uint64_t unit_size = 1;
};

amount split(std::string_view text, std::string_view what, std::string_view example,
             std::span<unit const> units) {
  std::size_t end = 0;
  auto take_digits = [&] {
    auto const before = end;
    while (end < text.size() && text[end] >= '0' && text[end] <= '9') {
      ++end;
    }
    return end > before;
  };
  bool well_formed = take_digits();
  if (well_formed && end < text.size() && text[end] == '.') {
    ++end;
    well_formed = take_digits();
  }
  if (!well_formed) {
    refuse(fmt::format("\"{}\" is not {}; write a number and a unit, for example {}", text, what,
                       example));
  }
  auto const digits = text.substr(0, end);
  if (end < text.size() && text[end] == ' ') {
    ++end;
  }
  auto const written = text.substr(end);
  for (auto const& candidate : units) {
    if (candidate.name == written) {
      return {digits, candidate.size};
    }
  }
  if (written.empty()) {
    refuse(
        fmt::format("\"{}\" has no unit; add {}, for example {}", text, names_of(units), example));
  }
  if (auto const meant = meant_by(written, units)) {
    refuse(fmt::format("\"{}\" has the unknown unit \"{}\"; did you mean {}{}?", text, written,
                       digits, *meant));
  }
  refuse(fmt::format("\"{}\" has the unknown unit \"{}\"; use {}, for example {}", text, written,
                     names_of(units), example));
}

double to_double(std::string_view digits) {
  double value = 0.0;
  // Digits beyond the range of a double leave `value` alone, so they must not pass for zero.
  if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc{}) {
    return std::numeric_limits<double>::infinity();
  }
  return value;
}

std::uint64_t count(std::string_view text, std::string_view what, std::string_view example,
                    std::span<unit const> units) {
  auto const parsed = split(text, what, example, units);
  if (parsed.digits.find('.') == std::string_view::npos) {  // exact, where a double would round
    std::uint64_t whole = 0;
    auto const [_, failed] =
        std::from_chars(parsed.digits.data(), parsed.digits.data() + parsed.digits.size(), whole);
    if (failed == std::errc{} && whole <= largest / parsed.unit_size) {
      return whole * parsed.unit_size;
    }
  } else {
    auto const value = to_double(parsed.digits) * static_cast<double>(parsed.unit_size);
    if (value < static_cast<double>(largest)) {
      return static_cast<std::uint64_t>(std::llround(value));
    }
  }
  refuse(
      fmt::format("\"{}\" is too large to be {}; write less, for example {}", text, what, example));
}

std::string write(std::uint64_t value, std::span<unit const> units) {
  auto const* best = &units.front();
  for (auto const& candidate : units) {
    if (value > 0 && value % candidate.size == 0) {
      best = &candidate;
    }
  }
  return fmt::format("{}{}", value / best->size, best->name);
}

}  // namespace

std::uint64_t parse_bytes(std::string_view text) {
  return count(text, "an amount of memory", "64MiB", byte_units);
}

std::chrono::microseconds parse_duration(std::string_view text) {
  auto const us = count(text, "a duration", "200ms", duration_units);
  return std::chrono::microseconds{static_cast<std::int64_t>(us)};
}

double parse_percentage(std::string_view text) {
  auto const parsed = split(text, "a percentage", "99%", percent_units);
  auto const value = to_double(parsed.digits);
  if (!std::isfinite(value)) {
    refuse(fmt::format("\"{}\" is too large to be a percentage; write for example 99%", text));
  }
  return value / 100.0;
}

std::string write_bytes(std::uint64_t bytes) {
  return write(bytes, byte_units);
}

std::string write_duration(std::chrono::microseconds duration) {
  if (duration.count() == 0) {
    return "0s";
  }
  return write(static_cast<std::uint64_t>(duration.count()), duration_units);
}

std::string write_percentage(double share) {
  auto text = fmt::format("{:.6f}", share * 100.0);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') {
    text.pop_back();
  }
  return text + "%";
}

}  // namespace sluice::policy
