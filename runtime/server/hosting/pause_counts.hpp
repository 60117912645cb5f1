/// How often and how long training has been held, as the status shows it.
#pragma once

#include <chrono>
#include <cstdint>

namespace sluice::server {

/// Compute pauses since the server started.
struct pause_counts {
  double min_share = 0.0;               ///< what training is promised
  std::uint64_t pauses = 0;             ///< begun
  std::uint64_t announced = 0;          ///< requests that training was told of before they computed
  std::uint64_t cut_short = 0;          ///< of these, ended by that promise although still wanted
  std::chrono::nanoseconds held{};      ///< in which launches were held
  std::chrono::nanoseconds withheld{};  ///< in which they would have been, but for the promise
  std::chrono::nanoseconds window{};    ///< over which it is kept
  std::chrono::nanoseconds held_in_window{};  ///< the latest
  /// In which the device has worked for inference, as far as that is seen; short gaps between two works included.
  std::chrono::nanoseconds busy{};
};

}  // namespace sluice::server
