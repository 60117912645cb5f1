#include "runtime/server/http/json_list.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/json_number.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are stored as the machine has them");

constexpr std::size_t longest_shown = 40;

std::string shortened(std::string_view text) {
  return text.size() <= longest_shown ? std::string{text}
                                      : std::string{text.substr(0, longest_shown)} + "…";
}

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

/// The quotation mark that ends the string which begins at `at`.
char const* end_of_string(json_document const& document, char const* at, char const* end) {
  auto const* const begin = at;
  while (true) {
    ++at;
    at = static_cast<char const*>(std::memchr(at, '"', static_cast<std::size_t>(end - at)));
    if (at == nullptr) document.not_json(end, "a string does not end");
    auto const* escape = at;
    while (escape - 1 != begin && escape[-1] == '\\') --escape;
    if ((at - escape) % 2 == 0) return at;
  }
}

/// The first bracket, brace or quotation mark.
char const* next_mark(char const* at, char const* end) {
  auto const is_mark = [](char c) {
    // brackets and braces differ in one bit from each other
    auto const folded = static_cast<unsigned char>(static_cast<unsigned char>(c) | 0x20U);
    return static_cast<unsigned>(folded == '{') | static_cast<unsigned>(folded == '}') |
           static_cast<unsigned>(c == '"');
  };
  constexpr std::ptrdiff_t block = 64;
  for (; end - at >= block;
       at += block) {  // without a way out inside, so that it is one of vectors
    unsigned char found = 0;
    for (std::ptrdiff_t i = 0; i < block; ++i) {
      found |= static_cast<unsigned char>(is_mark(at[i]));
    }
    if (found != 0) break;
  }
  while (at != end && is_mark(*at) == 0) ++at;
  return at;
}

struct json_word {
  std::string text;
  char const* behind;
};

/// The string at `at`, without its marks and escapes.
json_word take_word(json_document const& document, char const* at, char const* end) {
  auto const* const last = end_of_string(document, at, end);
  std::string_view const inside{at + 1, static_cast<std::size_t>(last - at - 1)};
  auto const* const control = std::find_if(
      inside.begin(), inside.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; });
  if (control != inside.end()) document.not_json(control, "a string holds a control character");
  if (!is_utf8(inside)) document.not_json(at, "a string holds bytes that are not UTF-8");
  if (inside.find('\\') == std::string_view::npos) return {std::string{inside}, last + 1};
  auto const parsed = nlohmann::json::parse(at, last + 1, nullptr, false);
  if (!parsed.is_string()) document.not_json(at, "a string holds an escape that there is not");
  return {parsed.get<std::string>(), last + 1};
}

bool stands_at(std::string_view literal, char const* at, char const* end) {
  return std::string_view{at, static_cast<std::size_t>(end - at)}.starts_with(literal);
}

/// What is behind the scalar at `at`.
char const* past_scalar(json_document const& document, char const* at, char const* end) {
  if (*at == '"') return take_word(document, at, end).behind;
  for (std::string_view const literal : {"null", "true", "false"}) {
    if (stands_at(literal, at, end)) return at + literal.size();
  }
  json_number number;
  auto const* const behind = scan_number(at, end, number);
  if (behind == nullptr) {
    bool const is_not_finite =
        stands_at("N", at, end) || stands_at("I", at, end) || stands_at("-I", at, end);
    document.not_json(at, is_not_finite
                              ? R"("NaN", "Infinity" and "-Infinity" are written in quotes)"
                              : "there is no value where one is expected");
  }
  if (!double_of(number)) {
    document.not_json(at, fmt::format("number overflow parsing '{}'", shortened(number.text)));
  }
  return behind;
}

/// `read` takes an element of the type, and says whether there was one; `wanted` says which those
/// are, of a number and of other scalars.
template <typename Read, typename Wanted>
void walk(json_document const& document, json_list list, std::string_view label,
          read_elements& into, Read read, Wanted wanted) {
  auto const* at = list.data();
  auto const* const end = document.text.data() + document.text.size();
  auto& nesting = into.nesting;
  std::size_t scalars = 0;  // of the list that is open, which `nesting` does not know yet
  bool may_end = false;
  while (true) {
    // the list ends with a bracket: none of these goes beyond it
    while (is_space(*at)) ++at;
    if (*at == '[') {
      nesting.add(std::exchange(scalars, 0));
      nesting.open();
      ++at;
      may_end = true;
      continue;
    }
    if (*at != ']' || !may_end) {
      if (!read(at, end)) {
        auto const* const begin = at;
        at = past_scalar(document, at, end);
        if (into.fault.empty()) {
          into.fault = fmt::format("element {} of {} is {}; {}", nesting.size() + scalars, label,
                                   text_of_scalar(nlohmann::json::parse(begin, at)),
                                   wanted(*begin == '-' || decimal::is_digit(*begin)));
        }
      }
      ++scalars;
    }
    may_end = false;
    while (true) {
      while (is_space(*at)) ++at;
      if (*at == ',') break;
      if (*at != ']') document.not_json(at, "a list goes on with ',' or ends with ']'");
      nesting.add(std::exchange(scalars, 0));
      nesting.close();
      if (nesting.depth() == 0) return;
      ++at;
    }
    ++at;
  }
}

