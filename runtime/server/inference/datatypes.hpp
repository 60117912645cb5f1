/// Names and sizes of the protocol's element types, and its two 16-bit floats as numbers.
///
///   datatype_name(datatype::fp16);   // "FP16"
///   datatype_from_name("INT64");     // datatype::int64
///   half_from_double(1.0);           // 0x3C00
///
/// Names: Open Inference Protocol V2, "Tensor Data Types"; BF16 as Triton adds it. Everything here
/// is pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

[[nodiscard]] std::string_view datatype_name(datatype type) noexcept;
[[nodiscard]] std::optional<datatype> datatype_from_name(std::string_view name) noexcept;
/// All names, for messages: "BOOL, UINT8, …".
[[nodiscard]] std::string const& datatype_names();

/// Bytes of one element; 0 for BYTES, whose elements differ in size.
[[nodiscard]] std::size_t element_size(datatype type) noexcept;

/// IEEE 754 binary16, and bfloat16 (the upper half of a binary32), as bit patterns. The conversions
/// from a double round once, to nearest, ties to even; what is too large becomes infinite, NaN
/// stays a quiet NaN.
[[nodiscard]] std::uint16_t half_from_double(double value) noexcept;
[[nodiscard]] std::uint16_t bfloat16_from_double(double value) noexcept;
[[nodiscard]] float half_to_float(std::uint16_t bits) noexcept;
[[nodiscard]] float bfloat16_to_float(std::uint16_t bits) noexcept;

/// Whether `text` is well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates, at most
/// U+10FFFF).
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

}  // namespace sluice::server
