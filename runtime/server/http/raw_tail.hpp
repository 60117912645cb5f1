/// The bytes behind a request's JSON, which its inputs with the parameter `binary_data_size` take one after the other.
///
///   raw_tail tail{bytes, body};   // the tensors are parts of the body, and keep it
///   auto first = tail.take(raw);  // an element of the request's inputs; nothing if it takes none
///   tail.expect_end();
///
/// Throws `invalid_argument` for sizes that are none, or that the bytes do not have.
///
/// Source: Triton's binary_tensor_data extension.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>

#include "runtime/server/http/oip_reader.hpp"
#include "runtime/server/inference/tensor_bytes.hpp"

namespace sluice::server {

class raw_tail {
 public:
  raw_tail(std::span<std::byte> bytes, std::shared_ptr<void const> keeper)
      : bytes_(bytes), keeper_(std::move(keeper)) {}

  [[nodiscard]] std::optional<tensor_bytes> take(raw_tensor const& input);
  void expect_end() const;

 private:
  std::span<std::byte> bytes_;
  std::shared_ptr<void const> keeper_;
  std::size_t taken_ = 0;
};

}  // namespace sluice::server
