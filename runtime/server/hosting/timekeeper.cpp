// The timekeeper of model_host: the thread that watches the clock, and answers requests that will not
// run.

#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/server/hosting/host_status.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// The scheduler's reserve stays below this share of the pool.
constexpr std::uint64_t largest_reserve_divisor = 4;

/// Before a model has computed so often, a promise that cannot be kept is a guess.
constexpr std::uint64_t reported_from_services = 30;
/// A promise that is kept for so long is kept again.
constexpr std::chrono::seconds reported_over_after{10};

/// For so many cold models stitched memory is prepared.
constexpr std::size_t prepared_models = 4;

}  // namespace

void model_host::impl::keep_time() {
  ::pthread_setname_np(::pthread_self(), "sluice-timer");
  lock_type lock{mutex_};
  while (!ended_ || !refused_.empty()) {
    try {
      keep_time_once(lock);
    } catch (...) {
      if (!lock.owns_lock()) {
        lock.lock();
      }
      spdlog::error("the timekeeper goes on after a failure reason={}",
                    telemetry::quoted(caught_error().what()));
    }
  }
}

void model_host::impl::keep_time_once(lock_type& lock) {
  auto const now = clock::now();
  expire(now);
  look_after_pause(now);
  if (!refused_.empty()) {
    deliver_refusals(lock);
  } else if (now >= next_tick_) {
    tick(lock, now);
  } else {
    sleep(lock);
  }
}

void model_host::impl::look_after_pause(clock::time_point now) {
  if (options_.pause == pause_mode::on_launch || wants_compute()) {
    end_claim_if_idle();
    lease_->attend();
  } else if (lease_->wanted() && now >= pause_end_) {
    lease_->release();
  }
  if (auto const cuts = lease_->counts().cut_short; cuts != cuts_) {
    cuts_ = cuts;
    cut_short_models_.clear();
    for (auto const& each : computing_) {
      cut_short_models_.push_back(slots_[each.model].is.name);
    }
  }
}

void model_host::impl::deliver_refusals(lock_type& lock) {
  auto deliveries = std::exchange(refused_, {});
  lock.unlock();
  for (auto& each : deliveries) {
    each.deliver();
  }
  lock.lock();
}

void model_host::impl::sleep(lock_type& lock) {
  timekeeper_sleeps_until_ = next_tick_;
  if (options_.pause != pause_mode::on_launch && !wants_compute() && lease_->wanted()) {
    timekeeper_sleeps_until_ = std::min(timekeeper_sleeps_until_, pause_end_);
  }
  for (auto const& each : queue_) {
    timekeeper_sleeps_until_ = std::min(timekeeper_sleeps_until_, ends_waiting(each));
  }
  for (auto const& each : computing_) {
    if (each.done) {
      timekeeper_sleeps_until_ = std::min(timekeeper_sleeps_until_, each.deadline);
    }
  }
  timekeeper_sleeps_until_ = lease_->attended_by(timekeeper_sleeps_until_);
  timekeeper_wakes_.wait_until(lock, timekeeper_sleeps_until_,
                               [&] { return ended_ || timekeeper_called_ || !refused_.empty(); });
  timekeeper_called_ = false;
}

/// What is being computed goes on; its client waits no longer.
void model_host::impl::expire_computing(clock::time_point now) {
  for (auto& each : computing_) {
    if (!each.done || each.deadline > now) {
      continue;
    }
    auto& model = slots_[each.model];
    auto const took = std::chrono::duration_cast<std::chrono::milliseconds>(now - each.arrival);
    break_promise(each, now);
    answer_running(each, {error_kind::deadline_exceeded,
                          fmt::format("the request's time is over after {} ms, while model '{}' "
                                      "computes its answer",
                                      took.count(), model.is.name)});
  }
}

void model_host::impl::expire(clock::time_point now) {
  expire_computing(now);
  for (auto next = queue_.begin(); next != queue_.end();) {
    auto const each = next++;
    if (ends_waiting(*each) > now) {
      continue;
    }
    auto& model = slots_[each->model];
    auto const waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - each->arrival);
    break_promise(*each, now);
    refuse(std::move(*each),
           {error_kind::deadline_exceeded,
            fmt::format("the request's time is over after {} ms in the queue of model '{}', which "
                        "is {}",
                        waited.count(), model.is.name, to_string(model.state))});
    queue_.erase(each);
  }
}

