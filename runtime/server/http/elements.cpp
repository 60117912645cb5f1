#include "runtime/server/http/elements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are stored as the machine has them");

using kind_t = nested_list::kind_t;

[[noreturn]] void bad_element(nested_list const& list, std::size_t i, std::string_view label,
                              std::string_view wanted) {
  throw error{error_kind::invalid_argument,
              fmt::format("element {} of {} is {}; {}", i, label, list.text(i), wanted)};
}

template <typename Stored>
void store(std::vector<std::byte>& out, std::size_t i, Stored value) {
  std::memcpy(out.data() + i * sizeof(Stored), &value, sizeof(Stored));
}

template <typename Integer>
std::vector<std::byte> integers(nested_list const& list, datatype type, std::string_view label) {
  using limits = std::numeric_limits<Integer>;
  std::vector<std::byte> out(list.size() * sizeof(Integer));
  auto const wanted = [&] {
    return fmt::format("{} takes an integer from {} to {}", datatype_name(type), +limits::min(),
                       +limits::max());
  };
  for (std::size_t i = 0; i < list.size(); ++i) {
    auto const bits = list.bits(i);
    bool fits = false;
    if (list.kind(i) == kind_t::natural) {
      fits = bits <= static_cast<std::uint64_t>(limits::max());
    } else if (list.kind(i) == kind_t::negative) {
      fits = std::is_signed_v<Integer> &&
             static_cast<std::int64_t>(bits) >= static_cast<std::int64_t>(limits::min());
    }
    if (!fits) bad_element(list, i, label, wanted());
    store(out, i, static_cast<Integer>(bits));
  }
  return out;
}

std::vector<std::byte> booleans(nested_list const& list, std::string_view label) {
  std::vector<std::byte> out(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list.kind(i) != kind_t::boolean) bad_element(list, i, label, "BOOL takes true or false");
    out[i] = static_cast<std::byte>(list.bits(i));
  }
  return out;
}

std::optional<double> real_value(nested_list const& list, std::size_t i) {
  switch (list.kind(i)) {
    case kind_t::natural:
      return static_cast<double>(list.bits(i));
    case kind_t::negative:
      return static_cast<double>(static_cast<std::int64_t>(list.bits(i)));
    case kind_t::real:
      return list.real(i);
    case kind_t::string: {
      auto const word = list.string(i);
      if (word == "NaN") return std::numeric_limits<double>::quiet_NaN();
      if (word == "Infinity") return std::numeric_limits<double>::infinity();
      if (word == "-Infinity") return -std::numeric_limits<double>::infinity();
      return std::nullopt;
    }
    default:
      return std::nullopt;
  }
}

/// `round` gives the bits to store, `largest` the largest finite number of the type.
template <typename Round, typename Widen>
std::vector<std::byte> reals(nested_list const& list, datatype type, std::string_view label,
                             double largest, Round round, Widen widen) {
  using stored = decltype(round(0.0));
  std::vector<std::byte> out(list.size() * sizeof(stored));
  for (std::size_t i = 0; i < list.size(); ++i) {
    auto const value = real_value(list, i);
    if (!value) {
      bad_element(list, i, label,
                  fmt::format(R"({} takes a number, or "NaN", "Infinity", "-Infinity")",
                              datatype_name(type)));
    }
    auto const rounded = round(*value);
    if (std::isfinite(*value) && !std::isfinite(widen(rounded))) {
      bad_element(list, i, label,
                  fmt::format("{} holds numbers up to {:g}", datatype_name(type), largest));
    }
    store(out, i, rounded);
  }
  return out;
}

float float_from_double(double value) {
  // a finite double beyond float's range is undefined behaviour to convert; what rounds down to the
  // largest is not
  constexpr double halfway_to_infinity = 0x1.ffffffp127;
  if (std::isfinite(value) && std::fabs(value) >= halfway_to_infinity) {
    return std::copysign(std::numeric_limits<float>::infinity(),
                         static_cast<float>(std::copysign(1.0, value)));
  }
  if (std::isfinite(value) &&
      std::fabs(value) > static_cast<double>(std::numeric_limits<float>::max())) {
    return value < 0 ? std::numeric_limits<float>::lowest() : std::numeric_limits<float>::max();
  }
  return static_cast<float>(value);
}

