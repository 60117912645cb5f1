/// The C boundary: what the next micro-batch is like.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>

#include "runtime/step/process_state.hpp"

using namespace sluice::step;

extern "C" {

int sluice_plan_start(uint32_t largest, int fixed, int may_recompute) {
  auto* const state = sharing();
  if (state == nullptr) {
    return SLUICE_FAILED;
  }
  return guarded([&] {
    std::lock_guard const lock{state->planner_mutex};
    state->planner = std::make_unique<sluice::scheduler::recomputing_planner>(
        sluice::scheduler::batch_planner::settings{largest, fixed != 0}, may_recompute != 0);
  });
}

uint32_t sluice_plan_next(uint32_t remaining, uint64_t* needed_bytes, int* recompute) {
  auto* const state = sharing();
  *needed_bytes = 0;
  *recompute = 0;
  if (state == nullptr || state->planner == nullptr) {
    return remaining;
  }
  std::lock_guard const lock{state->planner_mutex};
  state->kept_when_planned = state->memory->kept_bytes();
  auto const [next, again] = state->planner->plan({remaining, state->memory->capacity_bytes()});
  *needed_bytes = next.needed_bytes;
  *recompute = again ? 1 : 0;
  return next.wait ? 0 : static_cast<uint32_t>(next.samples);
}

void sluice_plan_committed(uint32_t samples, int recomputed, uint64_t bytes,
                           uint64_t at_first_bytes, double seconds) {
  auto* const state = sharing();
  if (state != nullptr && state->planner != nullptr) {
    std::lock_guard const lock{state->planner_mutex};
    state->planner->committed(recomputed != 0, samples, bytes, sluice::scheduler::seconds{seconds},
                              at_first_bytes);
  }
}

void sluice_plan_discarded(uint32_t samples, int recomputed, int arena_state) {
  auto* const state = sharing();
  if (state != nullptr && state->planner != nullptr) {
    std::lock_guard const lock{state->planner_mutex};
    if (arena_state == SLUICE_ARENA_STARVED) {
      // Copies of what it changes outside of the arena were not there when it was planned, and will not be when the next is.
      auto const kept = state->memory->kept_bytes();
      auto const more = kept - std::min(kept, state->kept_when_planned);
      state->planner->out_of_memory(recomputed != 0, samples,
                                    state->memory->starved_bytes() + more);
    } else {
      state->planner->discarded(samples);
    }
  }
}
}
