#include "runtime/cli/simulate_command.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "runtime/cli/detail/print.hpp"
#include "runtime/policy/units.hpp"
#include "runtime/simulator/forecasts.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/placing.hpp"
#include "runtime/simulator/placing_text.hpp"
#include "runtime/simulator/replicas.hpp"
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

scheduler::objective goal_of(simulate_arguments const& from) {
  scheduler::objective goal{.percentile = policy::parse_percentage(from.percentile),
                            .latency = scheduler::seconds{seconds_of(from.latency)},
                            .attainment = policy::parse_percentage(from.attainment),
                            .window = scheduler::seconds{seconds_of(from.window)}};
  try {
    goal.check();
  } catch (std::invalid_argument const& wrong) {
    throw error{error_kind::invalid_argument, wrong.what()};
  }
  return goal;
}

std::vector<std::uint64_t> bytes_of(std::vector<std::string> const& amounts) {
  std::vector<std::uint64_t> result(amounts.size());
  std::transform(amounts.begin(), amounts.end(), result.begin(),
                 [](auto const& each) { return policy::parse_bytes(each); });
  return result;
}

std::vector<scheduler::placement_device> devices_of(simulate_arguments const& from) {
  auto const memories = bytes_of(from.memories);
  if (memories.size() != 1 && memories.size() != from.gpus) {
    throw error{error_kind::invalid_argument,
                fmt::format("--memory has {} sizes for {} devices; it must have one for all, or "
                            "one for each of --gpus",
                            memories.size(), from.gpus)};
  }
  std::vector<scheduler::placement_device> devices(from.gpus);
  for (std::size_t d = 0; d < devices.size(); ++d) {
    devices[d].bytes = memories[memories.size() == 1 ? 0 : d];
  }
  return devices;
}

/// What is where, and what a person and a program are told of it.
struct placed {
  std::vector<scheduler::placeable_model> models;
  scheduler::model_placement found;
  std::string table, csv;
};

placed place_of(simulate_arguments const& from, trace const& requests,
                std::vector<scheduler::placement_device> const& devices) {
  auto const rule = from.place.empty() ? placing_rule::work : parse_placing(from.place);
  placed result;
  result.models = placeable_models(
      requests, {.bytes = bytes_of(from.sizes),
                 .latency = scheduler::seconds{seconds_of(from.latency)},
                 .idle_timeout = from.place_timeout.empty()
                                     ? scheduler::forever
                                     : scheduler::seconds{seconds_of(from.place_timeout)},
                 .instances = from.instances,
                 .costs = costs_of(from)});
  scheduler::placement_settings const settings{
      .executors = {.at_once = from.parallel, .slowdown = from.slowdown}};
  try {
    result.found = place(requests, result.models, devices, rule, settings);
    if (!from.place.empty()) {
      auto const predicted =
          scheduler::predict_placement(result.models, devices, result.found, settings);
      placed_models const those{requests.models, result.models, devices, result.found, predicted};
      result.table = fmt::format("placed by {}: {:.2f} % in time predicted\n\n{}\n", from.place,
                                 100.0 * predicted.share_within, table_of(those));
      result.csv = csv_of(those);
      if (result.found.left_out.size() == result.models.size()) {
        throw error{error_kind::invalid_argument,
                    fmt::format("no model has room on a device: the first, {}, {}; give more "
                                "--memory, or a smaller --size",
                                requests.models.front(),
                                why_left_out(those, result.found.left_out.front()))};
      }
    }
  } catch (std::invalid_argument const& wrong) {
    throw error{error_kind::invalid_argument, wrong.what()};
  }
  return result;
}

/// Where models are placed by work alone, one may be larger than its device.
void require_room(std::vector<std::string> const& names, std::vector<simulated_model> const& models,
                  spread_trace const& there,
                  std::vector<scheduler::placement_device> const& devices) {
  for (std::size_t i = 0; i < models.size(); ++i) {
    auto const memory = devices[models[i].device].bytes;
    if (models[i].bytes > memory) {
      throw error{error_kind::invalid_argument,
                  fmt::format("{} has {}, and no room on device {}, which has {}; give more "
                              "--memory, or a smaller --size",
                              names[there.model_of[i]], format_bytes(models[i].bytes),
                              models[i].device, format_bytes(memory))};
    }
  }
}

void write_file(std::string const& name, std::string const& text) {
  std::ofstream to{name};
  to << text;
  to.close();
  if (!to) {
    throw error{error_kind::unavailable, fmt::format("{} cannot be written", name)};
  }
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
  if (!arguments.place.empty()) {
    (void)parse_placing(arguments.place);
  }
  auto const goal = goal_of(arguments);
  auto const devices = devices_of(arguments);
  auto requests = trace_of(arguments);
  simulation_settings settings{.devices = arguments.gpus,
                               .parallel = arguments.parallel,
                               .slowdown = arguments.slowdown,
                               .costs = costs_of(arguments),
                               .memory_bytes = bytes_of(arguments.memories),
                               .count_from_s = seconds_of(arguments.skip),
                               .retries = arguments.retries,
                               .seed = arguments.seed};
  if (settings.count_from_s >= requests.length_s) {
    throw error{error_kind::invalid_argument,
                fmt::format("--skip is {}, and the trace is {:.1f} s long; it must be longer",
                            arguments.skip, requests.length_s)};
  }
  auto const found = place_of(arguments, requests, devices);
  auto const names = requests.models;
  auto const count = requests.requests.size();
  auto const there = spread(std::move(requests), found.found.devices_of,
                            {.count_from_s = settings.count_from_s, .seed = arguments.seed});
  auto const models = replicas_of(found.models, there, goal);
  require_room(names, models, there, devices);
  std::vector<simulation_row> rows;
  {
    progress_line line{arguments.policies.size()};
    settings.progress = [&line](double share) { line.show(share); };
    for (auto const& each : arguments.policies) {
      line.begin(each);
      auto const policy = make_keeping(each, {.models = &models,
                                              .requests = &there.requests,
                                              .costs = settings.costs,
                                              .devices = arguments.gpus,
                                              .memory_bytes = bytes_of(arguments.memories),
                                              .refuse = arguments.refuse,
                                              .parallel = arguments.parallel,
                                              .slowdown = arguments.slowdown});
      rows.push_back({each, gathered(simulate(there.requests, models, *policy, settings), there),
                      forecast_of(there.requests, models, each, arguments.trace, settings)});
      if (auto& share = rows.back().before.in_time) {
        *share *= there.share_somewhere;
      }
    }
  }
  detail::print(fmt::format("{} requests of {} models in {:.1f} s, on {} device{}\n\n", count,
                            names.size(), there.requests.length_s, arguments.gpus,
                            arguments.gpus == 1 ? "" : "s"));
  detail::print(found.table);
  detail::print(table_of(rows));
  if (!arguments.csv.empty()) {
    write_file(arguments.csv, csv_of(rows, names));
  }
  if (!arguments.place_csv.empty()) {
    write_file(arguments.place_csv, found.csv);
  }
  return 0;
}

}  // namespace sluice::cli