template <typename Real>
void append_real(std::string& out, Real value) {
  if (std::isnan(value)) {
    out += R"("NaN")";
  } else if (std::isinf(value)) {
    out += value < 0 ? R"("-Infinity")" : R"("Infinity")";
  } else {
    std::array<char, 32> text{};
    auto const end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
    std::string_view const digits{text.data(), static_cast<std::size_t>(end - text.data())};
    out += digits;
    // clients that type JSON numbers by their looks must see a real
    if (digits.find_first_of(".e") == std::string_view::npos) out += ".0";
  }
}

template <typename Integer>
void append_integer(std::string& out, Integer value) {
  std::array<char, 24> text{};
  out.append(text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr);
}

template <typename Stored, typename Append>
void append_each(std::string& out, tensor const& source, std::uint64_t count, Append append) {
  for (std::uint64_t i = 0; i < count; ++i) {
    Stored value;
    std::memcpy(&value, source.data.data() + i * sizeof(Stored), sizeof(Stored));
    if (i > 0) out += ',';
    append(out, value);
  }
}

[[noreturn]] void broken_bytes(tensor const& source, std::uint64_t count) {
  throw error{error_kind::internal,
              fmt::format("output '{}': {} bytes do not hold {} elements of {}", source.name,
                          source.data.size(), count, datatype_name(source.type))};
}

/// Takes an element of BYTES from the front of `rest`; nothing if it has none that is whole.
std::optional<std::string_view> take_string(std::string_view& rest) {
  std::uint32_t length = 0;
  if (rest.size() < sizeof(length)) return std::nullopt;
  std::memcpy(&length, rest.data(), sizeof(length));
  if (rest.size() - sizeof(length) < length) return std::nullopt;
  auto const text = rest.substr(sizeof(length), length);
  rest.remove_prefix(sizeof(length) + length);
  return text;
}

std::string_view text_of(std::span<std::byte const> bytes) {
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

void append_strings(std::string& out, tensor const& source, std::uint64_t count) {
  auto rest = text_of(source.data.span());
  for (std::uint64_t i = 0; i < count; ++i) {
    auto const text = take_string(rest);
    if (!text) broken_bytes(source, count);
    if (!is_utf8(*text)) {
      throw error{
          error_kind::unsupported,
          fmt::format("element {} of output '{}' is not UTF-8, which JSON cannot carry; ask "
                      "for the output with \"binary_data\": true",
                      i, source.name)};
    }
    if (i > 0) out += ',';
    out += nlohmann::json(*text).dump();
  }
  if (!rest.empty()) broken_bytes(source, count);
}

std::optional<std::string> strings_fault(std::span<std::byte const> bytes, std::uint64_t count) {
  auto rest = text_of(bytes);
  for (std::uint64_t i = 0; i < count; ++i) {
    if (!take_string(rest)) {
      return fmt::format(
          "element {} of {} begins at byte {} and does not end in them; an element of BYTES is a "
          "length of 4 bytes, little-endian, and that many bytes",
          i, count, bytes.size() - rest.size());
    }
  }
  if (rest.empty()) return std::nullopt;
  return fmt::format("its {} elements, with a length of 4 bytes before each, end after {}", count,
                     bytes.size() - rest.size());
}

}  // namespace