void model_host::impl::tick(lock_type& lock, clock::time_point now) {
  next_tick_ = now + options_.tick;
  decide(lock, now);
  share_memory(lock);
  publish_run_ahead();
  owed_ = pool_->owed();
  is_needed_ = pool_->is_needed();
  give_way(clock::now());  // an executor that loads, or computes, has none of its steps meanwhile
  work_.notify_one();      // idle timeouts may have changed, and memory may be owed
  rest_activations(lock, now);
  keep_reserve(lock);
  prepare_memory(lock);
  keep_learnt(lock);
}

/// What one model asks for changes what others have to wait: where that has moved all decide anew, else those with news.
void model_host::impl::decide(lock_type& lock, clock::time_point now) {
  bool const all = demands_.has_moved(now, slots_.size());
  if (all) {
    predict_together(lock, now);
  }
  // Others may come meanwhile. NOLINTNEXTLINE(modernize-loop-convert)
  for (model_index place = 0; place < slots_.size(); ++place) {
    auto& each = slots_[place];
    bool const has_news =
        !each.is_retired && (each.controller.has_news() || each.controller.due() <= now);
    if (!all && !has_news) {
      each.controller.observe(now, each.report);
      report_promise(each, now);
      continue;
    }
    try {
      each.report = each.controller.tick(now, demands_.beside(place));
      report_promise(each, now);
    } catch (std::exception const& failure) {
      spdlog::error("the scheduler has no decision model={} reason={}", each.is.name,
                    telemetry::quoted(failure.what()));
    }
    lock.unlock();  // a decision takes up to a millisecond: requests get in between two
    lock.lock();
  }
}

/// Computed without the lock, since a simulation takes milliseconds.
void model_host::impl::predict_together(lock_type& lock, clock::time_point now) {
  std::vector<scheduler::shared_model> models;
  for (model_index place = 0; place < slots_.size(); ++place) {
    auto demand =
        slots_[place].is_retired ? scheduler::shared_model{} : slots_[place].controller.demand(now);
    auto const measured = demand.service.mean();
    if (auto const alone = parallelism_.alone(place); alone && measured > *alone) {
      demand.alone_factor = *alone / measured;
    }
    models.push_back(std::move(demand));
  }
  scheduler::shared_executors const executors{.at_once = parallelism_.bound(),
                                              .slowdown = parallelism_.slowdowns()};
  lock.unlock();
  std::vector<scheduler::shared_load> beside;
  try {
    beside = scheduler::predict_together(models, executors);
  } catch (std::exception const& failure) {
    spdlog::error("models are predicted alone reason={}", telemetry::quoted(failure.what()));
  }
  lock.lock();
  beside.resize(models.size());
  demands_.predicted(now, executors, std::move(beside));
}

/// Where what all models want on average is more than they can have, timeouts are chosen for all together; and where not all have room at
/// once, the reserve is of what they do not have on average.
void model_host::impl::share_memory(lock_type& lock) {
  lock.unlock();
  auto const usage = pool_->usage();
  lock.lock();
  auto room = usage.total_bytes - std::min(usage.total_bytes, usage.kept_bytes);
  std::uint64_t bytes_of_all = 0;
  std::vector<scheduler::joint_keeping::model> models;
  models.reserve(slots_.size());
  for (auto const& each : slots_) {
    auto const bytes = each.is_retired ? 0 : each.is.model->bytes();
    if (each.is.always_warm) {
      room -= std::min(room, bytes);
    } else {
      bytes_of_all += bytes;
    }
    bool const stays = each.is_retired || each.is.always_warm;
    models.push_back({.decision = stays ? nullptr : &each.report.warm,
                      .weight_bytes = static_cast<double>(bytes),
                      .max_idle = each.is.scheduling.limits.max_idle});
  }
  auto const memory = static_cast<double>(room);
  try {
    auto const in_force = shared_.share(models, memory);
    for (model_index place = 0; place < slots_.size(); ++place) {
      slots_[place].together = in_force[place];
    }
  } catch (std::exception const& failure) {
    spdlog::error("the scheduler has no decision for all models reason={}",
                  telemetry::quoted(failure.what()));
  }
  bool const is_short = shared_.wanted_bytes() > memory;
  if (is_short != std::exchange(memory_is_short_, is_short)) {
    spdlog::info("{} wanted_bytes={:.0f} memory_bytes={}",
                 is_short ? "models want more memory than there is, and idle timeouts are chosen "
                            "for all together"
                          : "models have memory enough, and each its own idle timeout",
                 shared_.wanted_bytes(), room);
  }
  largest_reserve_ = usage.total_bytes / largest_reserve_divisor;
  if (bytes_of_all > room) {
    auto const rest = std::max(0.0, memory - shared_.wanted_bytes());
    largest_reserve_ = std::min(largest_reserve_, static_cast<std::uint64_t>(rest));
  }
}

