/// The C boundary, host: memory of torch's CPU allocator, and the operators that use it.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/host_operators.hpp"
#include "runtime/step/process_state.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;

thread_local bool thread_in_arena = false;

/// Operators that a thread is in, one within the other; whether the gate counts the outermost, and as what.
struct nesting {
  int operators = 0;
  bool counted = false;
  operator_memory uses = operator_memory::lasting;
};
thread_local nesting here;
/// Of those who have called, from within an operator or not, what now runs: autograd, which runs a backward of its
/// own in a node of another one, or a function in Python.
thread_local std::vector<nesting> callers;
/// It counts as one operator, whatever it consists of.
thread_local bool makes_granted = false;

/// The process that joins at present, 0 if none does; in a child that was forked meanwhile, its parent.
std::atomic<pid_t> joins{0};

/// While it lives no other thread joins.
class turn_to_join {
 public:
  turn_to_join() {
    auto const self = ::getpid();
    for (auto other = joins.load(); other == self || !joins.compare_exchange_weak(other, self);) {
      if (other == self) {
        joins.wait(self);
        other = joins.load();
      }
    }
  }
  turn_to_join(turn_to_join const&) = delete;
  turn_to_join& operator=(turn_to_join const&) = delete;
  ~turn_to_join() {
    joins.store(0);
    joins.notify_all();
  }
};

/// A compute pause holds the thread here, unless it is an engine's.
void await_pause_end(process_state const& state) {
  if (state.work) {
    return;
  }
  while (is_held(state)) {
    timespec const slice{0, 50'000};
    ::nanosleep(&slice, nullptr);
  }
}

void begin_operator(process_state& state) {
  state.memory->operators().operator_begin(here.uses);
  if (state.operators_watch != nullptr) {
    state.operators_watch->operator_begins();
  }
}

}  // namespace

bool is_held(process_state const& state) {
  auto const limit =
      state.memory->client().view().header().pause_until_ns.load(std::memory_order_acquire);
  return limit != 0 && monotonic_ns() < static_cast<std::int64_t>(limit) &&
         !state.memory->urgent();  // what the commit waits for may be another thread
}

void leave_operator(process_state& state) {
  if (here.counted && !makes_granted) {
    state.memory->operators().operator_end(here.uses);
  }
}

void come_back_to_operator(process_state& state) {
  if (here.counted && !makes_granted) {
    begin_operator(state);
  }
}

void make_granted(process_state& state, bool makes) noexcept {
  state.makes_granted.store(makes);
  makes_granted = makes;
}

}  // namespace sluice::step

using namespace sluice::step;

extern "C" {

int sluice_join_host(void) {
  turn_to_join const turn;  // a thread may allocate first while another makes a step
  auto* const already = sharing();
  if (already != nullptr && already->backend == sluice::memhandover::backend_kind::host) {
    return SLUICE_OK;
  }
  return guarded([already] {
    if (already != nullptr) {
      throw sluice::error{sluice::error_kind::unsupported,
                          "it is the GPU's memory that this process shares, not the processor's"};
    }
    refuse_child();
    auto options = options_of_job("host");
    auto state = std::make_unique<process_state>();
    options.grow_by = 8;
    options.persistent = sluice::memhandover::chunk_space::backing::process;
    state->memory = std::make_unique<training_memory>(std::move(options));
    share(std::move(state));
  });
}

void sluice_enter(int enter) {
  thread_in_arena = enter != 0;
}

int sluice_host_alloc(void** address, size_t bytes) {
  // Small blocks stay with the system's allocator: they are many, and together they are little.
  constexpr std::size_t smallest_in_arena = 4096;
  constexpr std::size_t smallest_persistent = 65536;
  auto* const state = sharing();
  // What is granted must be made, whether the pool has memory for it or not. Gloo allocates in threads of its own, too.
  if (state != nullptr && state->makes_granted.load()) {
    return SLUICE_FAILED;
  }
  if (state == nullptr || bytes < (thread_in_arena ? smallest_in_arena : smallest_persistent)) {
    return SLUICE_FAILED;
  }
  if (thread_in_arena) {
    return guarded([&] { *address = state->memory->allocate_arena(bytes); });
  }
  // Who waits for the pool computes nothing: what the pool is to get from this job must not wait for it.
  bool const leaves = here.uses == operator_memory::lasting;
  if (leaves) {
    leave_operator(*state);
  }
  int const status = guarded([&] { *address = state->memory->allocate_persistent(bytes); });
  if (leaves) {
    come_back_to_operator(*state);
  }
  return status;
}

int sluice_host_free(void* address) {
  if (auto const* const parents = inherited()) {
    return parents->memory->owns(address) ? 1 : 0;  // it stays as it is until the child ends
  }
  auto* const state = sharing();
  if (state == nullptr) {
    return 0;
  }
  int freed = 0;
  (void)guarded([&] { freed = state->memory->free(static_cast<std::byte*>(address)) ? 1 : 0; });
  return freed;
}

void sluice_host_boundary(void) {
  if (auto* const state = sharing()) {
    await_pause_end(*state);
  }
}

void sluice_host_operator_begin(void) {
  auto* const state = sharing();
  if (here.operators++ > 0 || state == nullptr || makes_granted) {
    return;
  }
  await_pause_end(*state);
  here.uses = thread_in_arena ? operator_memory::arena : operator_memory::lasting;
  begin_operator(*state);
  here.counted = true;
}

void sluice_host_operator_end(void) {
  here.operators = std::max(here.operators, 1) - 1;  // one may have begun before anybody looked
  if (here.operators == 0 && here.counted) {
    here.counted = false;
    if (auto* const state = sharing()) {
      state->memory->operators().operator_end(here.uses);
    }
  }
}

void sluice_host_caller_begin(void) {
  if (auto* const state = sharing()) {
    leave_operator(*state);
  }
  callers.push_back(std::exchange(here, {}));
}

void sluice_host_caller_end(void) {
  if (callers.empty()) {
    return;  // it had begun before anybody looked
  }
  here = callers.back();
  callers.pop_back();
  if (auto* const state = sharing()) {
    come_back_to_operator(*state);
  }
}
}
