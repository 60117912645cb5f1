#include "runtime/server/http/raw_tail.hpp"

#include <fmt/format.h>

#include <cstdint>

#include "memhandover/base/error.hpp"

namespace sluice::server {

std::optional<tensor_bytes> raw_tail::take(raw_tensor const& input) {
  auto const found = input.parameters.find("binary_data_size");
  if (found == input.parameters.end()) return std::nullopt;
  if (!found->second.is_number_unsigned()) {
    throw error{error_kind::invalid_argument,
                fmt::format("{} has a binary_data_size of {}; it takes a number of bytes",
                            input.label, found->second.dump())};
  }
  if (input.data) {
    throw error{
        error_kind::invalid_argument,
        fmt::format("{} has both data and binary_data_size; give one of them", input.label)};
  }
  auto const size = found->second.get<std::uint64_t>();
  auto const left = bytes_.size() - taken_;
  if (size > left) {
    throw error{
        error_kind::invalid_argument,
        fmt::format("{} has a binary_data_size of {}, but {} of the {} bytes behind the JSON are "
                    "left; send its bytes there, and the length of the JSON as "
                    "Inference-Header-Content-Length",
                    input.label, size, left, bytes_.size())};
  }
  auto const part = bytes_.subspan(taken_, size);
  taken_ += size;
  return tensor_bytes{keeper_, part};
}

void raw_tail::expect_end() const {
  if (taken_ == bytes_.size()) return;
  throw error{error_kind::invalid_argument,
              fmt::format("there are {} bytes behind the JSON, of which the inputs take {}; the "
                          "binary_data_size of all inputs together must be {}",
                          bytes_.size(), taken_, bytes_.size())};
}

}  // namespace sluice::server
