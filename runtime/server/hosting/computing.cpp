// The threads of model_host that compute: each takes the oldest request whose model is warm and that nobody else computes.

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// Answers with no more bytes are given before a thread that waits would have been woken.
constexpr std::size_t quick_answer = std::size_t{32} << 10U;
/// As long as the wake-ups that it saves may take, on a machine whose processors sleep deeply.
constexpr std::chrono::microseconds quick_computation{500};
/// A computation is not waited for any more when it takes so many times as long as its model's longest, and no less than this.
constexpr int long_for_its_model = 4;
constexpr std::chrono::milliseconds long_for_any{100};

bool is_quickly_given(std::vector<detail::answer> const& answers) {
  std::size_t bytes = 0;
  for (auto const& each : answers) {
    if (auto const* const response = std::get_if<infer_response>(&each.result)) {
      for (auto const& one : response->outputs) {
        bytes += one.data.size();
      }
    }
  }
  return bytes <= quick_answer;
}

}  // namespace

void model_host::impl::prepare_thread() {
  try {
    if (options_.thread_start) {
      options_.thread_start();
    }
  } catch (...) {
    spdlog::error("a thread that computes is not set up reason={}",
                  telemetry::quoted(caught_error().what()));
  }
}

/// Of a thread of somebody else's, which does so in `compute_here`.
void model_host::impl::prepare_to_compute() {
  if (!options_.callers_compute) {
    return;
  }
  {
    lock_type const lock{mutex_};
    auto const lane = options_.computing_threads + ++more_lanes_;
    host_board::this_lane = lane < host_board::preparing_lane ? lane : host_board::no_lane;
  }
  prepare_thread();
}

/// As many compute as may: until when that stays so if none of them ends. One that takes far longer than its model is known to, and
/// may never end, is not waited for.
std::optional<detail::clock::time_point> model_host::impl::hindered_until() const {
  auto const bound = parallelism_.bound();
  if (company_.count() < bound) {
    return std::nullopt;
  }
  auto const now = clock::now();
  std::size_t count = 0;
  auto until = clock::time_point::max();
  for (auto const& each : slots_) {
    auto const patience =
        std::max<clock::duration>(long_for_its_model * each.longest_computation, long_for_any);
    for (auto const& begun : each.computations) {
      if (auto const end = begun + patience; end > now) {
        ++count;
        until = std::min(until, end);
      }
    }
  }
  return count >= bound ? std::optional{until} : std::nullopt;
}

/// Of the first model in the queue that is free, and does not wait for others to come.
detail::batch model_host::impl::next_computable() {
  gathering_until_ = clock::time_point::max();
  if (suspect_is_computed_) {
    return {};
  }
  if (auto const until = hindered_until()) {
    gathering_until_ = *until;
    return {};
  }
  ++looks_;
  for (auto next = queue_.begin(); next != queue_.end(); ++next) {
    auto& model = slots_[next->model];
    if (!is_free(model) || std::exchange(model.looked_at, looks_) == looks_) {
      continue;
    }
    if (next->request.is_suspect) {  // no other is begun until it is done
      return company_.count() == 0 ? detail::batch{next} : detail::batch{};
    }
    if (auto batch = makes_batches(model) ? next_of(next->model) : detail::batch{next};
        !batch.empty()) {
      return batch;
    }
  }
  return {};
}

void model_host::impl::compute() {
  ::pthread_setname_np(::pthread_self(), "sluice-compute");
  prepare_thread();
  lock_type lock{mutex_};
  for (;;) {
    auto const batch = next_computable();
    if (!batch.empty()) {
      if (gathers_) {
        computes_.notify_one();  // who else waits, and until when, is somebody else's to look after
      }
      auto const& model = slots_[batch.front()->model];
      run(lock, batch);
      release_pause_if_unwanted();
      wake_executor_for(model);
    } else if (stopping_ && queue_.empty()) {
      return;
    } else if (gathering_until_ == clock::time_point::max()) {
      computes_.wait(lock);
    } else {
      computes_.wait_until(lock, gathering_until_);
    }
  }
}

/// Nothing, unless what waits for this thread takes so little time that others may wait for it, too.
bool model_host::impl::compute_here() {
  lock_type lock{mutex_};
  if (queue_.empty() || computers_.empty() || host_board::this_lane == host_board::no_lane) {
    return false;
  }
  auto const batch = gathers_ ? detail::batch{} : next_computable();
  bool const is_quick = !batch.empty() && is_known_quick(slots_[batch.front()->model]);
  if (!is_quick) {
    computes_.notify_one();
    return false;
  }
  auto const& model = slots_[batch.front()->model];
  run(lock, batch);
  release_pause_if_unwanted();
  wake_executor_for(model);
  return true;
}

