/// The examples in the headers of runtime/simulator/, word for word: compiled, never run.
#include <utility>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "runtime/simulator/draws.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/placing.hpp"
#include "runtime/simulator/replicas.hpp"
#include "runtime/simulator/simulation.hpp"
#include "runtime/simulator/trace_files.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"

namespace sluice::simulator::header_examples {

using namespace std::chrono_literals;

void of_draws() {
  draws random{7};
  random.exponential(0.1);
  random.gamma(0.1, 0.5);
}

void of_trace_files() {
  auto const read = read_trace("trace.csv", {.service_s = 0.05});
  read.requests.size();
}

void of_generators() {
  auto const made = generate("hawkes:rate=2,branching=0.5,decay=1", {.length_s = 600.0});
  made.requests.size();
}

void of_load_costs(draws& random) {
  auto const costs = costs_of_records("benchmarks/results", "h200");
  costs.bytes_per_s;
  costs.handover.draw(random);
}

void of_keeping(keeping_inputs const& of, double idle_since_s, double now_s) {
  auto const policy = make_keeping("fixed:60s", of);
  policy->idle_timeout(0, idle_since_s, now_s);
}

void of_simulation(trace const& requests, std::vector<simulated_model> const& models,
                   std::unique_ptr<keeping> policy) {
  auto const result = simulate(requests, models, *policy, {.parallel = 2, .slowdown = {1.0, 1.3}});
  result.in_time();
}

void of_placing(trace const& requests, std::vector<scheduler::placement_device> const& devices,
                scheduler::placement_settings const& settings) {
  auto const models = placeable_models(requests, {.bytes = {4_GiB}, .latency = 200ms});
  auto const found = place(requests, models, devices, parse_placing("attainment"), settings);
  found.devices_of[0];
}

void of_replicas(trace requests, scheduler::model_placement const& found,
                 std::vector<scheduler::placeable_model> const& models,
                 scheduler::objective const& goal, std::unique_ptr<keeping> policy,
                 simulation_settings const& settings) {
  auto const there = spread(std::move(requests), found.devices_of, {.seed = 1});
  auto const replicas = replicas_of(models, there, goal);
  auto const seen = gathered(simulate(there.requests, replicas, *policy, settings), there);
}

}  // namespace sluice::simulator::header_examples

#pragma GCC diagnostic pop
