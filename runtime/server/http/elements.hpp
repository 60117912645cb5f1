/// Elements of one tensor, written as JSON (json_list.hpp reads them), and whether they are whole
/// where they are binary. A part of oip_codec.hpp, which says what is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// Appends the `count` elements of `source` as JSON, with commas between. Throws `internal` when
/// there are not as many bytes as that takes, `unsupported` for BYTES that are not UTF-8.
void append_elements(std::string& out, tensor const& source, std::uint64_t count);

/// Why `bytes` are not `count` elements of `type`, as half a sentence: "2 elements of FP32 take 8";
/// nothing if they are.
[[nodiscard]] std::optional<std::string> binary_fault(std::span<std::byte const> bytes,
                                                      datatype type, std::uint64_t count);

/// The number of elements of a shape without negative extents; none if 64 bits cannot count them.
[[nodiscard]] std::optional<std::uint64_t> element_count(std::vector<std::int64_t> const& shape);

/// Of a model's output. Throws `internal` for a shape that is none.
[[nodiscard]] std::uint64_t count_of_output(tensor const& output);
/// Throws `internal` if its bytes are not `count` elements.
void check_binary_output(tensor const& output, std::uint64_t count);

}  // namespace sluice::server
