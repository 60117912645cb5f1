// The executor of model_host: the one thread that loads and releases, and computes where no others do.

#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/hosting/absent_model.hpp"
#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// How long tenants may take to give what is owed to others; whoever waits to be loaded waits, too.
constexpr std::chrono::seconds longest_gathering{5};
/// Beyond this an idle timeout does not fit a clock; nobody waits for it either.
constexpr scheduler::seconds longest_timeout{1e8};

void log_cold_start(host_snapshot::handover const& event, std::chrono::nanoseconds total) {
  auto const& report = event.report;
  spdlog::info(
      "cold start model={} bytes={} reclaimed_bytes={} notify_us={:.0f} gate_us={:.0f} "
      "drain_us={:.0f} revoke_us={:.0f} ledger_us={:.0f} map_us={:.0f} handover_us={:.0f} "
      "load_us={:.0f} total_us={:.0f}",
      event.model, report.bytes, report.bytes_reclaimed, detail::microseconds(report.notify),
      detail::microseconds(report.gate), detail::microseconds(report.drain),
      detail::microseconds(report.revoke), detail::microseconds(report.ledger),
      detail::microseconds(report.map), detail::microseconds(report.total),
      detail::microseconds(event.load), detail::microseconds(total));
}

/// What the model says of itself has its name already.
std::string not_loaded(std::string const& model, std::string_view why) {
  bool const is_named = why.find(fmt::format("model '{}'", model)) != std::string_view::npos;
  return is_named ? std::string{why} : fmt::format("model '{}' cannot be loaded: {}", model, why);
}

}  // namespace

void model_host::impl::execute() {
  ::pthread_setname_np(::pthread_self(), "sluice-executor");
  host_board::this_lane = host_board::executor_lane;
  prepare_thread();
  lock_type lock{mutex_};
  take_over(lock);
  work_off(lock);
  for (auto& each : slots_) {
    if (each.state == model_state::warm) {
      (void)release(lock, each, "shutdown");
    }
  }
  lease_->release();
  executed_ = true;
  changed_.notify_all();
}

void model_host::impl::work_off(lock_type& lock) {
  while (!stopping_ || !queue_.empty() || !computing_.empty()) {
    try {
      next_step(lock);
    } catch (
        ...) {  // what a step expects to fail, it handles; this keeps the others' requests alive
      if (!lock.owns_lock()) {
        lock.lock();
      }
      rest();
      spdlog::error("the executor goes on after a failure reason={}",
                    telemetry::quoted(caught_error().what()));
    }
  }
}

void model_host::impl::next_step(lock_type& lock) {
  auto const now = clock::now();
  gather_owed(lock, now);
  give_way(now);
  for (model_index number = 0; number < slots_.size(); ++number) {
    auto& each = slots_[number];
    if (is_to_leave(each)) {
      see_off(lock, each);
      return;
    }
    if (auto const end = idle_end(each); end && *end <= now) {
      (void)release(lock, each, each.gives_way ? "owed to a job" : "idle");
      return;
    }
    if (each.rest_wanted && !each.is_in_use()) {
      have_rest(lock, each);
      return;
    }
    if (each.load_wanted && each.state == model_state::cold && !stopping_) {
      if (each.waits_for_image()) {
        extend_image(lock, each);
        return;
      }
      load(lock, number, now + each.is.queue_timeout);
      each.load_wanted = false;
      changed_.notify_all();
      return;
    }
  }
  if (std::any_of(queue_.begin(), queue_.end(),
                  [this](detail::job const& each) { return is_for_executor(each); })) {
    busy_ = true;
    bool const has_served = serve(lock);
    rest();
    if (has_served) {
      return;
    }
  }
  auto const unpublished = std::find_if(slots_.begin(), slots_.end(), [](slot const& each) {
    return each.state == model_state::warm && !each.offered && !each.is_in_use();
  });
  if (unpublished != slots_.end()) {
    publish(lock, *unpublished);
  } else if (auto* const model = next_image()) {
    extend_image(lock, *model);
  } else if (!stopping_ || !computing_.empty() || !queue_.empty()) {
    wait_for_work(lock);
  }
}