/// Once, and once more when it has been over for a while.
void model_host::impl::report_promise(slot& model, clock::time_point now) {
  auto const& made = model.report.warm;
  if (!made.feasible()) {
    model.keeps_since.reset();
    if (!model.miss_is_reported && model.report.services >= reported_from_services) {
      model.miss_is_reported = true;
      spdlog::warn(
          "a model is predicted to miss its promise with any idle timeout model={} reason={} "
          "required={:.4f} predicted={:.4f} would_do={}",
          model.is.name, scheduler::to_string(made.reason), made.required_share,
          made.chosen.attainment, telemetry::quoted(remedy_text(made)));
    }
  } else if (model.miss_is_reported) {
    model.keeps_since = model.keeps_since.value_or(now);
    if (now - *model.keeps_since >= reported_over_after) {
      model.miss_is_reported = false;
      spdlog::info("a model is predicted to keep its promise again model={} predicted={:.4f}",
                   model.is.name, made.chosen.attainment);
    }
  }
}

/// What computations keep for each other goes back when a model has not computed for a while, since it may have needed the most.
void model_host::impl::rest_activations(lock_type& lock, clock::time_point now) {
  bool due = false;
  for (auto& each : slots_) {
    if (each.computed && !each.is_in_use() && now >= *each.computed + options_.activations_kept) {
      each.computed.reset();
      each.rest_wanted = due = true;
    }
  }
  if (!due) {
    return;
  }
  work_.notify_one();
  lock.unlock();
  give_back_activations();
  lock.lock();
}

/// The models that are expected soonest find their memory stitched, where they need that.
void model_host::impl::prepare_memory(lock_type& lock) {
  std::vector<std::pair<double, hosted_model const*>> expected;
  std::vector<std::vector<std::uint64_t>> pieces;  // a model may leave as soon as the lock is open
  for (auto const& each : slots_) {
    if (each.state == model_state::cold && !each.is.always_warm &&
        each.report.warm.chosen.loads_per_s > 0.0) {
      expected.emplace_back(each.report.warm.chosen.loads_per_s, each.is.model.get());
    }
  }
  std::sort(expected.begin(), expected.end(), std::greater{});
  expected.resize(std::min(expected.size(), prepared_models));
  for (auto const& each : expected) {
    auto const its = each.second->pieces();
    pieces.emplace_back(its.begin(), its.end());
  }
  lock.unlock();
  for (auto const& each : pieces) {
    heap_.prepare(each);
  }
  heap_.tidy();
  lock.lock();
}

void model_host::impl::keep_reserve(lock_type& lock) {
  std::vector<scheduler::cold_model> cold;
  for (auto const& each : slots_) {
    if (each.state == model_state::cold && !each.is.always_warm) {
      cold.push_back(scheduler::cold_model_of(each.report.warm, each.is.model->bytes()));
    }
  }
  lock.unlock();
  auto const usage = pool_->usage();
  auto const size = options_.reserve_bytes.value_or(
      scheduler::reserve_size(cold, largest_reserve_, reserve_bytes_ > 0, options_.tick));
  reserve_bytes_ = size;
  auto const keep = keeper_.update({.free_bytes = usage.free_bytes, .size_bytes = size}).keep_bytes;
  if (keep != kept_bytes_) {
    pool_->set_reserve(keep);
    kept_bytes_ = keep;
  }
  lock.lock();
}

}  // namespace sluice::server
