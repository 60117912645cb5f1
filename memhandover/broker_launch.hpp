/// Finding the broker of a runtime folder, or starting it.
///
///   auto presence = ensure_broker({.runtime_dir = dir, .pool_bytes = 4_GiB});   // keep it: the
///   broker stays while it is open
#pragma once

#include <cstdint>
#include <string>

#include "memhandover/unique_fd.hpp"

namespace sluice::memhandover {

struct broker_options {
  std::string runtime_dir{};  ///< empty: the default, see prepare_runtime_dir
  std::string backend{};      ///< "host", "cuda", or empty or "auto": cuda where there is a GPU
  int device = 0;             ///< CUDA ordinal
  std::uint64_t pool_bytes =
      0;  ///< 0: half of the free host memory, or all but a headroom of the free device memory
  std::uint64_t chunk_bytes = 0;  ///< 0: 2 MiB on the host, 64 MiB on CUDA
  std::string sluice_binary{};  ///< program to start as `PROGRAM broker …`; empty: $SLUICE_BROKER,
                                ///< else `sluice` on PATH
};

/// Returns a connection to the broker, starting it first if none listens. The pool of a running
/// broker stays as it is, whatever the options say of its size. While the connection is open, the
/// broker does not end for want of clients. Throws `unavailable` with the broker's own reason if it
/// cannot be started, `invalid_argument` for a bad folder.
[[nodiscard]] unique_fd ensure_broker(broker_options const& options);

/// The process itself, `sluice broker`: makes or adopts the pool and serves until nobody needs it.
/// `ready_fd` ≥ 0 gets one line when it listens, "ok" or why it cannot. Returns the exit code.
int broker_main(broker_options const& options, int ready_fd);

}  // namespace sluice::memhandover
