/// Finding the broker of a runtime folder, or starting it.
///
///   auto presence = open_pool({.runtime_dir = dir, .pool_bytes = 4_GiB});
///   // Keep it: the pool stays while it is open.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/device/disk_room.hpp"

namespace sluice::memhandover {

struct broker_options {
  std::string runtime_dir{};    ///< empty: the default, see check_runtime_dir
  std::string backend{};        ///< "host", "cuda", or empty or "auto": cuda where there is a GPU
  std::optional<int> device{};  ///< CUDA ordinal, or number of a pool on the host; without one the
                                ///< broker's first pool is meant, which is of device 0 if there
                                ///< is none yet
  /// 0: half of the free host memory, or all but a headroom of the free device memory.
  std::uint64_t pool_bytes = 0;
  std::uint64_t chunk_bytes = 0;  ///< 0: 2 MiB on the host, 64 MiB on CUDA
  std::string sluice_binary{};  ///< program to start as `PROGRAM broker …`; empty: $SLUICE_BROKER,
                                ///< else `sluice` on PATH
  /// Host memory for what tenants park, if this starts the broker; 0: $SLUICE_HOST_COPY_BYTES, else none.
  std::uint64_t host_copy_bytes = 0;
  /// What of it lies on a disk beyond that, likewise; no bytes: $SLUICE_HOST_COPY_DISK_BYTES in the folder
  /// $SLUICE_HOST_COPY_DISK_PATH, else none.
  disk_wish host_copy_disk{};
};

/// Returns a connection to the broker, starting it first if none listens. While the connection is open, the
/// broker does not end for want of clients. Throws `unavailable` with the broker's own reason if it
/// cannot be started, `invalid_argument` for a bad folder.
[[nodiscard]] unique_fd ensure_broker(broker_options const& options);

/// A connection that keeps one pool while it is open, though nobody has joined it.
struct pool_presence {
  unique_fd connection;
  backend_kind backend = backend_kind::host;
  int device = 0;
};

/// Finds the pool that the options name, or has it made, by a broker that is started if none listens.
/// A pool that is there already stays as it is, whatever the options say of its size. Throws as
/// `ensure_broker`, and why there can be no such pool.
[[nodiscard]] pool_presence open_pool(broker_options const& options);

/// The process itself, `sluice broker`: makes or adopts pools and serves until nobody needs it.
/// `ready_fd` ≥ 0 gets one line when it listens, "ok" or why it cannot. Returns the exit code.
int broker_main(broker_options const& options, int ready_fd);

}  // namespace sluice::memhandover
