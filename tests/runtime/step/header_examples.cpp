/// The examples in the headers of runtime/step/ and of its tests, word for word: compiled, never run.
#include <sys/types.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

#include "abi/gate_api.h"
#include "memhandover/allocation/chunk_space.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/client/elastic_space.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/device/device_memory.hpp"
#include "memhandover/ledger/chunk_history.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "runtime/step/chunk_stock.hpp"
#include "runtime/step/demand_answers.hpp"
#include "runtime/step/fork_copies.hpp"
#include "runtime/step/job_parking.hpp"
#include "runtime/step/micro_batch_cycle.hpp"
#include "runtime/step/operator_gate.hpp"
#include "runtime/step/operator_watch.hpp"
#include "runtime/step/rank_absence.hpp"
#include "runtime/step/run_ahead_choice.hpp"
#include "runtime/step/training_memory.hpp"
#include "runtime/step/training_spaces.hpp"
#include "tests/memhandover/failing_allocations.hpp"
#include "tests/runtime/step/injected_calls.hpp"

namespace sluice::step::header_examples {

using memhandover::client_kind;
using memhandover::demand;
using memhandover::lifetime;
using memhandover::tenant_client;

void of_operator_watch(memhandover::work_report& report, operator_gate& operators) {
  auto& watch = *new operator_watch{report, operators};
  operators.operator_begin();
  watch.operator_begins();
  operators.operator_end();
}

void of_chunk_stock(chunk_stock& stock, memhandover::chunk_space& arena) {
  stock.collect();
  if (stock.size() >= 3) {
    stock.map_into(arena, 3, lifetime::revocable);
  }
  stock.add(arena.shrink(2));
}

void of_demand_answers(std::mutex& mutex, micro_batch_cycle& cycle, operator_gate& operators,
                       memhandover::broker_options const& broker, training_spaces& spaces,
                       memhandover::device_memory& memory, memhandover::chunk_history& history) {
  demand_answers answers{mutex, cycle, nullptr, operators};
  auto client = tenant_client::join(broker, client_kind::training, "job",
                                    [&](demand const& d) { return answers.answer(d); });
  {
    std::lock_guard const lock{mutex};
    answers.serve_from(spaces, memory, history);
  }
}

void of_elastic_space(memhandover::broker_options const& broker) {
  using namespace std::chrono_literals;
  using memhandover::elastic_space;
  using std::chrono::steady_clock;
  elastic_space space{broker, "vllm"};
  space.reserve(64);
  std::array const first{0U, 1U};
  if (space.back(first, steady_clock::now() + 1s)) {
    space.base()[0] = std::byte{1};  // it was zero
  }
  space.answer(1);
  if (space.demanded() > 1) {
    space.give_back(std::array{1U});
  }
  space.refuse_rest();
  if (space.is_ordered_away()) {
    space.give_back(first);
    space.rest(1);
  }
}

void of_fork_copies(fork_copies& copies, training_spaces const& spaces) {
  copies.make(spaces);
  copies.drop();
  copies.put_in_place();
}

void of_job_parking(job_parking::parts const& parts, tenant_client& client, demand const& wanted,
                    std::span<std::uint32_t const> given) {
  auto const parking = std::make_shared<job_parking>(parts);
  client.meanwhile([parking] { return parking->advance(); });
  parking->take(wanted, 12, given);  // what nothing else has given to a demand
  parking->want();                   // a launch is held
}

void of_micro_batch_cycle(std::mutex& mutex, micro_batch_cycle& cycle) {
  cycle.await_last();
  {
    std::lock_guard const lock{mutex};
    cycle.begin();
  }
  if (cycle.commit_begin(false) == commit_start::begun) {
    cycle.commit_end(false);
  }
}

void of_training_spaces(training_spaces& spaces, std::size_t bytes) {
  spaces.stock().collect();
  spaces.stock().map_into(spaces.arena(), 4, lifetime::revocable);
  auto* const block = spaces.arena().allocate(bytes);
  spaces.promote_arena();
  spaces.free(block);
}

void of_run_ahead_choice(sluice_gate_api const& gate, memhandover::ledger_view const& view) {
  auto const own = run_ahead_of_job(environment("SLUICE_RUN_AHEAD_US"));
  gate.set_run_ahead(choose_run_ahead(view.header(), own).count());
}

void of_rank_absence(training_memory::options& options, std::string const& timeout) {
  options.longest_absence = longest_absence(environment("WORLD_SIZE"), timeout);
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
