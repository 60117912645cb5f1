#include "scheduler/detail/device_shares.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "scheduler/attainment.hpp"
#include "scheduler/queueing.hpp"

namespace sluice::scheduler::detail {
namespace {

void need(bool good, std::string const& what, double got) {
  if (!good) {
    throw std::invalid_argument(what + "; got " + std::to_string(got));
  }
}

void check(std::span<placeable_model const> models, shared_executors const& executors) {
  need(executors.at_once > 0, "at least one computation must be possible", 0.0);
  for (double const each : executors.slowdown) {
    need(each > 0.0 && std::isfinite(each), "a slow-down must be a finite number > 0", each);
  }
  for (std::size_t i = 0; i < models.size(); ++i) {
    auto const& it = models[i];
    auto const of = " of model " + std::to_string(i) + " must be ";
    need(it.arrivals_per_s >= 0.0 && std::isfinite(it.arrivals_per_s),
         "arrivals_per_s" + of + "a finite number >= 0", it.arrivals_per_s);
    need(it.latency.count() > 0.0 && std::isfinite(it.latency.count()),
         "the latency" + of + "a finite number of seconds > 0", it.latency.count());
    need(it.idle_timeout.count() >= 0.0, "the idle timeout" + of + ">= 0 s",
         it.idle_timeout.count());
    need(it.instances > 0, "the instances" + of + "one or more", it.instances);
  }
}

}  // namespace

device_shares::device_shares(std::span<placeable_model const> models,
                             shared_executors const& executors)
    : models_(models), executors_(executors), times_(models.size()) {
  check(models, executors);
  for (auto const& each : models) {
    latencies_.push_back(each.latency.count());
  }
  std::sort(latencies_.begin(), latencies_.end());
  latencies_.erase(std::unique(latencies_.begin(), latencies_.end()), latencies_.end());
  for (auto const& each : models) {
    auto const found = std::lower_bound(latencies_.begin(), latencies_.end(), each.latency.count());
    latency_of_.push_back(static_cast<std::size_t>(found - latencies_.begin()));
  }
}

double device_shares::slowdown(std::size_t at_once) const {
  return executors_.slowdown.empty()
             ? 1.0
             : executors_.slowdown[std::min(at_once, executors_.slowdown.size()) - 1];
}

double device_shares::speed_of(std::span<part const> parts) const {
  std::size_t instances = 0;
  for (auto const& each : parts) {
    instances += each.arrivals_per_s > 0.0 ? models_[each.model].instances : 0;
  }
  auto const at_once = std::clamp<std::size_t>(instances, 1, executors_.at_once);
  return static_cast<double>(at_once) / slowdown(at_once);
}

double device_shares::step_s(std::size_t latency) const {
  return latencies_[latency] / static_cast<double>(grid_steps);
}

grid_masses const& device_shares::residual(std::size_t model, std::size_t latency, double speed) {
  auto& found = residuals_[{{model, latency}, speed}];
  if (found.empty()) {
    auto const service = models_[model].service.scaled(1.0 / speed);
    found = residual_on_grid(excesses_on_grid(service, step_s(latency)), service.mean().count(),
                             step_s(latency));
  }
  return found;
}

device_shares::own_times const& device_shares::times_of(std::size_t model) {
  auto& its = times_[model];
  if (its.within.empty()) {
    double const h = step_s(latency_of_[model]);
    auto const service = excesses_on_grid(models_[model].service.scaled(slowdown(1)), h);
    auto const load = excesses_on_grid(models_[model].load, h);
    its.within.resize(grid_steps + 1);
    for (std::size_t j = 0; j <= grid_steps; ++j) {
      its.within[j] = std::clamp(1.0 - service[grid_steps - j].probability, 0.0, 1.0);
    }
    its.loading = on_grid(load, h);
    its.behind_load =
        sum_of(residual_on_grid(load, models_[model].load.mean().count(), h), on_grid(service, h));
  }
  return its;
}

double device_shares::share_of_part(part const& it, grid_masses const& waits, double utilisation,
                                    double mean_wait_s, bool is_alone) {
  auto const& model = models_[it.model];
  auto const& times = times_of(it.model);
  double const warm = share_of(waits, times.within);
  double const exceed = poisson_exceed(it.arrivals_per_s, model.idle_timeout);
  if (exceed <= 0.0) {
    return warm;
  }
  double const response_s = model.service.mean().count() * slowdown(1) + mean_wait_s;
  return attainment_at_rate{
      .arrivals_per_s = it.arrivals_per_s,
      .utilisation = utilisation,
      .load_mean_s = model.load.mean().count(),
      .idle_share = is_alone ? 1.0 - utilisation : 1.0 / (1.0 + it.arrivals_per_s * response_s),
      .warm = warm,
      .idle = is_alone ? times.within[0] : warm,
      .cold = share_of(is_alone ? times.loading : sum_of(times.loading, waits), times.within),
      .delayed = share_of(sum_of(times.behind_load, waits), times.within)}
      .share_within(exceed);
}

device_shares::answers device_shares::of(std::span<part const> parts, std::vector<double>* shares) {
  answers result;
  if (shares != nullptr) {
    shares->assign(parts.size(), 0.0);
  }
  double const speed = speed_of(parts);
  double arrivals = 0.0, squares = 0.0, fullest = 0.0;
  for (auto const& each : parts) {
    auto const& model = models_[each.model];
    double const own = each.arrivals_per_s * model.service.mean().count();
    arrivals += each.arrivals_per_s;
    result.utilisation += own / speed;
    squares += each.arrivals_per_s * model.service.second_moment_s2() / (speed * speed);
    fullest = std::max(fullest, own * slowdown(1) / model.instances);
  }
  result.utilisation = std::max(result.utilisation, fullest);
  if (result.utilisation >= 1.0) {
    result.per_s = arrivals / result.utilisation;
    return result;
  }
  result.per_s = arrivals;
  double const mean_wait_s = 0.5 * squares / (1.0 - result.utilisation);
  bool const is_alone = parts.size() == 1;
  for (std::size_t latency = 0; latency < latencies_.size(); ++latency) {
    grid_masses waits;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (latency_of_[parts[i].model] != latency) {
        continue;
      }
      if (waits.empty()) {
        grid_masses rest(grid_steps + 1);
        double of_all = 0.0;
        for (auto const& each : parts) {
          double const own =
              each.arrivals_per_s * models_[each.model].service.mean().count() / speed;
          auto const& its = residual(each.model, latency, speed);
          for (std::size_t j = 0; j <= grid_steps; ++j) {
            rest[j] += own * its[j];
          }
          of_all += own;
        }
        waits = waits_on_grid(rest, of_all);
      }
      double const share =
          share_of_part(parts[i], waits, result.utilisation, mean_wait_s, is_alone);
      result.in_time_per_s += parts[i].arrivals_per_s * share;
      if (shares != nullptr) {
        (*shares)[i] = share;
      }
    }
  }
  return result;
}

}  // namespace sluice::scheduler::detail