/// Elements of one size, which `convert` makes of a number, or `other` of what is none; nothing: it
/// cannot be.
template <typename Stored, typename Convert, typename Other, typename Wanted>
read_elements read_fixed(json_document const& document, json_list list, std::uint64_t room,
                         std::string_view label, Convert convert, Other other, Wanted wanted) {
  read_elements result{tensor_bytes::unwritten(room * sizeof(Stored)), {}};
  auto* out = result.bytes.data();
  auto left = room;
  walk(
      document, list, label, result,
      [&](char const*& at, char const* end) {
        json_number number;
        std::optional<Stored> value;
        auto const* behind = scan_number(at, end, number);
        if (behind != nullptr) {
          value = convert(number);
        } else {
          value = other(at, end, behind);
        }
        if (!value) return false;
        at = behind;
        if (left == 0) return true;
        std::memcpy(out, &*value, sizeof(Stored));
        out += sizeof(Stored);
        --left;
        return true;
      },
      wanted);
  return result;
}

template <typename Integer>
std::optional<Integer> integer_of(json_number const& number) {
  using limits = std::numeric_limits<Integer>;
  if (!number.is_integer) return std::nullopt;
  auto magnitude = number.digits;
  if (!number.is_exact) {
    auto const* const begin = number.text.data();
    auto const* const end = begin + number.text.size();
    auto const status = std::from_chars(begin + (number.is_negative ? 1 : 0), end, magnitude).ec;
    if (status != std::errc{}) return std::nullopt;
  }
  auto const largest = static_cast<std::uint64_t>(limits::max());
  if (!number.is_negative || magnitude == 0) {
    return magnitude <= largest ? std::optional{static_cast<Integer>(magnitude)} : std::nullopt;
  }
  if (std::is_unsigned_v<Integer> || magnitude > largest + 1) return std::nullopt;
  return static_cast<Integer>(~magnitude + 1);
}

template <typename Integer>
read_elements read_integers(json_document const& document, json_list list, datatype type,
                            std::uint64_t room, std::string_view label) {
  using limits = std::numeric_limits<Integer>;
  return read_fixed<Integer>(
      document, list, room, label,
      [](json_number const& number) { return integer_of<Integer>(number); },
      [](auto...) -> std::optional<Integer> { return std::nullopt; },
      [type](bool /*is_number*/) {
        return fmt::format("{} takes an integer from {} to {}", datatype_name(type), +limits::min(),
                           +limits::max());
      });
}

/// What JSON has no numbers for.
std::optional<double> special_of(std::string_view text) {
  if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  if (text == "Infinity") return std::numeric_limits<double>::infinity();
  if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
  return std::nullopt;
}

/// `convert` gives nothing for what is beyond `largest`, `round` the bits of a double.
template <typename Convert, typename Round>
read_elements read_reals(json_document const& document, json_list list, datatype type,
                         std::uint64_t room, std::string_view label, double largest,
                         Convert convert, Round round) {
  using stored = decltype(round(0.0));
  return read_fixed<stored>(
      document, list, room, label, convert,
      [&](char const* at, char const* end, char const*& behind) -> std::optional<stored> {
        if (*at != '"') return std::nullopt;
        auto const word = take_word(document, at, end);
        auto const value = special_of(word.text);
        behind = word.behind;
        return value ? std::optional{round(*value)} : std::nullopt;
      },
      [type, largest](bool is_number) {
        return is_number ? fmt::format("{} holds numbers up to {:g}", datatype_name(type), largest)
                         : fmt::format(R"({} takes a number, or "NaN", "Infinity", "-Infinity")",
                                       datatype_name(type));
      });
}

/// Of a type of 16 bits, whose infinities `infinity` has the magnitude of.
template <typename Round>
read_elements read_small_reals(json_document const& document, json_list list, datatype type,
                               std::uint64_t room, std::string_view label, double largest,
                               std::uint16_t infinity, Round round) {
  return read_reals(
      document, list, type, room, label, largest,
      [=](json_number const& number) -> std::optional<std::uint16_t> {
        auto const value = double_of(number);
        if (!value) return std::nullopt;
        auto const bits = round(*value);
        return (bits & 0x7FFFU) == infinity ? std::nullopt : std::optional{bits};
      },
      round);
}

