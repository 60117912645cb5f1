/// A temporary file without a name that holds a model's weights while it is cold: it costs page
/// cache, which the kernel can drop or write back, and is gone when the process ends, however it
/// ends.
///
///   image_file image;
///   auto offset = image.append(bytes);
///   image.read(offset, bytes.size(), destination);
///
/// Not thread-safe for `append`; `read` may run in several threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server {

/// Where each tensor begins in an image and in memory: fit for vector loads and for coalesced
/// access on a GPU.
inline constexpr std::uint64_t weight_alignment = 256;

class image_file {
 public:
  /// Lies in $XDG_CACHE_HOME, else in /var/tmp. Throws `unavailable` if neither can be written to.
  image_file();

  /// Appends at the next aligned offset and returns it. Throws `out_of_memory` when the file system
  /// is full.
  std::uint64_t append(std::span<std::byte const> bytes);
  /// Up to the end of the last appended piece.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// Copies `count` bytes from `offset` on. Throws `internal` if the file cannot be read.
  void read(std::uint64_t offset, std::uint64_t count, std::byte* to) const;

 private:
  memhandover::unique_fd file_;
  std::uint64_t bytes_ = 0;
};

}  // namespace sluice::server
