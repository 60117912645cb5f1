// The threads of model_host that compute: each takes the oldest request whose model is warm and that nobody else computes.

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

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

std::list<detail::job>::iterator model_host::impl::next_computable() {
  if (computing_.size() >= parallelism_.bound()) {
    return queue_.end();
  }
  return std::find_if(queue_.begin(), queue_.end(), [this](detail::job const& each) {
    auto const& model = slots_[each.model];
    return model.state == model_state::warm && !model.taken && !model.held;
  });
}

void model_host::impl::compute() {
  ::pthread_setname_np(::pthread_self(), "sluice-compute");
  prepare_thread();
  lock_type lock{mutex_};
  for (;;) {
    auto next = queue_.end();
    computes_.wait(lock, [&] {
      next = next_computable();
      return next != queue_.end() || (stopping_ && queue_.empty());
    });
    if (next == queue_.end()) {
      return;
    }
    run(lock, next);
    release_pause_if_unwanted();
    work_.notify_one();  // the model may be published now, read, or released
  }
}

/// With the board's word of what it does, so that whoever replaces this process knows for whom it ended.
std::vector<tensor> model_host::impl::outputs_of(hosted_model& model,
                                                 infer_request& request) const {
  try {
    return model.run(request.inputs, request.outputs);
  } catch (...) {
    auto const failure = caught_error();
    if (options_.device_failed && !model.device_works()) {
      options_.device_failed(failure);
    }
    if (failure.kind() == error_kind::out_of_memory) {
      give_back_activations();  // what it had already
    }
    throw;
  }
}

/// Computes one request.
void model_host::impl::run(lock_type& lock, std::list<detail::job>::iterator which) {
  computing_.splice(computing_.end(), queue_, which);
  lease_->set_more_waits(!queue_.empty());
  auto& job = *which;
  auto const place = job.model;
  auto& model = slots_[place];
  model.taken = true;
  auto const begin = clock::now();
  company_.change(begin, 1);
  auto const company_before = company_.sum();
  lock.unlock();

  infer_result result = infer_response{job.request.model, model.is.version, job.request.id, {}};
  try {
    detail::shown_action const shown{*board_, activity::computing, place, job.ticket};
    if (model.memory) {
      heap_.set_in_use(model.memory, true);  // weights may change, until that is undone
    }
    std::get<infer_response>(result).outputs = outputs_of(*model.is.model, job.request);
  } catch (...) {
    result = caught_error();
  }
  if (model.memory) {
    heap_.set_in_use(model.memory, !model.is.model->is_intact());
  }

  lock.lock();
  auto const end = clock::now();
  company_.change(end, -1);
  std::chrono::duration<double> const took = end - begin;
  parallelism_.add(place, (company_.sum() - company_before) / took.count(), took);
  if (wants_compute()) {
    pause_end_ = end + options_.pause_hysteresis;
  }
  auto const taken = std::move(job);
  computing_.erase(which);
  model.taken = false;
  --model.queue;
  model.idle_since = end;
  model.computed = end;
  want_image(model);
  changed_.notify_all();
  computes_.notify_one();  // the next of this model's
  if (!taken.done) {       // it has been answered: its time was over, or its client left
    if (std::holds_alternative<infer_response>(result)) {
      model.controller.on_late_service(end - begin);
    }
    return;
  }
  if (auto const* const failure = std::get_if<error>(&result)) {
    ++model.failed;
    ++failed_;
    if (detail::counts_against_promise(failure->kind())) {
      model.controller.on_failure(end);
    }
  } else {
    std::get<infer_response>(result).times = {.queue = begin - taken.arrival,
                                              .compute = end - begin};
    model.controller.on_service(end, end - begin, end - taken.arrival);
    (taken.found_cold ? cold_ : warm_).add(end - taken.arrival);
  }
  lock.unlock();
  detail::answer{taken.done, std::move(result)}.deliver();
  lock.lock();
}

}  // namespace sluice::server
