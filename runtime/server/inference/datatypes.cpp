#include "runtime/server/inference/datatypes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace sluice::server {
namespace {

struct type_row {
  datatype type;
  std::string_view name;
  std::size_t size;
};
constexpr auto type_table = std::to_array<type_row>({
    {datatype::boolean, "BOOL", 1},
    {datatype::uint8, "UINT8", 1},
    {datatype::uint16, "UINT16", 2},
    {datatype::uint32, "UINT32", 4},
    {datatype::uint64, "UINT64", 8},
    {datatype::int8, "INT8", 1},
    {datatype::int16, "INT16", 2},
    {datatype::int32, "INT32", 4},
    {datatype::int64, "INT64", 8},
    {datatype::fp16, "FP16", 2},
    {datatype::bf16, "BF16", 2},
    {datatype::fp32, "FP32", 4},
    {datatype::fp64, "FP64", 8},
    {datatype::bytes, "BYTES", 0},
});

type_row const& row(datatype type) noexcept {
  auto const* const found =
      std::find_if(type_table.begin(), type_table.end(),
                   [type](type_row const& candidate) { return candidate.type == type; });
  return found == type_table.end() ? type_table.back() : *found;
}

/// A binary floating-point format of 16 bits: IEEE 754's layout with these field widths.
struct small_float {
  int mantissa_bits;
  int exponent_bits;

  [[nodiscard]] constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] constexpr std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1U << static_cast<unsigned>(exponent_bits)) - 1U)
                                      << static_cast<unsigned>(mantissa_bits));
  }

  /// Rounds the double itself: going through float first would round twice and break ties wrongly.
  [[nodiscard]] std::uint16_t encode(double value) const {
    auto const sign = static_cast<std::uint16_t>(std::signbit(value) ? 0x8000U : 0U);
    if (std::isnan(value)) {
      return static_cast<std::uint16_t>(infinity() |
                                        (1U << static_cast<unsigned>(mantissa_bits - 1)));
    }
    double const magnitude = std::fabs(value);
    if (std::isinf(magnitude)) return sign | infinity();
    if (magnitude == 0) return sign;
    // The spacing of representable numbers around `magnitude`; subnormals share that of the
    // smallest normal number.
    int const exponent = std::max(std::ilogb(magnitude), 1 - bias());
    double const steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
    // `steps` counts from zero in this binade, so adding it to the exponent field carries into the
    // next by itself.
    auto const code = (static_cast<std::uint32_t>(exponent - 1 + bias())
                       << static_cast<unsigned>(mantissa_bits)) +
                      static_cast<std::uint32_t>(steps);
    return static_cast<std::uint16_t>(sign | std::min<std::uint32_t>(code, infinity()));
  }
};

constexpr small_float half{10, 5};
constexpr small_float bfloat16{7, 8};

}  // namespace

std::string_view datatype_name(datatype type) noexcept {
  return row(type).name;
}

std::optional<datatype> datatype_from_name(std::string_view name) noexcept {
  auto const* const found =
      std::find_if(type_table.begin(), type_table.end(),
                   [name](type_row const& candidate) { return candidate.name == name; });
  if (found == type_table.end()) return std::nullopt;
  return found->type;
}

std::string const& datatype_names() {
  static std::string const names = [] {
    std::string result;
    for (auto const& candidate : type_table) {
      if (!result.empty()) result += ", ";
      result += candidate.name;
    }
    return result;
  }();
  return names;
}

std::size_t element_size(datatype type) noexcept {
  return row(type).size;
}

std::uint16_t half_from_double(double value) noexcept {
  return half.encode(value);
}
std::uint16_t bfloat16_from_double(double value) noexcept {
  return bfloat16.encode(value);
}

float half_to_float(std::uint16_t bits) noexcept {
  unsigned const exponent = (bits >> 10U) & 0x1FU;
  unsigned const mantissa = bits & 0x3FFU;
  float magnitude = 0;
  if (exponent == 0x1F) {
    magnitude = mantissa == 0 ? std::numeric_limits<float>::infinity()
                              : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(mantissa | 0x400U), static_cast<int>(exponent) - 25);
  }
  return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
}

float bfloat16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16U);
}

bool is_utf8(std::string_view text) noexcept {
  std::size_t i = 0;
  while (i < text.size()) {
    auto const lead = static_cast<unsigned char>(text[i++]);
    if (lead < 0x80) continue;
    std::size_t const following = lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : 1;
    if (lead < 0xC2 || lead > 0xF4 || text.size() - i < following) return false;
    std::uint32_t code = lead & (0x3FU >> following);
    for (std::size_t k = 0; k < following; ++k) {
      auto const next = static_cast<unsigned char>(text[i++]);
      if ((next & 0xC0U) != 0x80) return false;
      code = (code << 6U) | (next & 0x3FU);
    }
    bool const overlong = (following == 2 && code < 0x800) || (following == 3 && code < 0x10000);
    if (overlong || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return false;
  }
  return true;
}

}  // namespace sluice::server