bool model_host::impl::is_known_quick(slot const& model) {
  return model.longest_computation > std::chrono::nanoseconds::zero() &&
         model.longest_computation <= quick_computation;
}

/// Whether a thread that waits could compute now.
bool model_host::impl::has_work_for_another() const {
  return !hindered_until() &&
         std::any_of(queue_.begin(), queue_.end(),
                     [this](detail::job const& each) { return is_free(slots_[each.model]); });
}

bool model_host::impl::is_free(slot const& model) {
  return model.state == model_state::warm && !model.held && model.can_compute();
}

/// One that has just been computed may be published now, its image be made, or its idle timeout begins.
void model_host::impl::wake_executor_for(slot const& model) {
  bool const is_to_be_made =
      !model.offered || model.is_retired || (model.image_wanted && model.lacks_image());
  auto const end = idle_end(model, clock::now()).value_or(clock::time_point::max());
  if (stopping_ || is_to_be_made || end < executor_sleeps_until_) {
    work_.notify_one();
  }
}

/// What the exception that is caught says.
error model_host::impl::failure_of(hosted_model const& model) const {
  auto failure = caught_error();
  if (options_.device_failed && !model.device_works()) {
    options_.device_failed(failure);
  }
  if (failure.kind() == error_kind::out_of_memory) {
    give_back_activations();  // what it had already
  }
  return failure;
}

/// With the board's word of what it does, so that whoever replaces this process knows for whom it ended.
detail::call_outcome model_host::impl::compute_alone(slot const& model, detail::job& job) const {
  auto& request = job.request;
  detail::call_outcome made{
      .result = infer_response{request.model, model.is.version, request.id, {}},
      .begin = clock::now(),
      .share = {.samples = static_cast<std::uint64_t>(job.samples)}};
  detail::shown_action const shown{*board_, activity::computing, job.model, job.ticket};
  try {
    std::get<infer_response>(made.result).outputs =
        model.is.model->run(request.inputs, request.outputs);
  } catch (...) {
    made.result = failure_of(*model.is.model);
  }
  made.end = clock::now();
  return made;
}

/// Throws if it fails.
std::vector<detail::call_outcome> model_host::impl::compute_together(
    slot const& model, detail::batch const& batch) const {
  auto const& first = *batch.front();
  detail::shown_action const shown{*board_, activity::computing, first.model, first.ticket,
                                   batch.size()};
  std::vector<model_call> calls;
  std::uint64_t samples = 0;
  for (auto const& each : batch) {
    calls.push_back({each->request.inputs, each->request.outputs});
    samples += static_cast<std::uint64_t>(each->samples);
  }
  auto const begin = clock::now();
  model.is.model->run_together(calls);
  auto const end = clock::now();
  std::vector<detail::call_outcome> made;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    auto const& request = batch[i]->request;
    made.push_back({.result = infer_response{request.model, model.is.version, request.id,
                                             std::move(calls[i].outputs)},
                    .begin = begin,
                    .end = end,
                    .share = {.requests = static_cast<std::uint32_t>(batch.size()),
                              .samples = samples,
                              .is_first = false}});
  }
  return made;
}

/// One for each, in the batch's order. `in_vain` if they could not be computed together, although each by itself can.
std::vector<detail::call_outcome> model_host::impl::outcomes_of(slot const& model,
                                                                detail::batch const& batch,
                                                                bool& in_vain) const {
  std::optional<error> failure;
  if (batch.size() > 1) {
    try {
      return compute_together(model, batch);
    } catch (...) {
      failure = failure_of(*model.is.model);
    }
  }
  std::vector<detail::call_outcome> made;
  for (auto const& each : batch) {
    made.push_back(compute_alone(model, *each));
  }
  in_vain = failure && std::all_of(made.begin(), made.end(), [](auto const& each) {
              return std::holds_alternative<infer_response>(each.result);
            });
  if (in_vain) {
    spdlog::log(model.vain_batches == 0 ? spdlog::level::warn : spdlog::level::debug,
                "a batch has been computed one by one, since the model failed for all together "
                "model={} requests={} reason={}",
                model.is.name, batch.size(), telemetry::quoted(failure->what()));
  }
  return made;
}

