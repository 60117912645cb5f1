#include "scheduler/device_demands.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace sluice::scheduler {
namespace {

constexpr seconds memory{120.0};  // as the models' own slow rates
constexpr double moved_wait = 0.1;
constexpr double moved_service = 0.01;

}  // namespace

device_demands::device_demands(instant start) : rate_(memory, start), last_(start) {}

void device_demands::add(instant now, seconds service) {
  double const keeps = std::exp(-std::max(0.0, (now - last_).count()) / memory.count());
  last_ = std::max(last_, now);
  rate_.count(now);
  double const took_s = service.count();
  count_ = keeps * count_ + 1.0;
  sum_s_ = keeps * sum_s_ + took_s;
  square_s2_ = keeps * square_s2_ + took_s * took_s;
}

/// Pollaczek and Khinchine's, as if all executors were one; services were measured beside each other.
double device_demands::mean_wait_s(instant now) const noexcept {
  if (count_ <= 0.0) {
    return 0.0;
  }
  double const rate = rate_.per_second(now);
  double const utilisation = rate * mean_service_s() / executors_;
  return utilisation < 1.0
             ? rate * (square_s2_ / count_) / (2.0 * executors_ * executors_ * (1.0 - utilisation))
             : forever.count();
}

bool device_demands::has_moved(instant now, std::size_t models) const noexcept {
  if (models != beside_.size()) {
    return true;
  }
  double const now_s = mean_wait_s(now);
  if (now_s == forever.count() || wait_s_ == forever.count()) {
    return now_s != wait_s_;
  }
  return std::abs(now_s - wait_s_) >
         std::max(moved_wait * wait_s_, moved_service * mean_service_s());
}

void device_demands::predict(instant now, std::span<shared_model const> models,
                             shared_executors const& executors) {
  predicted(now, executors, predict_together(models, executors));
}

void device_demands::predicted(instant now, shared_executors const& executors,
                               std::vector<shared_load> beside) {
  beside_ = std::move(beside);
  executors_ = static_cast<double>(executors.at_once);
  wait_s_ = mean_wait_s(now);
}

shared_load const& device_demands::beside(std::size_t place) const noexcept {
  return place < beside_.size() ? beside_[place] : alone_;
}

}  // namespace sluice::scheduler
