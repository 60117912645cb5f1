#include "scheduler/shared_executors.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>

#include "scheduler/shared_server.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::size_t simulated_requests = 8000;
constexpr std::size_t first_left_out = 800;
constexpr std::size_t enough_waits = 50;
constexpr std::size_t kept_waits = 256;  // quantiles
constexpr std::size_t drawn_services = 64;
// A mixture is as exact as its samples are many, and costs as much.
constexpr std::size_t parts_of_all = 512, parts_of_one = 16, parts_together = 8192, slices = 64;

void check(std::span<shared_model const> models, shared_executors const& executors) {
  auto const need = [](bool good, char const* what, double got) {
    if (!good) {
      throw std::invalid_argument(std::string(what) + "; got " + std::to_string(got));
    }
  };
  need(executors.at_once > 0, "at least one computation must be possible", 0.0);
  for (double const each : executors.slowdown) {
    need(each > 0.0 && std::isfinite(each), "a slow-down must be a finite number > 0", each);
  }
  for (auto const& each : models) {
    need(each.arrivals_per_s >= 0.0 && std::isfinite(each.arrivals_per_s),
         "arrivals_per_s must be a finite number >= 0", each.arrivals_per_s);
    need(each.alone_factor > 0.0 && each.alone_factor <= 1.0,
         "the service alone must be a share in (0, 1] of that measured", each.alone_factor);
  }
}

double slowdown_of(shared_executors const& executors, std::size_t number) {
  return executors.slowdown.empty()
             ? 1.0
             : executors.slowdown[std::min(number, executors.slowdown.size()) - 1];
}

/// Computations in the order of their arrival, of each model one at a time.
class executor_simulation {
 public:
  executor_simulation(std::span<shared_model const> models, shared_executors const& executors)
      : executors_(executors), is_busy_(models.size(), false), waits_(models.size()) {
    for (auto const& each : models) {
      rate_ += each.arrivals_per_s;
      rates_until_.push_back(rate_);
      std::vector<double> services;
      for (std::size_t i = 0; i < drawn_services; ++i) {
        double const share = (static_cast<double>(i) + 0.5) / static_cast<double>(drawn_services);
        services.push_back(each.alone_factor * each.service.quantile(share).count());
      }
      services_.push_back(std::move(services));
    }
  }

  std::vector<std::vector<double>> run() {
    double next_s = gap();
    for (std::size_t made = 0; made < simulated_requests;) {
      double const slow = running_.empty() ? 1.0 : slowdown_of(executors_, running_.size());
      auto const first =
          std::min_element(running_.begin(), running_.end(),
                           [](auto const& a, auto const& b) { return a.left_s < b.left_s; });
      double const end_s = first == running_.end() ? next_s : now_s_ + first->left_s * slow;
      bool const ends = first != running_.end() && end_s <= next_s;
      pass((ends ? end_s : next_s) - now_s_, slow);
      if (ends) {
        answer(first);
      } else {
        auto const model = drawn_model();
        queue_.push_back({now_s_, drawn_service(model), model, made++ >= first_left_out});
        next_s = now_s_ + gap();
      }
      begin();
    }
    return std::move(waits_);
  }

 private:
  struct request {
    double at_s = 0.0;
    double service_s = 0.0;
    std::size_t model = 0;
    bool counts = false;
  };
  struct computation {
    request of;
    double left_s = 0.0;
  };

  double uniform() { return (static_cast<double>(random_() >> 11U) + 0.5) * 0x1p-53; }
  double gap() { return -std::log(uniform()) / rate_; }
  std::size_t drawn_model() {
    auto const found =
        std::upper_bound(rates_until_.begin(), rates_until_.end(), uniform() * rate_);
    return std::min(static_cast<std::size_t>(found - rates_until_.begin()),
                    rates_until_.size() - 1);
  }
  double drawn_service(std::size_t model) {
    return services_[model][static_cast<std::size_t>(uniform() * drawn_services)];
  }

  void pass(double time_s, double slow) {
    for (auto& each : running_) {
      each.left_s = std::max(0.0, each.left_s - time_s / slow);
    }
    now_s_ += time_s;
  }

  void answer(std::vector<computation>::iterator which) {
    auto const& it = which->of;
    if (it.counts) {
      waits_[it.model].push_back(std::max(0.0, now_s_ - it.at_s - it.service_s));
    }
    is_busy_[it.model] = false;
    running_.erase(which);
  }

