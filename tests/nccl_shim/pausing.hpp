/// How a rank's device is paused again and again, beside the other ranks'; and what the environment says of a test's rank.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "abi/gate_api.h"

namespace sluice::nccl_shim::testing {

/// CLOCK_MONOTONIC nanoseconds.
[[nodiscard]] std::int64_t in(std::chrono::nanoseconds span);
[[nodiscard]] int number_in(char const* name, int otherwise);
/// For a device to come to rest: PATIENCE_MS.
[[nodiscard]] std::chrono::milliseconds patience();

class rank_that_pauses {
 public:
  /// The ranks meet in that file.
  rank_that_pauses(sluice_gate_api const& gate, int rank, int ranks, std::string const& file);

  /// Whether other ranks must be asked. If so, returns when this one is as far as they are.
  void may_pause(bool may) const;
  /// Pauses this rank's device so often; each pause ends when all ranks have been at rest, or at once (ALONE). It may pause
  /// only then (FICKLE). Ends the process if it does not come to rest, or launches in a pause.
  void now_and_then(int times) const;

  /// How often ranks have come to where they meet.
  [[nodiscard]] std::uint32_t came() const { return came_->load(); }
  void come() const { came_->fetch_add(1); }
  /// Comes to where all meet for the so manieth time, and waits for the others; false: in vain.
  [[nodiscard]] bool meet_others(std::uint32_t round) const;

 private:
  sluice_gate_api const& gate_;
  int rank_;
  int ranks_;
  std::atomic<std::uint32_t>* came_;  // in the file; mapped until the process ends
};

}  // namespace sluice::nccl_shim::testing