/// Computes some requests of one model.
void model_host::impl::run(lock_type& lock, detail::batch const& batch) {
  for (auto const& each : batch) {
    computing_.splice(computing_.end(), queue_, each);
  }
  lease_->set_more_waits(!queue_.empty());
  auto const place = batch.front()->model;
  auto& model = slots_[place];
  model.rest_wanted = false;
  suspect_is_computed_ = batch.front()->request.is_suspect;
  auto const begin = clock::now();
  auto const begun = model.computations.insert(model.computations.end(), begin);
  company_.change(begin, 1);
  model.own_company.change(begin, 1);
  auto const company_before = company_.sum();
  auto const own_before = model.own_company.sum();
  if (!gathers_ && has_work_for_another()) {
    computes_.notify_one();
  }
  lock.unlock();

  bool const may_change = model.memory && model.is.model->most_at_once() == 1;
  if (may_change) {
    heap_.set_in_use(model.memory, true);  // its weights, until that is undone
  }
  bool in_vain = false;
  auto outcomes = outcomes_of(model, batch, in_vain);
  if (may_change) {
    heap_.set_in_use(model.memory, !model.is.model->is_intact());
  }

  lock.lock();
  auto const end = clock::now();
  company_.change(end, -1);
  model.own_company.change(end, -1);
  std::chrono::duration<double> const took = end - begin;
  parallelism_.add(place, (company_.sum() - company_before) / took.count(), took);
  auto const own_at_once = std::max(1.0, (model.own_company.sum() - own_before) / took.count());
  if (wants_compute()) {
    pause_end_ = end + options_.pause_hysteresis;
  }
  std::vector<detail::answer> answers;
  bool has_first = false;          // among those that are answered
  std::list<detail::job> is_done;  // whose tensors are given back without the lock
  for (std::size_t i = 0; i < batch.size(); ++i) {
    is_done.splice(is_done.end(), computing_, batch[i]);
    auto& job = is_done.back();
    --model.queue;
    if (note(job, outcomes[i], own_at_once)) {
      if (auto* const one = std::get_if<infer_response>(&outcomes[i].result);
          one != nullptr && one->times) {  // not of a warm-up
        one->times->batch.is_first |= !std::exchange(has_first, true);
      }
      answers.push_back({std::move(job.done), std::move(outcomes[i].result)});
    }
  }
  auto const deliver = [&] {
    lock.unlock();
    for (auto& each : answers) {
      each.deliver();
    }
    is_done.clear();
    lock.lock();
  };
  if (model.is.batching.preserve_ordering) {
    deliver();  // before another thread has anything to answer
    answers.clear();
  }
  model.computations.erase(begun);
  model.idle_since = end;
  model.computed = end;
  note_batch(model, batch.size(), in_vain);
  want_image(model);
  changed_.notify_all();
  bool const was_suspect = std::exchange(suspect_is_computed_, false);
  bool const is_soon_back = !was_suspect && !gathers_ && is_quickly_given(answers);
  if (was_suspect) {
    computes_.notify_all();  // who has found nothing to begin beside it
  } else if (!is_soon_back && !queue_.empty()) {
    computes_.notify_one();  // the next of this model's
  }
  soon_back_ += is_soon_back ? 1 : 0;
  deliver();
  soon_back_ -= is_soon_back ? 1 : 0;
}

/// Whether somebody waits for it still; else it has been answered: its time was over, or its client left. `at_once`: of so
/// many computations of its model, each of which has taken its part of the time.
bool model_host::impl::note(detail::job const& job, detail::call_outcome& is, double at_once) {
  auto& model = slots_[job.model];
  auto const took = is.end - is.begin;
  if (job.is_warmup) {
    return true;
  }
  auto const its_part =
      std::chrono::duration_cast<std::chrono::nanoseconds>(took / (is.share.requests * at_once));
  model.longest_computation =
      std::max<std::chrono::nanoseconds>(took, model.longest_computation * 7 / 8);
  auto* const response = std::get_if<infer_response>(&is.result);
  if (!job.done) {
    if (response != nullptr) {
      model.controller.on_late_service(its_part);
      demands_.add(is.end, its_part);
    }
    return false;
  }
  if (response == nullptr) {
    count_failure(job);
    if (detail::counts_against_promise(std::get<error>(is.result).kind())) {
      model.controller.on_failure(is.end, job.is_retry);
    }
    return true;
  }
  response->times = {.queue = is.begin - job.arrival,
                     .compute = took,
                     .batch = is.share,
                     .found_cold = job.found_cold};
  model.controller.on_service(is.end, its_part, is.end - job.arrival, job.is_retry);
  demands_.add(is.end, its_part);
  (job.found_cold ? cold_ : warm_).add(is.end - job.arrival);
  return true;
}

void model_host::impl::note_batch(slot& model, std::size_t requests, bool in_vain) const {
  if (requests == 1) {
    return;
  }
  model.vain_batches = in_vain ? model.vain_batches + 1 : 0;
  if (model.vain_batches == most_vain_batches) {
    spdlog::warn(
        "requests of a model are computed one by one from now on, since batches fail "
        "model={}",
        model.is.name);
  }
}

}  // namespace sluice::server