  void begin() {
    for (auto next = queue_.begin();
         next != queue_.end() && running_.size() < executors_.at_once;) {
      if (is_busy_[next->model]) {
        ++next;
        continue;
      }
      is_busy_[next->model] = true;
      running_.push_back({*next, next->service_s});
      next = queue_.erase(next);
    }
  }

  shared_executors const& executors_;
  std::mt19937_64 random_{1};  // the same again. NOLINT(bugprone-random-generator-seed)
  double rate_ = 0.0;
  double now_s_ = 0.0;
  std::vector<double> rates_until_;
  std::vector<std::vector<double>> services_;
  std::vector<bool> is_busy_;
  std::deque<request> queue_;
  std::vector<computation> running_;
  std::vector<std::vector<double>> waits_;
};

distribution compressed(std::vector<double> samples) {
  if (samples.empty()) {
    return {};
  }
  std::sort(samples.begin(), samples.end());
  std::vector<double> kept;
  auto const count = std::min(kept_waits, samples.size());
  kept.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    kept.push_back(samples[(2 * i + 1) * samples.size() / (2 * count)]);
  }
  return distribution::of_samples(kept);
}

/// Of the work that all could do, at the slow-down of as many as may; and of each model's own time.
double utilisation_of(std::span<shared_model const> models, shared_executors const& executors) {
  double work = 0.0;
  double fullest = 0.0;
  std::size_t active = 0;
  for (auto const& each : models) {
    double const own = each.arrivals_per_s * each.service.mean().count() * each.alone_factor;
    work += own;
    fullest = std::max(fullest, own);
    active += each.arrivals_per_s > 0.0 ? 1 : 0;
  }
  auto const most = std::max<std::size_t>(1, std::min(active, executors.at_once));
  double const yield = static_cast<double>(most) / slowdown_of(executors, most);
  return std::max(fullest, work / yield);
}

void simulate(std::span<shared_model const> models, shared_executors const& executors,
              std::vector<shared_load>& to) {
  double const utilisation = utilisation_of(models, executors);
  for (auto& each : to) {
    each.utilisation = utilisation;
  }
  if (utilisation >= 1.0) {
    return;  // waits have no end
  }
  auto const waits = executor_simulation{models, executors}.run();
  std::vector<double> all;
  for (auto const& each : waits) {
    all.insert(all.end(), each.begin(), each.end());
  }
  auto const of_all = compressed(std::move(all));
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i].waits = waits[i].size() >= enough_waits ? compressed(waits[i]) : of_all;
  }
}

}  // namespace

std::vector<shared_load> predict_together(std::span<shared_model const> models,
                                          shared_executors const& executors) {
  check(models, executors);
  std::vector<shared_load> result(models.size());
  auto const active = static_cast<std::size_t>(std::count_if(
      models.begin(), models.end(), [](auto const& each) { return each.arrivals_per_s > 0.0; }));
  bool const is_one = active == 1 && models.size() == 1;
  if (active == 0 || is_one) {
    return result;
  }
  bool const in_turn = executors.at_once == 1;
  // Of several at once, what one server of their speed would make of each.
  double const speed =
      in_turn ? 1.0
              : static_cast<double>(executors.at_once) / slowdown_of(executors, executors.at_once);
  std::vector<request_class> kinds;
  for (auto const& each : models) {
    kinds.push_back({each.arrivals_per_s,
                     each.service.condensed(std::max(parts_of_one, parts_together / active))});
  }
  auto const line = all_of(kinds);
  auto const of_all = line.service.condensed(parts_of_all).of_constants(slices);
  auto const service =
      std::make_shared<distribution const>(in_turn ? of_all : of_all.scaled(1.0 / speed));
  for (std::size_t i = 0; i < models.size(); ++i) {
    bool const has_others = active > (models[i].arrivals_per_s > 0.0 ? 1U : 0U);
    if (!has_others) {
      continue;
    }
    result[i] = {.by = in_turn ? predicted_by::classes_in_turn : predicted_by::simulation,
                 .arrivals_per_s = line.arrivals_per_s,
                 .service = service,
                 .own_per_s = models[i].arrivals_per_s,
                 .speed = speed,
                 .alone_factor = in_turn ? 1.0 : models[i].alone_factor};
  }
  if (!in_turn && active > 1) {
    simulate(models, executors, result);
  }
  return result;
}

}  // namespace sluice::scheduler
