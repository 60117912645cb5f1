/// A sealed file of bytes that another process has written.
///
///   auto const file = std::make_shared<received_file>(descriptor, size);
///   tensor_bytes second{file, 64, 8};
///
/// It is mapped when somebody looks: pages that are mapped, touched and unmapped cost several times as much as they do to read. Where
/// descriptors are many it is mapped at once, and holds none.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/inference/tensor_bytes.hpp"

namespace sluice::server::detail {

class received_file final : public distant_bytes {
 public:
  /// `file` stays the caller's. Throws if it can be neither kept nor mapped.
  received_file(int file, std::size_t bytes);
  received_file(received_file const&) = delete;
  received_file& operator=(received_file const&) = delete;
  ~received_file() override;

  /// For this process alone: what it writes there nobody else sees.
  [[nodiscard]] std::byte* bring() override;
  void read(std::size_t begin, std::span<std::byte> to) override;

 private:
  memhandover::unique_fd file_;
  std::size_t const bytes_;
  std::mutex mapping_;
  std::atomic<std::byte*> mapped_{nullptr};
};

}  // namespace sluice::server::detail