/// What others do not do: load, and where there are no others, compute.
bool model_host::impl::is_for_executor(detail::job const& job) const {
  auto const state = slots_[job.model].state;
  return state != model_state::warm || options_.computing_threads == 0;
}

/// After a step for a request. A pause that this step was the last to want outlasts it a little.
void model_host::impl::rest() {
  if (wants_compute()) {
    pause_end_ = clock::now() + options_.pause_hysteresis;
  }
  busy_ = false;
  loading_ = false;
  release_pause_if_unwanted();
}

void model_host::impl::release_pause_if_unwanted() {
  if (options_.pause == pause_mode::on_launch) {
    end_claim_if_idle();
  } else if (lease_->wanted() && !wants_compute()) {
    wake_timekeeper();
  }
}

void model_host::impl::wait_for_work(lock_type& lock) {
  auto until = clock::time_point::max();
  for (auto const& each : slots_) {
    until = std::min(until, idle_end(each).value_or(until));
  }
  if (owed_ && owed_->at > clock::now()) {
    until = std::min(until, owed_->at);
  }
  if (options_.computing_threads == 0) {
    until = std::min(until, gathering_until_);
  }
  executor_sleeps_until_ = until;
  if (until == clock::time_point::max()) {
    work_.wait(lock);
  } else {
    work_.wait_until(lock, until);
  }
  executor_sleeps_until_ = clock::time_point::min();
}

std::optional<detail::clock::time_point> model_host::impl::idle_end(slot const& model) const {
  auto const timeout = model.gives_way ? scheduler::seconds{0.0} : model.controller.idle_timeout();
  if (model.state != model_state::warm || model.queue > 0 || model.is.always_warm ||
      model.keeps_memory || keeps_warm_ || timeout > longest_timeout) {
    return std::nullopt;
  }
  return model.idle_since + std::chrono::duration_cast<clock::duration>(timeout);
}

/// What is owed is demanded from tenants, once a tick at most, before models give way for it. An executor alone asks, since it waits
/// for the answers.
void model_host::impl::gather_owed(lock_type& lock, clock::time_point now) {
  if (!owed_ || owed_->at > now || owed_->missing_bytes == 0 || next_gathering_ > now) {
    return;
  }
  next_gathering_ = now + options_.tick;
  lock.unlock();
  try {
    pool_->gather_owed(now + longest_gathering);
  } catch (error const& failure) {
    spdlog::warn("what is owed is not given in time reason={}", telemetry::quoted(failure.what()));
    next_gathering_ = clock::now() + longest_gathering;  // others are to be loaded meanwhile
  }
  lock.lock();
}

/// When memory is owed to a job, models that it takes for that are released, each as soon as it has no requests.
void model_host::impl::give_way(clock::time_point now) {
  if (owed_) {
    owed_ = pool_->owed();
  }
  bool const is_due = owed_ && owed_->at <= now;
  if (std::exchange(some_give_way_, is_due) || is_due) {
    choose_who_gives_way(is_due ? owed_->missing_bytes : 0);
  }
}

/// Idle ones before those with requests, the longest idle first.
void model_host::impl::choose_who_gives_way(std::uint64_t missing_bytes) {
  std::vector<slot*> candidates;
  for (auto& each : slots_) {
    each.gives_way = false;
    if (each.state == model_state::warm && !each.is.always_warm && !each.keeps_memory &&
        !keeps_warm_ && each.is.model->bytes() > 0) {
      candidates.push_back(&each);
    }
  }
  std::sort(candidates.begin(), candidates.end(), [](slot const* a, slot const* b) {
    return std::pair{a->queue > 0, a->idle_since} < std::pair{b->queue > 0, b->idle_since};
  });
  for (auto* const each : candidates) {
    if (missing_bytes == 0) {
      break;
    }
    each->gives_way = true;
    missing_bytes -= std::min(missing_bytes, each->is.model->bytes());
  }
}