std::vector<std::byte> elements_from_list(nested_list const& list, datatype type,
                                          std::string_view label) {
  switch (type) {
    case datatype::boolean:
      return booleans(list, label);
    case datatype::uint8:
      return integers<std::uint8_t>(list, type, label);
    case datatype::uint16:
      return integers<std::uint16_t>(list, type, label);
    case datatype::uint32:
      return integers<std::uint32_t>(list, type, label);
    case datatype::uint64:
      return integers<std::uint64_t>(list, type, label);
    case datatype::int8:
      return integers<std::int8_t>(list, type, label);
    case datatype::int16:
      return integers<std::int16_t>(list, type, label);
    case datatype::int32:
      return integers<std::int32_t>(list, type, label);
    case datatype::int64:
      return integers<std::int64_t>(list, type, label);
    case datatype::fp16:
      return reals(list, type, label, 65504, half_from_double, half_to_float);
    case datatype::bf16:
      return reals(list, type, label, 0x1.FEp127, bfloat16_from_double, bfloat16_to_float);
    case datatype::fp32:
      return reals(list, type, label, std::numeric_limits<float>::max(), float_from_double,
                   [](float value) { return value; });
    case datatype::fp64:
      return reals(
          list, type, label, std::numeric_limits<double>::max(), [](double value) { return value; },
          [](double value) { return value; });
    case datatype::bytes:
      break;
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list.kind(i) != kind_t::string) bad_element(list, i, label, "BYTES takes strings");
  }
  auto const& strings = list.strings();
  auto const* const begin = reinterpret_cast<std::byte const*>(strings.data());
  return {begin, begin + strings.size()};
}

void append_elements(std::string& out, tensor const& source, std::uint64_t count) {
  if (source.type == datatype::bytes) return append_strings(out, source, count);
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(count, element_size(source.type), &bytes) ||
      bytes != source.data.size()) {
    broken_bytes(source, count);
  }
  auto const integer = [](std::string& text, auto value) { append_integer(text, value); };
  auto const real = [](std::string& text, auto value) { append_real(text, value); };
  switch (source.type) {
    case datatype::boolean:
      return append_each<std::uint8_t>(
          out, source, count,
          [](std::string& text, std::uint8_t value) { text += value != 0 ? "true" : "false"; });
    case datatype::uint8:
      return append_each<std::uint8_t>(out, source, count, integer);
    case datatype::uint16:
      return append_each<std::uint16_t>(out, source, count, integer);
    case datatype::uint32:
      return append_each<std::uint32_t>(out, source, count, integer);
    case datatype::uint64:
      return append_each<std::uint64_t>(out, source, count, integer);
    case datatype::int8:
      return append_each<std::int8_t>(out, source, count, integer);
    case datatype::int16:
      return append_each<std::int16_t>(out, source, count, integer);
    case datatype::int32:
      return append_each<std::int32_t>(out, source, count, integer);
    case datatype::int64:
      return append_each<std::int64_t>(out, source, count, integer);
    case datatype::fp16:
      return append_each<std::uint16_t>(
          out, source, count,
          [](std::string& text, std::uint16_t bits) { append_real(text, half_to_float(bits)); });
    case datatype::bf16:
      return append_each<std::uint16_t>(out, source, count,
                                        [](std::string& text, std::uint16_t bits) {
                                          append_real(text, bfloat16_to_float(bits));
                                        });
    case datatype::fp32:
      return append_each<float>(out, source, count, real);
    case datatype::fp64:
      return append_each<double>(out, source, count, real);
    case datatype::bytes:
      break;
  }
}

std::optional<std::string> binary_fault(std::span<std::byte const> bytes, datatype type,
                                        std::uint64_t count) {
  if (type == datatype::bytes) return strings_fault(bytes, count);
  std::uint64_t needed = 0;
  if (__builtin_mul_overflow(count, element_size(type), &needed)) {
    return fmt::format("{} elements of {} are more bytes than 64 bits can count", count,
                       datatype_name(type));
  }
  if (needed != bytes.size()) {
    return fmt::format("{} elements of {} take {}", count, datatype_name(type), needed);
  }
  if (type != datatype::boolean) return std::nullopt;
  auto const wrong =
      std::find_if(bytes.begin(), bytes.end(), [](std::byte each) { return each > std::byte{1}; });
  if (wrong == bytes.end()) return std::nullopt;
  return fmt::format("element {} is {}; BOOL takes bytes of 0 and 1", wrong - bytes.begin(),
                     static_cast<unsigned>(*wrong));
}

}  // namespace sluice::server
