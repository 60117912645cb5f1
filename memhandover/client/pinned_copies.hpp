/// Makes a client's mapping of the host copies pinned memory of the CUDA driver, piece by piece, as their pages
/// come to be present: a copy out of pageable memory takes five times as long. Last comes what is staged on the way to a disk.
///
/// A piece is whole slots, and takes the driver about 2 ms; so who waits for the thread meanwhile waits no longer.
///
///   pinned_copies pinned{*share, driver, device};
///   while (auto const next = pinned.advance()) {   // null when all is done, or cannot be
///     // … wait so long, do something else …
///   }
///
/// Source: cuMemHostRegister in the CUDA driver API. Thread-safety: `advance` belongs to one thread, `slots` to any.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "memhandover/client/host_copy_share.hpp"

struct CUctx_st;

namespace sluice::memhandover {

struct cuda_driver;

class pinned_copies {
 public:
  /// `share` outlives this object.
  pinned_copies(host_copy_share& share, std::shared_ptr<cuda_driver const> driver,
                int device) noexcept;
  pinned_copies(pinned_copies const&) = delete;
  pinned_copies& operator=(pinned_copies const&) = delete;
  /// What the driver has is taken from it; one that has ended keeps nothing. Does nothing in a forked child.
  ~pinned_copies();

  /// Registers the next piece, if its pages are present. When to come again; nothing when there is no more to do: all
  /// slots are pinned, or the driver has refused, which is logged.
  [[nodiscard]] std::optional<std::chrono::milliseconds> advance();

  /// This many slots, from the first one on, are pinned.
  [[nodiscard]] std::uint32_t slots() const noexcept { return slots_.load(); }
  /// All are that there are in memory, and what is staged.
  [[nodiscard]] bool has_all() const noexcept;

 private:
  void use_context();
  void pin(std::byte* where, std::size_t bytes) const;
  [[nodiscard]] std::uint32_t slots_of_a_piece() const noexcept;

  host_copy_share& share_;
  std::shared_ptr<cuda_driver const> driver_;
  int device_;
  pid_t owner_;
  CUctx_st* context_ = nullptr;  ///< in which the driver pins
  bool refused_ = false;
  std::atomic<bool> staging_{false};  ///< it is pinned
  std::atomic<std::uint32_t> slots_{0};
};

}  // namespace sluice::memhandover
