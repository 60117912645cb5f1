#include "runtime/server/http/elements.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tensors are stored as the machine has them");

/// Text that is made piece by piece, and handed on in larger ones.
class text_buffer {
 public:
  explicit text_buffer(std::string& out) : out_(out) {}
  text_buffer(text_buffer const&) = delete;
  text_buffer& operator=(text_buffer const&) = delete;
  text_buffer(text_buffer&&) = delete;
  text_buffer& operator=(text_buffer&&) = delete;
  ~text_buffer() = default;

  /// `write` gets room for `longest` characters, and returns the end of what it has written.
  template <typename Write>
  void append(Write write) {
    if (pieces_.size() - used_ < longest) flush();
    auto* const at = pieces_.data() + used_;
    used_ += static_cast<std::size_t>(write(at, at + longest) - at);
  }
  void flush() {
    out_.append(pieces_.data(), used_);
    used_ = 0;
  }

 private:
  static constexpr std::size_t longest = 40;  // a number of any type, and a comma
  std::string& out_;
  std::array<char, 4096> pieces_;
  std::size_t used_ = 0;
};

char* copied(std::string_view text, char* at) {
  return std::copy(text.begin(), text.end(), at);
}

template <typename Real>
char* write_real(char* at, char* end, Real value) {
  if (std::isnan(value)) return copied(R"("NaN")", at);
  if (std::isinf(value)) return copied(value < 0 ? R"("-Infinity")" : R"("Infinity")", at);
  auto* const behind = std::to_chars(at, end, value).ptr;
  // clients that type JSON numbers by their looks must see a real
  bool const looks_real =
      std::find_if(at, behind, [](char c) { return c == '.' || c == 'e'; }) != behind;
  return looks_real ? behind : copied(".0", behind);
}

template <typename Stored, typename Write>
void append_each(std::string& out, tensor const& source, std::uint64_t count, Write write) {
  // what is not written is never touched
  constexpr std::size_t usual =
      std::is_integral_v<Stored> ? sizeof(Stored) * 2 + 2 : sizeof(Stored) * 2 + 5;
  out.reserve(out.size() + count * usual);
  text_buffer text{out};
  for (std::uint64_t i = 0; i < count; ++i) {
    Stored value;
    std::memcpy(&value, source.data.data() + i * sizeof(Stored), sizeof(Stored));
    text.append([&](char* at, char* end) {
      if (i > 0) *at++ = ',';
      return write(at, end, value);
    });
  }
  text.flush();
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

void append_elements(std::string& out, tensor const& source, std::uint64_t count) {
  if (source.type == datatype::bytes) return append_strings(out, source, count);
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(count, element_size(source.type), &bytes) ||
      bytes != source.data.size()) {
    broken_bytes(source, count);
  }
  auto const integer = [](char* at, char* end, auto value) {
    return std::to_chars(at, end, value).ptr;
  };
  auto const real = [](char* at, char* end, auto value) { return write_real(at, end, value); };
  switch (source.type) {
    case datatype::boolean:
      return append_each<std::uint8_t>(out, source, count,
                                       [](char* at, char* /*end*/, std::uint8_t value) {
                                         return copied(value != 0 ? "true" : "false", at);
                                       });
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
      return append_each<std::uint16_t>(out, source, count,
                                        [](char* at, char* end, std::uint16_t bits) {
                                          return write_real(at, end, half_to_float(bits));
                                        });
    case datatype::bf16:
      return append_each<std::uint16_t>(out, source, count,
                                        [](char* at, char* end, std::uint16_t bits) {
                                          return write_real(at, end, bfloat16_to_float(bits));
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

std::optional<std::uint64_t> element_count(std::vector<std::int64_t> const& shape) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::uint64_t count = 1;
  for (auto const extent : shape) {
    if (__builtin_mul_overflow(count, static_cast<std::uint64_t>(extent), &count)) {
      return std::nullopt;
    }
  }
  return count;
}

std::uint64_t count_of_output(tensor const& output) {
  bool const sane = std::all_of(output.shape.begin(), output.shape.end(),
                                [](auto extent) { return extent >= 0; });
  auto const count = sane ? element_count(output.shape) : std::nullopt;
  if (!count) {
    throw error{error_kind::internal, fmt::format("output '{}' has shape [{}]", output.name,
                                                  fmt::join(output.shape, ","))};
  }
  return *count;
}

void check_binary_output(tensor const& output, std::uint64_t count) {
  if (auto const fault = binary_fault(output.data.span(), output.type, count)) {
    throw error{error_kind::internal,
                fmt::format("output '{}' of shape [{}] has {} bytes: {}", output.name,
                            fmt::join(output.shape, ","), output.data.size(), *fault)};
  }
}

}  // namespace sluice::server
