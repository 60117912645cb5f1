/// The C boundary: micro-batches, and torch's pluggable allocator for what they allocate.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/process_state.hpp"

namespace sluice::step {
namespace {

/// Whether what this thread launches may be dropped with the micro-batch.
void set_expendable(process_state const& state, bool expendable) {
  if (state.gate_table != nullptr) {
    state.gate_table->expendable_thread(expendable ? 1 : 0);
  }
}

std::int64_t deadline_in(std::uint32_t timeout_ms) {
  std::chrono::nanoseconds const patience = std::chrono::milliseconds{timeout_ms};
  return memhandover::monotonic_ns() + patience.count();
}

}  // namespace
}  // namespace sluice::step

using namespace sluice::step;

extern "C" {

int sluice_serving(void) {
  auto* const state = sharing();
  return state != nullptr && state->memory->client().view().header().serving_now.load() != 0 ? 1
                                                                                             : 0;
}

int sluice_begin(uint32_t micro_batch, uint32_t global_batch) {
  auto* const state = sharing();
  if (state == nullptr) {
    return guarded([] {
      refuse_child();
      throw sluice::error{sluice::error_kind::unsupported, "this process does not share the pool"};
    });
  }
  auto& box = state->memory->client().mailbox();
  box.micro_batch.store(micro_batch, std::memory_order_relaxed);
  box.global_batch.store(global_batch, std::memory_order_relaxed);
  bound_run_ahead(*state);
  int const status = guarded([&] { state->memory->begin(); });
  set_expendable(*state, true);
  return status;
}

uint64_t sluice_generation(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->generation();
}

int sluice_arena_state(void) {
  auto* const state = sharing();
  return state == nullptr ? SLUICE_ARENA_SOUND : static_cast<int>(state->memory->state());
}

int sluice_commit_begin(int may_defer) {
  auto* const state = sharing();
  using sluice::step::commit_start;
  auto const start =
      state == nullptr ? commit_start::taken_away : state->memory->commit_begin(may_defer != 0);
  if (start == commit_start::taken_away) {
    return 0;
  }
  set_expendable(*state, false);
  if (state->gate_table != nullptr) {
    state->gate_table->protect_thread(1);
  }
  return start == commit_start::begun ? 1 : 2;
}

void sluice_commit_end(uint32_t samples, int outlived) {
  auto* const state = sharing();
  if (state == nullptr) {
    return;
  }
  state->samples_in_commit = samples;
  (void)guarded([&] { state->memory->commit_end(outlived != 0); });
  if (state->gate_table != nullptr) {
    state->gate_table->protect_thread(0);
  }
}

int sluice_commit_resolve(uint32_t timeout_ms) {
  auto* const state = sharing();
  if (state == nullptr) {
    return 0;
  }
  if (state->gate_table != nullptr) {
    state->gate_table->protect_thread(0);
  }
  auto const counts = state->memory->commit_resolve(deadline_in(timeout_ms));
  if (!counts.value_or(false)) {
    return counts.has_value() ? 0 : -1;
  }
  auto& box = state->memory->client().mailbox();
  box.samples.fetch_add(state->samples_in_commit, std::memory_order_relaxed);
  box.commits.fetch_add(1, std::memory_order_relaxed);
  return 1;
}

int sluice_commit_made(uint32_t timeout_ms) {
  auto* const state = sharing();
  return state == nullptr || state->memory->await_commit(deadline_in(timeout_ms)) ? 1 : 0;
}

void sluice_work_together(int together) {
  if (auto* const state = sharing(); state != nullptr) {
    state->memory->work_together(together != 0);
  }
}

int sluice_end_with(void* communicator) {
  auto* const state = sharing();
  return state != nullptr && state->memory->end_with(communicator) ? 1 : 0;
}

void sluice_discard(void) {
  auto* const state = sharing();
  if (state == nullptr) {
    return;
  }
  set_expendable(*state, false);
  state->memory->client().mailbox().discards.fetch_add(1, std::memory_order_relaxed);
  (void)guarded([&] { state->memory->discard(); });
}

uint64_t sluice_discarded_ns(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->client().mailbox().discarded_ns.load();
}

int64_t sluice_reopened_ns(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->reopened_ns();
}

uint64_t sluice_survivors(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->survivors();
}

uint64_t sluice_arena_capacity(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->capacity_bytes();
}

uint64_t sluice_arena_peak(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->peak_bytes();
}

uint64_t sluice_pool_bytes(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->client().view().shape().bytes();
}

uint64_t sluice_reachable_bytes(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->reachable_bytes();
}

char const* sluice_shortage(void) {
  static thread_local std::string text;
  auto* const state = sharing();
  if (state == nullptr || guarded([&] { text = state->memory->shortage(); }) != SLUICE_OK) {
    text.clear();
  }
  return text.c_str();
}

int sluice_wait_memory(uint64_t bytes, uint32_t timeout_ms) {
  auto* const state = sharing();
  return state != nullptr &&
                 state->memory->wait_capacity(bytes, std::chrono::milliseconds{timeout_ms})
             ? 1
             : 0;
}

void* sluice_arena_alloc(ssize_t bytes, int /*device*/, void* /*stream*/) {
  auto* const state = sharing();
  if (state == nullptr) {
    return nullptr;
  }
  std::byte* where = nullptr;
  (void)guarded([&] { where = state->memory->allocate_arena(static_cast<std::size_t>(bytes)); });
  return where;
}

void sluice_arena_free(void* address, ssize_t /*bytes*/, int /*device*/, void* /*stream*/) {
  if (auto* const state = sharing()) {
    // What is freed of the arena stays mapped for the next micro-batch. Of a former one it may be
    // unmapped.
    if (state->gate_table != nullptr && state->memory->is_former(address)) {
      state->gate_table->wait_launched();
    }
    (void)guarded([&] { state->memory->free(static_cast<std::byte*>(address)); });
  }
}
}