read_elements read_booleans(json_document const& document, json_list list, std::uint64_t room,
                            std::string_view label) {
  return read_fixed<std::uint8_t>(
      document, list, room, label,
      [](json_number const&) -> std::optional<std::uint8_t> { return std::nullopt; },
      [](char const* at, char const* end, char const*& behind) -> std::optional<std::uint8_t> {
        for (std::string_view const literal : {"true", "false"}) {
          if (!stands_at(literal, at, end)) continue;
          behind = at + literal.size();
          return literal == "true" ? 1 : 0;
        }
        return std::nullopt;
      },
      [](bool /*is_number*/) { return "BOOL takes true or false"; });
}

read_elements read_strings(json_document const& document, json_list list, std::string_view label) {
  read_elements result;
  std::vector<std::byte> out;
  walk(
      document, list, label, result,
      [&](char const*& at, char const* end) {
        if (*at != '"') return false;
        auto const word = take_word(document, at, end);
        auto const length = static_cast<std::uint32_t>(word.text.size());
        auto const lengths = std::as_bytes(std::span{&length, 1});
        out.insert(out.end(), lengths.begin(), lengths.end());
        auto const text = std::as_bytes(std::span{word.text});
        out.insert(out.end(), text.begin(), text.end());
        at = word.behind;
        return true;
      },
      [](bool /*is_number*/) { return "BYTES takes strings"; });
  result.bytes = std::move(out);
  return result;
}

}  // namespace

void json_document::not_json(char const* at, std::string_view reason) const {
  throw error{error_kind::invalid_argument,
              fmt::format("{} is not JSON (byte {}): {}", what, at - text.data() + 1, reason)};
}

std::string text_of_scalar(nlohmann::json const& value) {
  if (value.is_number_float()) return fmt::format("{:#}", value.get<double>());
  if (!value.is_string()) return value.dump();
  auto const& text = value.get_ref<std::string const&>();
  return text.size() <= longest_shown ? value.dump()
                                      : fmt::format("a string of {} bytes", text.size());
}

json_list find_list(json_document const& document, char const* at, std::size_t most_levels,
                    std::string_view label) {
  auto const* const begin = at;
  auto const* const end = document.text.data() + document.text.size();
  std::size_t depth = 0;
  while (true) {
    at = next_mark(at, end);
    if (at == end) document.not_json(end, "a list does not end");
    if (*at == '"') {
      at = end_of_string(document, at, end);
    } else if (*at == '[') {
      if (++depth > most_levels) return {};
    } else if (*at == ']') {
      if (--depth == 0) return {begin, static_cast<std::size_t>(at + 1 - begin)};
    } else if (*at == '{') {
      throw error{error_kind::invalid_argument,
                  fmt::format("the data of {} holds an object; it takes a list", label)};
    } else {
      document.not_json(at, "a list does not end with '}'");
    }
    ++at;
  }
}

read_elements read_list(json_document const& document, json_list list, datatype type,
                        std::uint64_t wanted, std::string_view label) {
  // each takes a character, and one before it
  auto const room = wanted <= list.size() / 2 ? wanted : 0;
  switch (type) {
    case datatype::boolean:
      return read_booleans(document, list, room, label);
    case datatype::uint8:
      return read_integers<std::uint8_t>(document, list, type, room, label);
    case datatype::uint16:
      return read_integers<std::uint16_t>(document, list, type, room, label);
    case datatype::uint32:
      return read_integers<std::uint32_t>(document, list, type, room, label);
    case datatype::uint64:
      return read_integers<std::uint64_t>(document, list, type, room, label);
    case datatype::int8:
      return read_integers<std::int8_t>(document, list, type, room, label);
    case datatype::int16:
      return read_integers<std::int16_t>(document, list, type, room, label);
    case datatype::int32:
      return read_integers<std::int32_t>(document, list, type, room, label);
    case datatype::int64:
      return read_integers<std::int64_t>(document, list, type, room, label);
    case datatype::fp16:
      return read_small_reals(document, list, type, room, label, 65504, 0x7C00, half_from_double);
    case datatype::bf16:
      return read_small_reals(document, list, type, room, label, 0x1.FEp127, 0x7F80,
                              bfloat16_from_double);
    case datatype::fp32:
      return read_reals(
          document, list, type, room, label, std::numeric_limits<float>::max(),
          [](json_number const& number) { return float_of(number); },
          [](double value) { return static_cast<float>(value); });
    case datatype::fp64:
      return read_reals(
          document, list, type, room, label, std::numeric_limits<double>::max(),
          [](json_number const& number) { return double_of(number); },
          [](double value) { return value; });
    case datatype::bytes:
      break;
  }
  return read_strings(document, list, label);
}

}  // namespace sluice::server
