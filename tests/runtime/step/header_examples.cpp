/// The examples in the headers of runtime/step/ and of its tests, word for word: compiled, never run.
#include <sys/types.h>

#include <cerrno>

#include "abi/gate_api.h"
#include "memhandover/allocation/chunk_space.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/chunk_stock.hpp"
#include "runtime/step/run_ahead_choice.hpp"
#include "tests/memhandover/failing_allocations.hpp"
#include "tests/runtime/step/injected_calls.hpp"

namespace sluice::step::header_examples {

using memhandover::lifetime;

void of_chunk_stock(chunk_stock& stock, memhandover::chunk_space& arena) {
  stock.collect();
  if (stock.size() >= 3) {
    stock.map_into(arena, 3, lifetime::revocable);
  }
  stock.add(arena.shrink(2));
}

void of_run_ahead_choice(sluice_gate_api const& gate, memhandover::ledger_view const& view) {
  auto const own = run_ahead_of_job(environment("SLUICE_RUN_AHEAD_US"));
  gate.set_run_ahead(choose_run_ahead(view.header(), own).count());
}

}  // namespace sluice::step::header_examples

namespace sluice::test::header_examples {

void of_failing_allocations(pid_t thread) {
  fail_allocation(thread, 3);
  if (!allocation_failed()) {
  }
}

void of_injected_calls() {
  fail_call("mmap", 3, ENOMEM);
  if (!call_failed()) {
  }
}

}  // namespace sluice::test::header_examples
