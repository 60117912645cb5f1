/// The operator of the host that the calling thread is in, for whoever waits in it for other processes.
///
/// Thread-safety: of the calling thread.
#pragma once

namespace sluice::step {

struct process_state;

/// Whether a compute pause holds whoever would begin an operator.
[[nodiscard]] bool is_held(process_state const& state);

/// From here until the other the thread computes nothing, so that the arena can be taken.
void leave_operator(process_state& state);
void come_back_to_operator(process_state& state);

/// Whether from here on the thread makes what other ranks wait for: then nothing in that waits for the gate, a pause, or the
/// pool.
void make_granted(process_state& state, bool makes) noexcept;

}  // namespace sluice::step
