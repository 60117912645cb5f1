/// The examples in the headers of runtime/simulator/, word for word: compiled, never run.
#include <vector>

#include "runtime/simulator/draws.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/simulation.hpp"
#include "runtime/simulator/trace_files.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"

namespace sluice::simulator::header_examples {

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

void of_keeping(keeping_inputs const& of, double now_s) {
  auto const policy = make_keeping("fixed:60s", of);
  policy->idle_timeout(0, now_s);
}

void of_simulation(trace const& requests, std::vector<simulated_model> const& models,
                   std::unique_ptr<keeping> policy) {
  auto const result = simulate(requests, models, *policy, {.parallel = 2, .slowdown = {1.0, 1.3}});
  result.in_time();
}

}  // namespace sluice::simulator::header_examples

#pragma GCC diagnostic pop
