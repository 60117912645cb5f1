/// The shared reserve: free chunks kept from training, so that a cold start finds memory without a
/// handover.
///
/// The reserve of size W lets cold starts drain the free memory down to W, then refills it to 2W in
/// one go; freed memory beyond 2W goes back to training. Between W and 2W nothing moves, so that a
/// single cold start and release does not cause a handover each way.
///
///   States:   steady ──free < W──► refilling ──free ≥ 2W──► steady
///
///   reserve keeper{chunk_bytes};
///   auto move = keeper.update({.free_bytes = usage.free_bytes, .size_bytes = w});
///   pool.set_reserve(move.keep_bytes);   // or act on reclaim_bytes / release_bytes
///
/// Pure: the caller moves the memory and reports the free bytes the next time. One thread at a
/// time.
#pragma once

#include <cstdint>
#include <span>

#include "scheduler/units.hpp"
#include "scheduler/warm_policy.hpp"

namespace sluice::scheduler {

class reserve {
 public:
  struct input {
    std::uint64_t free_bytes = 0;  ///< now free, chunks still being scrubbed included
    std::uint64_t size_bytes = 0;  ///< W; 0 keeps no reserve
  };
  struct move {
    std::uint64_t reclaim_bytes = 0;  ///< take from training, unhurried
    std::uint64_t release_bytes = 0;  ///< give to training
    /// Free bytes that training must not take: what remains free after the move.
    std::uint64_t keep_bytes = 0;
    bool refilling = false;
  };

  /// Throws `std::invalid_argument` for a chunk size of 0.
  explicit reserve(std::uint64_t chunk_bytes);

  /// At most one of `reclaim_bytes` and `release_bytes` is not zero; both are whole chunks.
  [[nodiscard]] move update(input const& now) noexcept;

 private:
  std::uint64_t chunk_bytes_;
  bool refilling_ = false;
};

/// A model that is not on the device now.
struct cold_model {
  std::uint64_t bytes = 0;
  double loads_per_s = 0.0;        ///< predicted
  double released_fraction = 1.0;  ///< of time, predicted
  /// Of its cold starts, the share that is in time only if the model had been held, and only if memory is free.
  double held_gain = 0.0;
  double free_gain = 0.0;
};

/// As `made` says.
[[nodiscard]] cold_model cold_model_of(warm_decision const& made, std::uint64_t bytes) noexcept;

/// W for these models: the size whose bytes bring most requests into time, less what as many of a model that is held instead would bring,
/// which needs no load at all; 0 if none brings more than that. At most `most_bytes`.
///
/// Cold starts come as a Poisson process. One finds its bytes free if those of the others that started since the reserve was filled, at most
/// `refill` ago, leave room for it: the sum of a Poisson number of models, by Panjer's recursion over 128 steps up to the bytes of all.
/// `is_kept`: there is a reserve now; it stays until it is a tenth short of its price.
[[nodiscard]] std::uint64_t reserve_size(std::span<cold_model const> models,
                                         std::uint64_t most_bytes, bool is_kept = false,
                                         seconds refill = seconds{1.0});

}  // namespace sluice::scheduler