/// One step for the oldest request: it is run, or if its model is cold the model is loaded. Those whose models have
/// no image yet let others go before them, as do those that wait for others of their batch. False: all do.
bool model_host::impl::serve(lock_type& lock) {
  auto const oldest = std::find_if(queue_.begin(), queue_.end(), [this](detail::job const& each) {
    return is_for_executor(each);
  });
  auto& its = slots_[oldest->model];
  bool const has_read = its.waits_for_image();
  if (has_read) {
    extend_image(lock, its);
  }
  auto const batch = options_.computing_threads == 0 ? next_computable() : detail::batch{};
  auto const cold = std::find_if(queue_.begin(), queue_.end(), [this](detail::job const& each) {
    auto const& model = slots_[each.model];
    return model.state != model_state::warm && !model.waits_for_image();
  });
  bool const has_cold = cold != queue_.end();
  if (!batch.empty() && (!has_cold || batch.front()->arrival <= cold->arrival)) {
    run(lock, batch);
    return true;
  }
  if (!has_cold) {
    return has_read;
  }
  auto const number = cold->model;
  // Memory is worth having as long as any of those who wait for it still does.
  auto deadline = clock::time_point::min();
  for (auto const& each : queue_) {
    deadline = each.model == number ? std::max(deadline, each.deadline) : deadline;
  }
  loading_ = true;
  if (wants_compute()) {
    hold_compute();
  }
  load(lock, number, deadline);
  return true;
}

void model_host::impl::load(lock_type& lock, model_index number, clock::time_point deadline) {
  auto& model = slots_[number];
  set_state(model, model_state::loading);
  ++model.cold_starts;
  lock.unlock();

  auto begin = clock::now();
  host_snapshot::handover event{model.is.name, {}, {}, {}};
  std::optional<error> failure;
  try {
    detail::shown_action const shown{*board_, activity::loading, number};
    while (model.lacks_image()) {  // before memory is taken for it
      model.is.model->extend_image();
    }
    begin = clock::now();
    if (model.is.model->bytes() > 0) {
      model.memory = obtain(model, deadline, event.report);
    }
    auto const loading = clock::now();
    model.is.model->load(model.memory.addresses());
    event.load = clock::now() - loading;
  } catch (...) {
    failure = caught_error();
    model.memory = {};
  }
  auto const end = clock::now();
  event.at = std::chrono::system_clock::now();

  lock.lock();
  model.idle_since = end;
  if (failure) {
    set_state(model, model_state::cold);
    // Once, however often it is tried again: the answers say it each time.
    bool const is_new = std::exchange(model.failing_with, failure->kind()) != failure->kind();
    spdlog::log(is_new ? spdlog::level::warn : spdlog::level::debug,
                "cold start failed model={} bytes={} after_us={:.0f} kind={} reason={}",
                model.is.name, model.is.model->bytes(), detail::microseconds(end - begin),
                to_string(failure->kind()), telemetry::quoted(failure->what()));
    refuse_all_of(number, {failure->kind(), not_loaded(model.is.name, failure->what()),
                           failure->retry_after()});
    return;
  }
  set_state(model, model_state::warm);
  computes_.notify_all();
  model.failing_with.reset();
  model.image_failure.reset();
  model.controller.on_load(end, end - begin, event.report.total);
  log_cold_start(event, end - begin);
  handovers_.push_back(std::move(event));
  if (handovers_.size() > kept_handovers) {
    handovers_.pop_front();
  }
}

/// Called without the lock.
memhandover::loaded_tensors model_host::impl::obtain(slot const& model, clock::time_point deadline,
                                                     memhandover::handover_report& report) {
  auto const bytes = model.is.model->bytes();
  bool gave_back = false;
  for (;;) {
    // Asking training first, in vain, would cost it a micro-batch; and releasing models in vain, their next
    // requests a cold start.
    auto const usage = pool_->usage();
    bool const can_fit = bytes <= usage.total_bytes - usage.kept_bytes;
    auto const to_be_had =
        usage.free_bytes + usage.tenant_bytes() - usage.kept_bytes + heap_.hole_bytes();
    if (can_fit && to_be_had < bytes) {
      if (!std::exchange(gave_back, true)) {
        give_back_activations();
        continue;
      }
      refuse_while_owed(model);
      if (evict_for(model, deadline)) {
        continue;
      }
    }
    try {
      return heap_.load({model.is.model->pieces(), model.is.name, detail::residence_of(model)},
                        deadline, &report);
    } catch (error const& failure) {
      if (failure.kind() != error_kind::out_of_memory || !can_fit || !evict_for(model, deadline)) {
        throw;
      }
    }
  }
}

