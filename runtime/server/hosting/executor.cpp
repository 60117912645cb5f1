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
#include "scheduler/eviction.hpp"

namespace sluice::server {
namespace {

/// How long tenants may take to give what is owed to others; whoever waits to be loaded waits, too.
constexpr std::chrono::seconds longest_gathering{5};
/// Beyond this an idle timeout does not fit a clock; nobody waits for it either.
constexpr scheduler::seconds longest_timeout{1e8};
/// How long training may take to give memory for a load that nobody waits for.
constexpr std::chrono::seconds longest_spare_wait{2};

void log_load(char const* what, host_snapshot::handover const& event,
              std::chrono::nanoseconds total) {
  auto const& report = event.report;
  spdlog::info(
      "{} model={} bytes={} reclaimed_bytes={} notify_us={:.0f} gate_us={:.0f} "
      "drain_us={:.0f} revoke_us={:.0f} ledger_us={:.0f} map_us={:.0f} handover_us={:.0f} "
      "load_us={:.0f} total_us={:.0f}",
      what, event.model, report.bytes, report.bytes_reclaimed, detail::microseconds(report.notify),
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
  gather_needed(lock, now);
  give_way(now);
  for (model_index number = 0; number < slots_.size(); ++number) {
    auto& each = slots_[number];
    if (is_to_leave(each)) {
      see_off(lock, each);
      return;
    }
    if (auto const end = idle_end(each, now); end && *end <= now) {
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
  if (has_for_executor()) {
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
  } else if (auto* const due = due_prewarm(now)) {
    prewarm(lock, *due);
  } else if (auto* const model = next_image()) {
    extend_image(lock, *model);
  } else if (!stopping_ || !computing_.empty() || !queue_.empty()) {
    wait_for_work(lock, now);
  }
}

/// What others do not do: load, and where there are no others, compute.
bool model_host::impl::is_for_executor(detail::job const& job) const {
  auto const state = slots_[job.model].state;
  return state != model_state::warm || options_.computing_threads == 0;
}

bool model_host::impl::has_for_executor() const {
  return std::any_of(queue_.begin(), queue_.end(),
                     [this](detail::job const& each) { return is_for_executor(each); });
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

/// At `looked` there was nothing to do.
void model_host::impl::wait_for_work(lock_type& lock, clock::time_point looked) {
  auto until = clock::time_point::max();
  for (auto const& each : slots_) {
    until = std::min(until, idle_end(each, looked).value_or(until));
    if (auto const at = prewarm_time(each, looked); at && *at > looked) {  // else others come first
      until = std::min(until, *at);
    }
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

std::optional<detail::clock::time_point> model_host::impl::idle_end(slot const& model,
                                                                    clock::time_point now) const {
  auto const timeout = model.gives_way  ? scheduler::seconds{0.0}
                       : model.together ? model.together->idle_timeout
                                        : model.controller.idle_timeout_since(model.idle_since, now,
                                                                              model.prewarm_unused);
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

/// What a job of higher priority cannot go on without: while there are no requests, once a tick at most, and less often where it does
/// not come, since each time costs others a micro-batch.
void model_host::impl::gather_needed(lock_type& lock, clock::time_point now) {
  if (!is_needed_ || next_needed_ > now || has_for_executor()) {
    return;
  }
  is_needed_ = false;
  next_needed_ = now + longest_gathering;
  auto const called_off = prewarming_.emplace(spare_load{}).ends.get_token();
  lock.unlock();
  try {
    if (pool_->gather_needed(now + longest_gathering, called_off)) {
      next_needed_ = now;
    }
  } catch (error const& failure) {
    if (failure.kind() == error_kind::cancelled) {
      next_needed_ = now;  // a request comes first
    } else {
      spdlog::warn("what a job needs is not given in time reason={}",
                   telemetry::quoted(failure.what()));
    }
  }
  lock.lock();
  prewarming_.reset();
}

/// When memory is owed to a job, models that it takes for that are released, each as soon as it has no requests.
void model_host::impl::give_way(clock::time_point now) {
  if (owed_) {
    owed_ = pool_->owed();
  }
  bool const is_due = owed_ && owed_->at <= now;
  if (is_due) {
    call_off_prewarm();
  }
  if (std::exchange(some_give_way_, is_due) || is_due) {
    choose_who_gives_way(is_due ? owed_->missing_bytes : 0);
  }
}

/// Whose absence costs least of those that make up for what is missing; empty if all do not.
std::vector<detail::slot*> model_host::impl::cheapest_of(std::vector<slot*> const& candidates,
                                                         std::uint64_t missing) {
  auto const now = clock::now();
  std::vector<scheduler::resident_model> there;
  there.reserve(candidates.size());
  for (auto const* const each : candidates) {
    there.push_back({.bytes = each->is.model->bytes(),
                     .loss_per_s = each->controller.absence_loss(now),
                     .idle = now - each->idle_since,
                     .has_requests = each->queue > 0});
  }
  std::vector<slot*> chosen;
  for (auto const place : scheduler::models_to_release(there, missing)) {
    chosen.push_back(candidates[place]);
  }
  return chosen;
}

/// Idle ones before those with requests, those whose absence costs least first; all of them where they are not enough.
void model_host::impl::choose_who_gives_way(std::uint64_t missing_bytes) {
  std::vector<slot*> candidates;
  for (auto& each : slots_) {
    each.gives_way = false;
    if (each.state == model_state::warm && !each.is.always_warm && !each.keeps_memory &&
        !keeps_warm_ && each.is.model->bytes() > 0) {
      candidates.push_back(&each);
    }
  }
  if (missing_bytes == 0) {
    return;
  }
  auto const chosen = cheapest_of(candidates, missing_bytes);
  for (auto* const each : chosen.empty() ? candidates : chosen) {
    each->gives_way = true;
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

/// `lend` gives it memory, and `copy` brings the weights there.
template <typename Lend, typename Copy>
model_host::impl::load_outcome model_host::impl::fill(lock_type& lock, slot& model,
                                                      Lend const& lend, Copy const& copy) {
  set_state(model, model_state::loading);
  auto const place = place_of(model);
  lock.unlock();

  load_outcome made{.begin = clock::now(), .event = {model.is.name, {}, {}, {}}};
  try {
    detail::shown_action const shown{*board_, activity::loading, place};
    while (model.lacks_image()) {  // before memory is taken for it
      model.is.model->extend_image();
    }
    made.begin = clock::now();
    if (model.is.model->bytes() > 0) {
      model.memory = lend(made.event.report);
    }
    auto const loading = clock::now();
    copy(model.memory.addresses());
    made.event.load = clock::now() - loading;
  } catch (...) {
    made.failure = caught_error();
    model.memory = {};
  }
  made.end = clock::now();
  made.event.at = std::chrono::system_clock::now();

  lock.lock();
  model.idle_since = made.end;
  set_state(model, made.failure ? model_state::cold : model_state::warm);
  return made;
}

void model_host::impl::note_load(slot& model, load_outcome made, char const* what) {
  auto const took = made.end - made.begin;
  computes_.notify_all();
  model.failing_with.reset();
  model.image_failure.reset();
  model.controller.on_load(made.end, took, made.event.report.total);
  log_load(what, made.event, took);
  handovers_.push_back(std::move(made.event));
  if (handovers_.size() > kept_handovers) {
    handovers_.pop_front();
  }
}

void model_host::impl::load(lock_type& lock, model_index number, clock::time_point deadline) {
  auto& model = slots_[number];
  ++model.cold_starts;
  auto made = fill(
      lock, model,
      [&](memhandover::handover_report& report) { return obtain(model, deadline, report); },
      [&](std::span<std::byte* const> memory) { model.is.model->load(memory); });
  if (auto const& failure = made.failure) {
    // Once, however often it is tried again: the answers say it each time.
    bool const is_new = std::exchange(model.failing_with, failure->kind()) != failure->kind();
    spdlog::log(is_new ? spdlog::level::warn : spdlog::level::debug,
                "cold start failed model={} bytes={} after_us={:.0f} kind={} reason={}",
                model.is.name, model.is.model->bytes(), detail::microseconds(made.end - made.begin),
                to_string(failure->kind()), telemetry::quoted(failure->what()));
    refuse_all_of(number, {failure->kind(), not_loaded(model.is.name, failure->what()),
                           failure->retry_after()});
    return;
  }
  note_load(model, std::move(made), "cold start");
}

/// When the model is to be loaded although nobody asks. Once for each bunch that is expected: whatever comes of it, a request is served
/// like any other.
std::optional<detail::clock::time_point> model_host::impl::prewarm_time(
    slot const& model, clock::time_point now) const {
  if (model.state != model_state::cold || model.is_retired || model.is.always_warm ||
      model.together || keeps_warm_ || stopping_) {
    return std::nullopt;
  }
  auto const at = model.controller.prewarm_at(now);
  return at && *at > model.prewarm_tried
             ? std::optional{std::chrono::time_point_cast<clock::duration>(*at)}
             : std::nullopt;
}

/// While nobody waits for what the executor alone does; its image is completed first.
detail::slot* model_host::impl::due_prewarm(clock::time_point now) {
  auto const is_due = [&](slot const& each) {
    auto const at = prewarm_time(each, now);
    return at && *at <= now && !(each.image_wanted && each.lacks_image());
  };
  auto const found =
      has_for_executor() ? slots_.end() : std::find_if(slots_.begin(), slots_.end(), is_due);
  return found == slots_.end() ? nullptr : &*found;
}

/// A load that nobody waits for, into memory that nobody keeps. Requests of that model that come meanwhile are served when it is done; when
/// others need the executor, or a job its memory, it is called off.
void model_host::impl::prewarm(lock_type& lock, slot& model) {
  auto const now = clock::now();
  model.prewarm_tried = now;
  if (model.lacks_image()) {
    omit_prewarm(model, {error_kind::unavailable, "its image is not there"});
    return;
  }
  if (pool_->owed()) {
    omit_prewarm(model, {error_kind::out_of_memory, "memory is owed to somebody who is parked"});
    return;
  }
  auto const called_off = prewarming_.emplace(spare_load{&model, {}}).ends.get_token();
  auto made = fill(
      lock, model,
      [&](memhandover::handover_report& report) {
        return heap_.load({model.is.model->pieces(), model.is.name, detail::residence_of(model)},
                          memhandover::urgency::spare(now + longest_spare_wait, called_off),
                          &report);
      },
      [&](std::span<std::byte* const> memory) { model.is.model->load_spare(memory, called_off); });
  prewarming_.reset();
  if (made.failure) {
    omit_prewarm(model, *made.failure);
  } else {
    ++model.prewarms;
    model.prewarm_unused = model.queue == 0;
    model.prewarms_used += model.prewarm_unused ? 0 : 1;
    note_load(model, std::move(made), "prewarmed");
  }
  rest();  // of those who have come meanwhile
}

void model_host::impl::omit_prewarm(slot& model, error const& why) {
  ++model.prewarms_omitted;
  spdlog::info("a prewarm is left out model={} bytes={} kind={} reason={}", model.is.name,
               model.is.model->bytes(), to_string(why.kind()), telemetry::quoted(why.what()));
}

/// Somebody needs what a load that nobody waits for has: the executor, or memory.
void model_host::impl::call_off_prewarm() {
  if (prewarming_) {
    prewarming_->ends.request_stop();
  }
}

/// A request has come to the queue.
void model_host::impl::join_or_call_off_prewarm(slot const& wanted) {
  if (!prewarming_) {
    return;
  }
  if (prewarming_->model != &wanted) {
    if (is_for_executor(queue_.back())) {
      call_off_prewarm();
    }
    return;
  }
  busy_ = loading_ = true;  // it is waited for now
  if (wants_compute()) {
    hold_compute();
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
      if (evict_for(model, bytes - to_be_had, deadline)) {
        continue;
      }
    }
    try {
      return heap_.load({model.is.model->pieces(), model.is.name, detail::residence_of(model)},
                        deadline, &report);
    } catch (error const& failure) {
      if (failure.kind() != error_kind::out_of_memory || !can_fit ||
          !evict_for(model, 1, deadline)) {
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

/// Releases models for another's sake, idle ones before those with requests: those that make up for what is missing at least cost, or
/// where none do, one. Where all of them compute it waits for one that has done. False if there is none by then. Called without the lock.
bool model_host::impl::evict_for(slot const& model, std::uint64_t missing,
                                 clock::time_point deadline) {
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
  std::erase_if(candidates, std::not_fn(is_free));
  auto victims = cheapest_of(candidates, missing);
  if (victims.empty()) {
    victims = cheapest_of(candidates, 1);
  }
  for (auto* const each : victims) {
    each->held = true;
  }
  computes_.notify_all();
  bool has_released = false;
  for (auto* const each : victims) {
    each->held = false;
    has_released = release(lock, *each, "evicted") || has_released;
  }
  return has_released;
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
  model.offered = model.published = model.gives_way = model.prewarm_unused = false;
  want_image(model);
  spdlog::info("model released model={} bytes={} why={}", model.is.name, model.is.model->bytes(),
               why);
  return true;
}

}  // namespace sluice::server
