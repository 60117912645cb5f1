#include "runtime/simulator/forecasts.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/traffic.hpp"
#include "scheduler/attainment.hpp"
#include "scheduler/bursts.hpp"
#include "scheduler/partial_warmth.hpp"
#include "scheduler/queueing.hpp"
#include "scheduler/shared_server.hpp"

namespace sluice::simulator {
namespace {

using scheduler::seconds;

/// Means over requests, of models that each have a number of them.
class weighted_forecast {
 public:
  void add(double weight, double in_time, double wait_s) {
    weight_ += weight;
    in_time_ += weight * in_time;
    wait_s_ += weight * wait_s;
  }
  [[nodiscard]] forecast named(std::string by) const {
    if (weight_ == 0.0) {
      return {};
    }
    return {.in_time = in_time_ / weight_, .mean_wait_s = wait_s_ / weight_, .by = std::move(by)};
  }

 private:
  double weight_ = 0.0, in_time_ = 0.0, wait_s_ = 0.0;
};

forecast of_released(std::vector<traffic_seen> const& all,
                     std::vector<simulated_model> const& models, seconds timeout,
                     load_costs const& costs) {
  weighted_forecast sum;
  for (std::size_t i = 0; i < models.size(); ++i) {
    scheduler::queue_load const demand{.arrivals_per_s = all[i].rate_per_s,
                                       .service = all[i].service,
                                       .load = load_times(costs, models[i].bytes)};
    double const p = scheduler::poisson_exceed(demand.arrivals_per_s, timeout);
    scheduler::attainment_model const model{demand.service, demand.load, models[i].goal.latency};
    sum.add(demand.arrivals_per_s, model.at(demand.arrivals_per_s).share_within(p),
            scheduler::mean_wait(demand, p).count());
  }
  return sum.named("M/G/1 with set-up");
}

forecast of_one_warm(traffic_seen const& seen, simulated_model const& model,
                     std::string const& stream) {
  scheduler::queue_load const demand{.arrivals_per_s = seen.rate_per_s, .service = seen.service};
  scheduler::attainment_model const in_time{demand.service, {}, model.goal.latency};
  forecast result;
  result.in_time = in_time.at(demand.arrivals_per_s).share_within(0.0);
  auto const switching = names_process(stream) ? switching_of(stream) : std::nullopt;
  constexpr double nearly = 0.1;
  if (switching && std::abs(seen.service.scv() - 1.0) < nearly) {
    result.mean_wait_s = scheduler::mean_wait(*switching, seen.service.mean()).count();
    result.by = "M/G/1, MMPP/M/1";
  } else {
    result.mean_wait_s = scheduler::mean_wait_by_spread(demand, seen.gap_scv).count();
    result.by = "M/G/1, spread of gaps";
  }
  return result;
}

forecast of_classes(std::vector<traffic_seen> const& all,
                    std::vector<simulated_model> const& models, unsigned devices) {
  weighted_forecast sum;
  for (unsigned device = 0; device < devices; ++device) {
    std::vector<scheduler::request_class> kinds;
    for (std::size_t i = 0; i < models.size(); ++i) {
      if (models[i].device == device) {
        kinds.push_back({.arrivals_per_s = all[i].rate_per_s, .service = all[i].service});
      }
    }
    auto const line = scheduler::all_of(kinds);
    auto const service = std::make_shared<scheduler::distribution const>(line.service);
    double const wait = scheduler::mean_wait_in_turn(kinds).count();
    for (std::size_t i = 0; i < models.size(); ++i) {
      if (models[i].device == device && all[i].rate_per_s > 0.0) {
        scheduler::attainment_model const in_time{all[i].service,
                                                  {},
                                                  models[i].goal.latency,
                                                  {.by = scheduler::predicted_by::classes_in_turn,
                                                   .arrivals_per_s = line.arrivals_per_s,
                                                   .service = service,
                                                   .own_per_s = all[i].rate_per_s}};
        sum.add(all[i].rate_per_s, in_time.at(all[i].rate_per_s).share_within(0.0), wait);
      }
    }
  }
  return sum.named("classes in turn");
}

forecast of_several_at_once(traffic_seen const& seen, simulation_settings const& settings) {
  scheduler::concurrent_server server{.arrivals_per_s = seen.rate_per_s,
                                      .service = seen.service.mean()};
  server.slowdown.clear();
  for (unsigned n = 1; n <= settings.parallel; ++n) {
    server.slowdown.push_back(
        settings.slowdown.empty()
            ? 1.0
            : settings.slowdown[std::min<std::size_t>(n, settings.slowdown.size()) - 1]);
  }
  auto const waits = scheduler::waits_of(server);
  // A response takes longer than the service alone by what others slow it down, too.
  return {.in_time = std::nullopt,
          .mean_wait_s = (waits.mean_response - server.service).count(),
          .by = "birth and death"};
}

forecast of_sirius(std::vector<traffic_seen> const& all, std::vector<simulated_model> const& models,
                   keeping_kind const& kind, load_costs const& costs) {
  weighted_forecast sum;
  for (std::size_t i = 0; i < models.size(); ++i) {
    double bytes = 0.0;
    for (auto const& each : models) {
      bytes += each.device == models[i].device ? static_cast<double>(each.bytes) : 0.0;
    }
    if (all[i].rate_per_s > 0.0 && all[i].service.mean().count() > 0.0) {
      double const kept =
          bytes > 0.0 ? static_cast<double>(kind.reserve_bytes.value_or(0)) / bytes : 1.0;
      auto const solved = scheduler::solve({.arrivals_per_s = all[i].rate_per_s,
                                            .service = all[i].service.mean(),
                                            .load = seconds{costs.mean_s(models[i].bytes)},
                                            .idle_timeout = seconds{kind.timeout_s},
                                            .cold_share = std::max(0.0, 1.0 - kept)},
                                           models[i].goal.latency);
      sum.add(all[i].rate_per_s, solved.share_within,
              (solved.mean_response - all[i].service.mean()).count());
    }
  }
  return sum.named("Sirius' chain");
}

}  // namespace

forecast forecast_of(trace const& requests, std::vector<simulated_model> const& models,
                     std::string const& policy, std::string const& stream,
                     simulation_settings const& settings) {
  auto const kind = parse_keeping(policy);
  auto const all = traffic_of(requests);
  std::vector<unsigned> on_device(settings.devices);
  bool several_instances = false;
  for (auto const& each : models) {
    ++on_device[each.device];
    several_instances = several_instances || each.instances > 1;
  }
  bool const each_alone = *std::max_element(on_device.begin(), on_device.end()) <= 1;
  bool const in_turn = settings.parallel == 1;
  bool const is_warm = kind.timeout_s == never;
  if (kind.is == keeping_kind::what::sirius && in_turn) {
    return of_sirius(all, models, kind, settings.costs);
  }
  if (kind.is != keeping_kind::what::fixed) {
    return {};
  }
  if (is_warm && models.size() == 1 && in_turn) {
    return of_one_warm(all.front(), models.front(), stream);
  }
  if (is_warm && models.size() == 1 && several_instances) {
    return of_several_at_once(all.front(), settings);
  }
  if (is_warm && in_turn) {
    return of_classes(all, models, settings.devices);
  }
  if (each_alone && (in_turn || !several_instances)) {
    return of_released(all, models, seconds{kind.timeout_s}, settings.costs);
  }
  return {};
}

}  // namespace sluice::simulator
