/// What this process has around NCCL: the gate, the board, and whether NCCL itself is calling.
///
/// Thread-safety: everything may be called from any thread.
#pragma once

#include "abi/gate_api.h"
#include "nccl_shim/agreement/board.hpp"

namespace sluice::nccl_shim {

/// The gate's table; nullptr if there is no gate, or this process is not to share.
[[nodiscard]] sluice_gate_api const* gate() noexcept;

/// Whether calls are to be looked at: there is a gate, and the calling thread is not inside of NCCL.
[[nodiscard]] bool is_watching() noexcept;

/// Whether the address lies in memory of the pool.
[[nodiscard]] bool holds(void const* address) noexcept;

/// Waits until all calls have been made that were left to the gate.
void flush() noexcept;

/// Whether a thread waits for what was left to the gate, to make a communicator, say: the other ranks may be there already.
[[nodiscard]] bool is_flushing() noexcept;

/// Where this process says whom it waits for; nullptr if it cannot. From the first communicator on.
[[nodiscard]] board* the_board() noexcept;

/// While it lives, what the calling thread calls is NCCL's own.
class inside_nccl {
 public:
  inside_nccl() noexcept;
  inside_nccl(inside_nccl const&) = delete;
  inside_nccl& operator=(inside_nccl const&) = delete;
  ~inside_nccl();
  [[nodiscard]] static bool here() noexcept;
};

}  // namespace sluice::nccl_shim
