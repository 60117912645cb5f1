/// The table that the gate offers to the runtime: see abi/gate_api.h.
#include <cerrno>
#include <new>

#include "abi/gate_api.h"
#include "runtime/gate/agreed_calls.hpp"
#include "runtime/gate/agreed_graphs.hpp"
#include "runtime/gate/attach.hpp"
#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/launch_watch.hpp"

using namespace sluice::gate;

namespace {

void* real_function(char const* name) {
  the_gate().prepare();
  return driver_function(name);
}

int close_gate(std::int64_t deadline_ns) {
  return the_gate().close(deadline_ns);
}

int wait_until_idle(std::int64_t deadline_ns) {
  try {
    return the_gate().inert() || streams().wait_idle(deadline_ns, true) ? 0 : ETIMEDOUT;
  } catch (std::bad_alloc const&) {
    return ENOMEM;
  }
}

constexpr sluice_gate_api table = {
    .size = sizeof(sluice_gate_api),
    .real = real_function,
    .close = close_gate,
    .wait_idle = wait_until_idle,
    .open = [] { the_gate().open(); },
    .abort_begin = [] { the_gate().set_aborting(true); },
    .abort_end = [] { the_gate().set_aborting(false); },
    .exempt_thread = [](int exempt) { this_thread().exempt = exempt != 0; },
    .protect_thread = [](int protect) { this_thread().protect = protect != 0; },
    .set_pause_word =
        [](std::uint64_t const volatile* until_ns) { the_gate().set_pause_word(until_ns); },
    .set_urgent = [](int urgent) { the_gate().set_urgent(urgent != 0); },
    .set_run_ahead =
        [](int64_t nanoseconds) {
          the_gate().set_run_ahead(std::chrono::nanoseconds{nanoseconds});
        },
    .launches = all_launches,
    .expendable_thread =
        [](int expendable) {
          thread_slot& self = this_thread();
          self.expendable = expendable != 0;
          self.micro_batch += self.expendable ? 1 : 0;
        },
    .unit_ended = []() -> int64_t { return streams().unit_ended_ns(); },
    .set_demand_word = [](uint64_t const volatile* word) { the_gate().set_demand_word(word); },
    .demand_answered = [](uint64_t demand) { the_gate().demand_answered(demand); },
    .demand_seen = []() -> int64_t { return the_gate().demand_seen_ns(); },
    .set_deferred = [](int deferred) { the_gate().set_deferred(deferred != 0); },
    .flush = [] { flush_if_deferring(std::nullopt); },
    .deferred = []() -> uint64_t { return deferred_calls(); },
    .flushes =
        [](size_t index, sluice_gate_flushes* of) {
          if (index >= symbol_count) {
            return 0;
          }
          flush_count const& found = flushes_by(static_cast<symbol>(index));
          *of = {symbols[index].name, found.times.load(std::memory_order_relaxed),
                 found.waited_ns.load(std::memory_order_relaxed)};
          return 1;
        },
    .commit_begin = [](int (*decide)(void*), void* of) -> int {
      return the_commit().begin(decide, of) ? 1 : 0;
    },
    .commit_end = [](void (*made)(void*), void* of) { the_commit().close(made, of); },
    .commit_resolve = [](int64_t deadline_ns) -> int {
      std::optional<bool> const counts = the_commit().resolve(deadline_ns);
      return counts.has_value() ? static_cast<int>(*counts) : -1;
    },
    .mark_units =
        [](int64_t nanoseconds) { streams().mark_units(std::chrono::nanoseconds{nanoseconds}); },
    .long_unit = [](size_t index, sluice_gate_long_unit* of) -> int {
      std::optional<long_unit> const found = streams().longest_unit(index);
      if (!found) {
        return 0;
      }
      *of = {};
      found->name.copy(of->name, sizeof(of->name) - 1);
      of->nanoseconds = found->takes.count();
      of->times = found->times;
      return 1;
    },
    .commit_made = [](int64_t deadline_ns) { return the_commit().await_end(deadline_ns) ? 1 : 0; },
    .make_agreed = [](sluice_agreed_call const* call) -> int { return make_agreed(*call); },
    .make_agreed_now = [](sluice_agreed_call const* call) -> int { return make_agreed_now(*call); },
    .micro_batch = []() -> uint64_t {
      thread_slot const& self = this_thread();
      return self.expendable ? self.micro_batch : 0;
    },
    .set_agreement = set_agreement,
    .agreement = agreement,
    .holds = [](uint64_t address) -> int {
      sluice_runtime_api const* const runtime = sharing_runtime();
      return runtime != nullptr ? runtime->holds(address) : 0;
    },
    .attach_to_capture = [](void* stream, void* held) -> int {
      return attach_to_capture(static_cast<CUstream>(stream), held) ? 1 : 0;
    },
    .enter_at_once = enter_at_once,
    .leave = leave,
    .wait_launched = wait_for_launches,
    .watch_launches = [](sluice_launch_watcher const* watcher) -> int {
      return the_launch_watch().start(*watcher) ? 0 : -1;
    },
    .set_announcement_word =
        [](uint64_t const volatile* until_ns) { the_gate().set_announcement_word(until_ns); },
    .offer_memory = [](sluice_runtime_api const* of) -> int { return offer_memory(of) ? 0 : -1; },
    .set_parked = [](int parked) { the_gate().set_parked(parked != 0); },
    .close_all = [](int64_t deadline_ns) { return the_gate().close_all(deadline_ns); },
};

}  // namespace

/// The gate's table, for the runtime and for tests that reach the preloaded library by `dlsym`.
SLUICE_DRIVER_CALL sluice_gate_api const* sluice_gate_table() {
  return &table;
}
