/// Elements of one tensor: JSON values ⇄ the bytes of an inference_service tensor. The numeric half
/// of oip_codec.hpp, which says what is accepted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/http/nested_list.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// Throws `invalid_argument`, naming `label` and the element, when one cannot be of `type`.
[[nodiscard]] std::vector<std::byte> elements_from_list(nested_list const& list, datatype type,
                                                        std::string_view label);

/// Appends the `count` elements of `source` as JSON, with commas between. Throws `internal` when
/// there are not as many bytes as that takes, `unsupported` for BYTES that are not UTF-8.
void append_elements(std::string& out, tensor const& source, std::uint64_t count);

/// Why `bytes` are not `count` elements of `type`, as half a sentence: "2 elements of FP32 take 8"; nothing if they are.
[[nodiscard]] std::optional<std::string> binary_fault(std::span<std::byte const> bytes,
                                                      datatype type, std::uint64_t count);

}  // namespace sluice::server
