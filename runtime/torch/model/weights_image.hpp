/// A model's weights on the host, one storage after the other, ready to be copied into memory that a load lends.
/// It is made from the model's file step by step. Includes torch; only for the files that torch_model.hpp hides.
///
///   weights_image image{parts, file, at::kCUDA};
///   while (image.ready_bytes() < image.bytes()) {
///     image.extend();
///   }
///   image.copy(offset, bytes, destination);
///
/// With a CPU it is an unlinked file (image_file.hpp), which costs page cache only; with a GPU pinned memory in
/// blocks of a step each. What is not ready yet `copy` reads from the model's file.
///
/// Thread-safety: none, but for `bytes` and `ready_bytes`, which any thread may ask for.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "runtime/server/hosting/image_file.hpp"
#include "runtime/server/hosting/model_file.hpp"

namespace sluice::server {

class weights_image {
 public:
  /// How far one `extend` goes: some milliseconds, of which most are the driver's. A power of two, to which torch
  /// would round pinned memory.
  static constexpr std::uint64_t step_bytes = std::uint64_t{8} << 20U;

  struct part {
    std::uint64_t offset = 0;  ///< in the image; ascending
    std::uint64_t bytes = 0;
    std::uint64_t at = 0;  ///< in the model's file, unless it is in memory
    c10::Storage held;     ///< that memory; given up as soon as it is in the image
  };

  weights_image(std::vector<part> parts, std::shared_ptr<model_file const> file, at::Device device);

  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::uint64_t ready_bytes() const noexcept { return ready_; }
  /// Whether what is ready of a GPU's image lies in pinned memory, as it should.
  [[nodiscard]] bool pinned() const noexcept { return pinned_; }

  /// Makes the next step ready. Throws what reading the model's file throws, and `out_of_memory` if there is no
  /// room; then it is as far as before.
  void extend();
  /// Copies to memory of the device. With a GPU it is only begun; what it reads stays until it has ended.
  void copy(std::uint64_t offset, std::uint64_t bytes, std::byte* to) const;

 private:
  void read_source(part const& from, std::uint64_t skipped, std::span<std::byte> to) const;
  void fill(std::uint64_t offset, std::span<std::byte> to) const;
  [[nodiscard]] at::Tensor make_block(std::uint64_t bytes);
  void copy_ready(std::uint64_t offset, std::uint64_t bytes, std::byte* to) const;
  void send(at::Tensor const& from, std::byte* to) const;

  std::vector<part> parts_;
  std::shared_ptr<model_file const> const file_;
  at::Device const device_;
  std::uint64_t bytes_ = 0;
  std::atomic<std::uint64_t> ready_ = 0;
  std::optional<image_file> on_disk_;  // with a CPU
  std::vector<at::Tensor> blocks_;     // with a GPU
  bool pinned_ = true;
};

}  // namespace sluice::server
