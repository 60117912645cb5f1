#include "runtime/cli/simulate_command.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "memhandover/base/error.hpp"
#include "runtime/cli/detail/print.hpp"
#include "runtime/policy/units.hpp"
#include "runtime/simulator/forecasts.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/placing.hpp"
#include "runtime/simulator/simulation.hpp"
#include "runtime/simulator/simulation_text.hpp"
#include "runtime/simulator/trace_files.hpp"

namespace sluice::cli {
namespace {

using namespace simulator;

double seconds_of(std::string const& text) {
  return text.empty() ? 0.0 : std::chrono::duration<double>{policy::parse_duration(text)}.count();
}

trace trace_of(simulate_arguments const& from) {
  if (names_process(from.trace)) {
    return generate(from.trace, {.length_s = seconds_of(from.length),
                                 .models = from.models,
                                 .service_s = seconds_of(from.service),
                                 .service_scv = from.service_scv.value_or(1.0),
                                 .seed = from.seed});
  }
  return read_trace(from.trace, {.service_s = seconds_of(from.service),
                                 .service_scv = from.service_scv.value_or(0.0),
                                 .per_context_token_s = seconds_of(from.per_context_token),
                                 .per_generated_token_s = seconds_of(from.per_generated_token),
                                 .models = from.models,
                                 .zipf_exponent = from.zipf,
                                 .seed = from.seed,
                                 .speed = from.speed});
}

load_costs costs_of(simulate_arguments const& from) {
  load_costs costs;
  if (!from.machine.empty()) {
    costs = costs_of_records(from.records, from.machine);
  }
  if (!from.handover.empty()) {
    costs.handover = measured_time{seconds_of(from.handover)};
  }
  if (!from.load.empty()) {  // whatever the size
    costs.fixed_s = seconds_of(from.load);
    costs.bytes_per_s = HUGE_VAL;
  }
  return costs;
}

std::vector<simulated_model> models_of(simulate_arguments const& from, trace const& requests) {
  scheduler::objective goal{.percentile = policy::parse_percentage(from.percentile),
                            .latency = scheduler::seconds{seconds_of(from.latency)},
                            .attainment = policy::parse_percentage(from.attainment),
                            .window = scheduler::seconds{seconds_of(from.window)}};
  try {
    goal.check();
  } catch (std::invalid_argument const& wrong) {
    throw error{error_kind::invalid_argument, wrong.what()};
  }
  auto const devices = place_models(requests, from.gpus);
  std::vector<simulated_model> models;
  models.reserve(devices.size());
  for (auto const device : devices) {
    models.push_back({.bytes = policy::parse_bytes(from.size),
                      .goal = goal,
                      .device = device,
                      .instances = from.instances});
  }
  return models;
}

/// A line that is written over, with what is done and how long the rest will take.
class progress_line {
 public:
  explicit progress_line(std::size_t runs) : runs_(runs) {}
  progress_line(progress_line const&) = delete;
  progress_line& operator=(progress_line const&) = delete;
  ~progress_line() {
    if (shown_) {
      std::fputs("\r\x1b[K", stderr);
    }
  }

  void begin(std::string const& policy) {
    policy_ = policy;
    ++begun_;
  }
  void show(double share) {
    auto const now = clock::now();
    if (!is_terminal_ || now < next_) {
      return;
    }
    next_ = now + std::chrono::milliseconds{500};
    double const done = (static_cast<double>(begun_ - 1) + share) / static_cast<double>(runs_);
    double const since = std::chrono::duration<double>{now - start_}.count();
    auto const left = done > 0.0 ? fmt::format(", {:.0f} s left", since * (1.0 - done) / done) : "";
    fmt::print(stderr, "\r\x1b[K{:.0f} % ({}){}", 100.0 * done, policy_, left);
    std::fflush(stderr);
    shown_ = true;
  }

 private:
  using clock = std::chrono::steady_clock;
  std::size_t runs_, begun_ = 0;
  std::string policy_;
  bool is_terminal_ = isatty(STDERR_FILENO) == 1;
  bool shown_ = false;
  clock::time_point start_ = clock::now(), next_ = start_;
};

}  // namespace

int run_simulations(simulate_arguments const& arguments) {
  for (auto const& each : arguments.policies) {
    (void)parse_keeping(each);  // before anything takes time
  }
  auto const requests = trace_of(arguments);
  auto const models = models_of(arguments, requests);
  simulation_settings settings{.devices = arguments.gpus,
                               .parallel = arguments.parallel,
                               .slowdown = arguments.slowdown,
                               .costs = costs_of(arguments),
                               .count_from_s = seconds_of(arguments.skip),
                               .seed = arguments.seed};
  if (settings.count_from_s >= requests.length_s) {
    throw error{error_kind::invalid_argument,
                fmt::format("--skip is {}, and the trace is {:.1f} s long; it must be longer",
                            arguments.skip, requests.length_s)};
  }
  std::vector<simulation_row> rows;
  {
    progress_line line{arguments.policies.size()};
    settings.progress = [&line](double share) { line.show(share); };
    for (auto const& each : arguments.policies) {
      line.begin(each);
      auto const policy = make_keeping(each, {.models = &models,
                                              .requests = &requests,
                                              .costs = settings.costs,
                                              .devices = arguments.gpus,
                                              .memory_bytes = policy::parse_bytes(arguments.memory),
                                              .refuse = arguments.refuse});
      rows.push_back({each, simulate(requests, models, *policy, settings),
                      forecast_of(requests, models, each, arguments.trace, settings)});
    }
  }
  detail::print(fmt::format("{} requests of {} models in {:.1f} s, on {} device{}\n\n",
                            requests.requests.size(), models.size(), requests.length_s,
                            arguments.gpus, arguments.gpus == 1 ? "" : "s"));
  detail::print(table_of(rows));
  if (!arguments.csv.empty()) {
    std::ofstream to{arguments.csv};
    to << csv_of(rows, requests.models);
    to.close();
    if (!to) {
      throw error{error_kind::unavailable, fmt::format("{} cannot be written", arguments.csv)};
    }
  }
  return 0;
}

}  // namespace sluice::cli
