/// All chunks of a pool, one after the other at one address, while the object lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "memhandover/device/device_memory.hpp"

namespace sluice::memhandover::detail {

class whole_view {
 public:
  /// `memory` must outlive this object. Throws as `device_memory::map`.
  explicit whole_view(device_memory& memory) : memory_(memory) {
    std::vector<std::uint32_t> all(memory.shape().chunk_count);
    std::iota(all.begin(), all.end(), 0U);
    data_ = memory.map_anew(all);
  }
  whole_view(whole_view const&) = delete;
  whole_view& operator=(whole_view const&) = delete;
  ~whole_view() { memory_.unmap_and_release(data_, memory_.shape().chunk_count); }
  [[nodiscard]] std::byte* at(std::uint32_t chunk) const noexcept {
    return data_ + chunk * memory_.shape().chunk_bytes;
  }

 private:
  device_memory& memory_;
  std::byte* data_ = nullptr;
};

}  // namespace sluice::memhandover::detail