/// What models give now is a job's: none goes for another's sake.
void model_host::impl::refuse_while_owed(slot const& model) const {
  if (auto const owed = pool_->owed(); owed && owed->at <= clock::now()) {
    throw error{
        error_kind::out_of_memory,
        fmt::format("{} bytes are wanted; {} more are owed to a job that has been parked for "
                    "as long as it may be, and keeps them then for about {} ms",
                    model.is.model->bytes(), owed->missing_bytes, owed->stay.count()),
        owed->stay};
  }
}

/// Called without the lock.
void model_host::impl::give_back_activations() const {
  if (options_.give_back_activations) {
    options_.give_back_activations();
  }
}

/// Releases one model for another's sake: idle ones before those with requests, the longest unused first. Where all of
/// them compute it waits for one that has done. False if there is none by then. Called without the lock.
bool model_host::impl::evict_for(slot const& model, clock::time_point deadline) {
  lock_type lock{mutex_};
  std::vector<slot*> candidates;
  for (auto& each : slots_) {
    if (&each != &model && each.state == model_state::warm && !each.is.always_warm &&
        !each.keeps_memory && each.memory) {
      candidates.push_back(&each);
      each.held = true;  // computes nothing more meanwhile
    }
  }
  auto const is_free = [](slot const* each) { return !each->is_in_use(); };
  (void)changed_.wait_until(lock, deadline, [&] {
    return candidates.empty() || std::any_of(candidates.begin(), candidates.end(), is_free);
  });
  for (auto* const each : candidates) {
    each->held = false;
  }
  computes_.notify_all();
  std::erase_if(candidates, std::not_fn(is_free));
  auto const victim =
      std::min_element(candidates.begin(), candidates.end(), [](slot const* a, slot const* b) {
        return std::pair{a->queue > 0, a->idle_since} < std::pair{b->queue > 0, b->idle_since};
      });
  return victim != candidates.end() && release(lock, **victim, "evicted");
}

/// Of what it keeps for computations beside the weights.
void model_host::impl::have_rest(lock_type& lock, slot& model) {
  model.rest_wanted = false;
  if (model.state != model_state::warm) {
    return;
  }
  model.taken = true;
  lock.unlock();
  if (model.is.model->rest()) {
    give_back_activations();
  }
  lock.lock();
  model.taken = false;
  computes_.notify_one();
}

bool model_host::impl::is_to_leave(slot const& model) {
  return model.is_retired && !model.has_left && model.queue == 0 && !model.is_in_use() &&
         !model.keeps_memory;
}

/// Of a retired model that has no requests any more.
void model_host::impl::see_off(lock_type& lock, slot& model) {
  if (model.state == model_state::warm && !release(lock, model, "retired")) {
    return;
  }
  std::unique_ptr<hosted_model> gone = std::make_unique<absent_model>(not_served(model.is.name));
  model.is.model.swap(gone);
  model.image_wanted = false;
  lock.unlock();
  gone.reset();  // its image may take long to free
  lock.lock();
  model.has_left = true;
  changed_.notify_all();
}

bool model_host::impl::release(lock_type& lock, slot& model, char const* why) {
  set_state(model, model_state::releasing);
  lock.unlock();
  std::optional<error> failure;
  try {
    model.is.model->unload();
    model.memory = {};
    give_back_activations();
  } catch (...) {
    failure = caught_error();
  }
  lock.lock();
  if (failure) {
    model.keeps_memory = true;
    set_state(model, model_state::warm);
    computes_.notify_all();
    spdlog::error("model keeps its memory model={} bytes={} why={} reason={}", model.is.name,
                  model.memory.bytes(), why, telemetry::quoted(failure->what()));
    return false;
  }
  set_state(model, model_state::cold);
  model.offered = model.published = model.gives_way = false;
  want_image(model);
  spdlog::info("model released model={} bytes={} why={}", model.is.name, model.is.model->bytes(),
               why);
  return true;
}

}  // namespace sluice::server
