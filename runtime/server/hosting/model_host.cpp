#include "runtime/server/hosting/model_host.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/server/hosting/absent_model.hpp"
#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/server/hosting/host_status.hpp"
#include "runtime/server/hosting/image_file.hpp"
#include "runtime/server/hosting/warmup_requests.hpp"
#include "runtime/telemetry/logging.hpp"
#include "scheduler/run_ahead.hpp"

namespace sluice::server {
namespace {

using std::chrono::milliseconds;

/// How long `stop` waits for the computation that still runs when its grace is over. What else is done then ends by itself.
constexpr milliseconds last_computation{500}, between_looks{20};

error shutting_down() {
  return {error_kind::unavailable, "the server is shutting down"};
}

void log_sample(std::string const& model, error const& failure) {
  spdlog::warn("a sample of a warm-up cannot be computed model={} reason={}", model,
               telemetry::quoted(failure.what()));
}

scheduler::model_controller controller_of(served_model const& from) {
  try {
    return {from.scheduling, detail::clock::now()};
  } catch (std::invalid_argument const& refused) {
    throw error{error_kind::invalid_argument,
                fmt::format("model '{}': {}", from.name, refused.what())};
  }
}

scheduler::model_controller make_controller(served_model& from) {
  from.scheduling.weight_bytes = from.model->bytes();
  return controller_of(from);
}

/// What stands where nothing is served.
served_model or_nothing(served_model from) {
  if (from.model) {
    return from;
  }
  served_model nothing{.name = std::move(from.name),
                       .version = std::move(from.version),
                       .model = std::make_unique<absent_model>(not_served(from.name))};
  nothing.scheduling.goal.latency = scheduler::seconds{1.0};
  return nothing;
}

}  // namespace

namespace detail {

slot::slot(served_model from) : is(or_nothing(std::move(from))), controller(make_controller(is)) {
  report = controller.tick(clock::now());
}

void slot::revise(served_model& to) {
  to.scheduling.weight_bytes = is.model->bytes();
  to.scheduling.load = is.scheduling.load;
  controller = controller_of(to);
  report = controller.tick(clock::now());
  is.scheduling = to.scheduling;
  is.always_warm = to.always_warm;
  is.max_queue = to.max_queue;
  is.queue_timeout = to.queue_timeout;
}

void answer::deliver() noexcept {
  try {
    done(std::move(result));
  } catch (...) {
    spdlog::error("an answer could not be delivered reason={}",
                  telemetry::quoted(caught_error().what()));
  }
}

}  // namespace detail

model_host::impl::impl(host_options options, std::shared_ptr<memhandover::serving_pool> pool,
                       std::vector<served_model> models)
    : options_(std::move(options)),
      pool_(std::move(pool)),
      board_(options_.board ? options_.board : std::make_shared<host_board>()),
      heap_(pool_, weight_alignment),
      lease_(options_.lease ? options_.lease
                            : std::make_shared<compute_lease>(pool_, options_.min_share,
                                                              compute_lease::change_on_host)),
      parallelism_(std::max<std::size_t>(options_.computing_threads, 1)),
      demands_(clock::now()),
      keeper_(pool_->shape().chunk_bytes) {
  for (auto& each : models) {
    bool const is_served = each.model != nullptr;
    slots_.emplace_back(std::move(each));
    recall(slots_.back());
    slots_.back().is_retired = slots_.back().has_left = !is_served;
    set_state(slots_.back(), model_state::cold);
    gathers_ = gathers_ || makes_batches(slots_.back());
  }
  publish_run_ahead();
  next_tick_ = clock::now() + options_.tick;
  lease_->set_waker([this] {
    lock_type const lock{mutex_};
    wake_timekeeper();
  });
  if (options_.pause == pause_mode::on_launch) {
    hold_for_engines();
  }
  try {
    executor_ = std::thread{[this] { execute(); }};
    for (std::size_t lane = 1;
         lane <= std::min(options_.computing_threads, host_board::max_computing_lanes); ++lane) {
      computers_.emplace_back([this, lane] {
        host_board::this_lane = lane;
        compute();
      });
    }
    timekeeper_ = std::thread{[this] { keep_time(); }};
  } catch (...) {
    end_executors();
    throw;
  }
}

void model_host::impl::end_executors() {
  pool_->watch_engines({});
  (void)stop(milliseconds{0});
  for (auto& each : computers_) {
    each.join();
  }
  if (executor_.joinable()) {
    executor_.join();
  }
}

model_host::impl::~impl() {
  end_executors();
  {
    lock_type const lock{mutex_};
    ended_ = true;
  }
  timekeeper_wakes_.notify_one();
  timekeeper_.join();
  lease_->set_waker({});
  lock_type lock{mutex_};
  write_learnt(lock);
}

bool model_host::impl::is_preparing(bool images) const {
  return std::any_of(slots_.begin(), slots_.end(), [images](slot const& each) {
    return each.load_wanted || (images && each.image_wanted && each.lacks_image());
  });
}

bool model_host::impl::warm_up(std::function<bool()> const& given_up) {
  lock_type lock{mutex_};
  changed_.wait(lock, [this] { return taken_over_ || stopping_; });
  // Whose clients wait for a model that is warm does not let them wait for those that are not.
  bool const can_answer = std::any_of(slots_.begin(), slots_.end(), [](slot const& each) {
    return each.state == model_state::warm;
  });
  for (model_index place = 0; place < slots_.size(); ++place) {
    auto& each = slots_[place];
    each.load_wanted = each.is.always_warm && each.state == model_state::cold;
    if (!can_answer) {
      compute_samples(place);
    }
  }
  work_.notify_one();
  computes_.notify_all();
  wake_timekeeper();
  auto const failed = [&] {
    return std::find_if(slots_.begin(), slots_.end(),
                        [&](slot const& each) { return !can_answer && each.image_failure; });
  };
  while (!stopping_ && failed() == slots_.end() &&
         (is_preparing(!can_answer) || samples_left_ > 0)) {
    if (given_up()) {
      return false;
    }
    changed_.wait(lock);
  }
  if (auto const found = failed(); found != slots_.end()) {
    throw error{*found->image_failure};
  }
  return true;
}

void model_host::impl::compute_samples(model_index place) {
  auto& model = slots_[place];
  auto const now = clock::now();
  try {
    for (auto& each : warmup_requests(model.is.warmup, model.is.batching.max_batch_size > 0)) {
      expect_compute(model);
      queue_.push_back({.model = place,
                        .request = std::move(each),
                        .done = [this, name = model.is.name](
                                    infer_result const& result) { on_sample(name, result); },
                        .arrival = now,
                        .deadline = now + model.is.queue_timeout,
                        .is_warmup = true,
                        .late_after = clock::time_point::max()});
      join_or_call_off_prewarm(model);
      ++model.queue;
      ++samples_left_;
    }
  } catch (...) {
    log_sample(model.is.name, caught_error());
  }
}

void model_host::impl::on_sample(std::string const& model, infer_result const& result) {
  if (auto const* const failure = std::get_if<error>(&result)) {
    log_sample(model, *failure);
  }
  lock_type const lock{mutex_};
  --samples_left_;
  changed_.notify_all();
}

/// The training job may have to hold for it.
void model_host::impl::expect_compute(slot const& model) {
  if (options_.pause == pause_mode::on_request || claims_by_requests()) {
    hold_compute();
  } else if (options_.pause == pause_mode::on_launch && model.state == model_state::warm) {
    lease_->announce();
  }
}

void model_host::impl::set_state(slot& model, model_state state) {
  model.state = state;
  board_->set_state(place_of(model), state);
}

model_host::model_index model_host::impl::place_of(slot const& model) const {
  return static_cast<model_index>(
      std::find_if(slots_.begin(), slots_.end(),
                   [&model](slot const& each) { return &each == &model; }) -
      slots_.begin());
}

model_state model_host::impl::state(model_index model) const {
  lock_type const lock{mutex_};
  return slots_.at(model).state;
}

request_ticket model_host::impl::submit(model_index model, infer_request request, completion done,
                                        bool computes_here) {
  auto const now = clock::now();
  lock_type const lock{mutex_};
  auto& wanted = slots_.at(model);
  auto const ticket = request.ticket != 0 ? request.ticket : ++last_ticket_;
  auto const arrival = request.arrival.value_or(now);
  auto const deadline = deadline_of(request.timeout, arrival, wanted.is.queue_timeout);
  detail::job made{.ticket = ticket,
                   .model = model,
                   .request = std::move(request),
                   .done = std::move(done),
                   .arrival = arrival,
                   .deadline = deadline,
                   .found_cold = wanted.state != model_state::warm};
  classify(made, wanted);
  ++requests_;
  ++wanted.requests;
  ++wanted.queue;
  auto const mark =
      made.request.mark != 0 ? made.request.mark : scheduler::retries::mark_of(made.request.id);
  auto const& expected = made.request.expected;
  auto const admission = wanted.controller.on_arrival(now, mark, expected);
  made.is_retry = admission.is_retry;
  if (stopping_) {
    refuse(std::move(made), shutting_down());
  } else if (wanted.is_retired) {
    refuse(std::move(made), not_served(wanted.is.name));
  } else if (!admission.admitted) {
    auto const why =
        expected
            ? fmt::format(
                  "would answer after {:.3f} s, since others come before, where its "
                  "latency target is {:.3f} s",
                  scheduler::seconds{*expected}.count(), wanted.is.scheduling.goal.latency.count())
            : std::string{"would miss its latency target at this rate of requests"};
    refuse(std::move(made), {error_kind::unavailable,
                             fmt::format("model '{}' {}; try again in {:.1f} s", wanted.is.name,
                                         why, admission.retry_after.count()),
                             std::chrono::ceil<milliseconds>(admission.retry_after)});
  } else if (made.deadline <= now) {
    wanted.controller.on_failure(now, made.is_retry);
    refuse(std::move(made),
           {error_kind::deadline_exceeded,
            fmt::format("the request's time was over when it came to model '{}'", wanted.is.name)});
  } else if (auto for_a_job = refuse_for_a_job(wanted)) {
    wanted.controller.on_turned_away(now, made.is_retry, mark,
                                     for_a_job->retry_after().value_or(milliseconds{0}));
    refuse(std::move(made), std::move(*for_a_job));
  } else if (wanted.queue > wanted.is.max_queue) {
    wanted.controller.on_turned_away(now, made.is_retry, mark);
    refuse(std::move(made), {error_kind::unavailable,
                             fmt::format("{} requests wait for model '{}' already; try again later",
                                         wanted.is.max_queue, wanted.is.name)});
  } else if (auto full = refuse_of_its_priority(made, wanted)) {
    wanted.controller.on_turned_away(now, made.is_retry, mark);
    refuse(std::move(made), std::move(*full));
  } else {
    expect_compute(wanted);
    bool const is_next_event = ends_waiting(made) < timekeeper_sleeps_until_;
    queue_.push_back(std::move(made));
    lease_->set_more_waits(true);
    join_or_call_off_prewarm(wanted);
    if (std::exchange(wanted.prewarm_unused, false)) {
      ++wanted.prewarms_used;
    }
    if (is_for_executor(queue_.back())) {
      work_.notify_one();
    } else if (gathers_ || ((!computes_here || host_board::this_lane == host_board::no_lane) &&
                            soon_back_ == 0 && is_free(wanted))) {
      computes_.notify_one();
    }
    if (is_next_event) {
      wake_timekeeper();
    }
  }
  return ticket;
}

/// What has been accepted before is answered, so that the model comes to have no requests.
std::optional<error> model_host::impl::refuse_for_a_job(slot const& model) const {
  if (!model.gives_way || !owed_) {
    return std::nullopt;
  }
  return error{error_kind::unavailable,
               fmt::format("model '{}' gives its memory back to a job that has been parked for as "
                           "long as it may be; try again in {} ms",
                           model.is.name, owed_->stay.count()),
               owed_->stay};
}

void model_host::impl::cancel(request_ticket which) {
  lock_type const lock{mutex_};
  error const reason{error_kind::cancelled, "the client has left"};
  for (auto& each : computing_) {
    if (each.ticket == which && each.done) {
      ++slots_[each.model].cancelled;
      answer_running(each, reason);
      return;
    }
  }
  auto const waits = std::find_if(queue_.begin(), queue_.end(), [which](detail::job const& each) {
    return each.ticket == which;
  });
  if (waits != queue_.end()) {
    ++slots_[waits->model].cancelled;
    refuse(std::move(*waits), reason);
    queue_.erase(waits);
  }
}

void model_host::impl::note_refused(model_index model, std::uint64_t mark,
                                    milliseconds retry_after) {
  lock_type const lock{mutex_};
  if (model < slots_.size()) {
    slots_[model].controller.on_refused_elsewhere(clock::now(), mark, retry_after);
  }
}

/// Any thread.
void model_host::impl::announce_engine() {
  if (options_.pause == pause_mode::on_launch) {
    lease_->announce(compute_lease::worker::engines);
  }
}

void model_host::impl::keep_warm() {
  lock_type lock{mutex_};
  keeps_warm_ = true;
  call_off_prewarm();
  if (options_.learnt) {  // before this process is let end as it is
    write_learnt(lock);
    lock.unlock();
    options_.learnt->finish();
  }
}

void model_host::impl::put(model_index place, served_model model) {
  detail::slot made{std::move(model)};
  recall(made);
  lock_type lock{mutex_};
  changed_.wait(lock, [&] {
    return stopping_ || place >= slots_.size() || slots_[place].has_left ||
           slots_[place].keeps_memory;
  });
  if (stopping_) {
    throw shutting_down();
  }
  if (place < slots_.size() && !slots_[place].has_left) {
    throw error{error_kind::unavailable,
                fmt::format("model '{}' keeps its memory, and its place", slots_[place].is.name)};
  }
  if (place > slots_.size() || place >= host_board::max_models) {
    throw error{error_kind::invalid_argument,
                fmt::format("there is no place {} among {}", place, slots_.size())};
  }
  gathers_ = gathers_ || makes_batches(made);
  if (place == slots_.size()) {
    slots_.push_back(std::move(made));
  } else {
    slots_[place] = std::move(made);
  }
  parallelism_.forget(place);
  auto& its = slots_[place];
  set_state(its, model_state::cold);
  its.load_wanted = its.is.always_warm;
  call_off_prewarm();
  publish_run_ahead();
  compute_samples(place);
  work_.notify_one();
  changed_.wait(lock, [this] { return stopping_ || samples_left_ == 0; });
}

void model_host::impl::revise(model_index place, served_model to) {
  lock_type const lock{mutex_};
  auto& its = slots_.at(place);
  its.revise(to);
  its.load_wanted = its.is.always_warm && its.state == model_state::cold;
  call_off_prewarm();
  publish_run_ahead();
  work_.notify_one();
}

void model_host::impl::retire(model_index place) {
  lock_type const lock{mutex_};
  auto& its = slots_.at(place);
  its.is_retired = true;
  its.is.always_warm = its.load_wanted = false;
  call_off_prewarm();
  work_.notify_one();
}

void model_host::impl::hold_compute() {
  try {
    if (claims_by_requests() ? lease_->begins_here() : lease_->want()) {
      wake_timekeeper();
    }
  } catch (...) {  // training goes on, requests take longer
    spdlog::warn("training could not be paused reason={}",
                 telemetry::quoted(caught_error().what()));
  }
}

/// Training is held for them as for models, within one share.
void model_host::impl::hold_for_engines() {
  pool_->watch_engines([this](bool works, bool waited) {
    try {
      if (works) {
        lease_->begins(compute_lease::worker::engines);
      } else {
        lease_->drained(waited, compute_lease::worker::engines);
      }
    } catch (...) {  // training goes on beside them
      spdlog::warn("training could not be paused for an engine reason={}",
                   telemetry::quoted(caught_error().what()));
    }
  });
}

/// Whether requests in flight are what the device works for; else somebody else sees that.
bool model_host::impl::claims_by_requests() const noexcept {
  return options_.pause == pause_mode::on_launch && !options_.lease;
}

void model_host::impl::end_claim_if_idle() {
  if (!claims_by_requests() || is_in_demand()) {
    return;
  }
  try {
    lease_->drained(true);
  } catch (...) {  // it ends at its limit
    spdlog::warn("training's pause could not be ended early reason={}",
                 telemetry::quoted(caught_error().what()));
  }
}

bool model_host::impl::is_in_demand() const {
  return busy_ || !queue_.empty() || !computing_.empty();
}

bool model_host::impl::wants_compute() const {
  switch (options_.pause) {
    case pause_mode::on_launch:
      return claims_by_requests() && is_in_demand();
    case pause_mode::on_request:
      return is_in_demand();
    case pause_mode::on_cold_start:
      return loading_;
    case pause_mode::never:
      break;
  }
  return false;
}

void model_host::impl::wake_timekeeper() {
  timekeeper_called_ = true;
  timekeeper_wakes_.notify_one();
}

void model_host::impl::publish_run_ahead() {
  std::vector<scheduler::run_ahead_promise> promises;
  promises.reserve(slots_.size());
  for (auto const& each : slots_) {
    promises.push_back({.share = each.report.warm.required_share,
                        .latency = each.is.scheduling.goal.latency,
                        .service = each.report.warm.service_mean});
  }
  auto const bound = options_.run_ahead.value_or(
      std::chrono::floor<std::chrono::microseconds>(scheduler::run_ahead_bound(promises)));
  if (bound != run_ahead_) {
    pool_->set_run_ahead(bound);
    run_ahead_ = bound;
  }
}

void model_host::impl::count_failure(detail::job const& of) {
  if (!of.is_warmup) {
    ++slots_[of.model].failed;
    ++failed_;
  }
}

void model_host::impl::break_promise(detail::job const& to, clock::time_point now) {
  if (!to.is_warmup) {
    slots_[to.model].controller.on_failure(now, to.is_retry);
  }
}

void model_host::impl::refuse(detail::job&& late, error reason) {
  --slots_[late.model].queue;
  count_failure(late);
  refused_.push_back({std::move(late.done), std::move(reason)});
  timekeeper_wakes_.notify_one();
}

/// While it is being computed.
void model_host::impl::answer_running(detail::job& job, error reason) {
  count_failure(job);
  refused_.push_back({std::exchange(job.done, nullptr), std::move(reason)});
  timekeeper_wakes_.notify_one();
}

void model_host::impl::refuse_all_of(model_index number, error const& reason) {
  for (auto next = queue_.begin(); next != queue_.end();) {
    auto const each = next++;
    if (each->model == number) {
      if (detail::counts_against_promise(reason.kind())) {
        break_promise(*each, clock::now());
      }
      refuse(std::move(*each), reason);
      queue_.erase(each);
    }
  }
}

host_snapshot model_host::impl::snapshot() const {
  lock_type const lock{mutex_};
  host_snapshot result;
  for (auto const& each : slots_) {
    result.in_flight += each.queue;
    if (each.is_retired) {
      continue;
    }
    result.models.push_back({each.is.name,
                             each.is.version,
                             each.state,
                             each.is.model->bytes(),
                             each.requests,
                             each.failed,
                             each.cancelled,
                             each.cold_starts,
                             each.prewarms,
                             each.prewarms_used,
                             each.prewarms_omitted,
                             each.queue,
                             each.is.always_warm,
                             each.published,
                             each.is.model->image_bytes(),
                             each.is.model->read_bytes(),
                             each.is.model->activation_bytes(),
                             each.is.scheduling.goal,
                             each.report,
                             each.together});
  }
  result.requests = requests_;
  result.failed = failed_;
  result.warm = warm_.summary();
  result.cold = cold_.summary();
  result.pauses = lease_->counts();
  result.cut_short_models = cut_short_models_;
  result.handovers = handovers_;
  return result;
}

bool model_host::impl::stop(milliseconds grace) {
  lock_type lock{mutex_};
  stopping_ = true;
  call_off_prewarm();
  work_.notify_one();
  computes_.notify_all();
  changed_.notify_all();
  if (changed_.wait_for(lock, grace, [&] { return executed_; })) {
    return true;
  }
  for (model_index number = 0; number < slots_.size(); ++number) {
    refuse_all_of(number, shutting_down());
  }
  work_.notify_one();
  computes_.notify_all();
  auto const until = clock::now() + last_computation;
  while (!changed_.wait_for(lock, between_looks, [&] { return executed_; })) {
    if (clock::now() >= until && board_->computes()) {
      return false;
    }
  }
  return true;
}

model_host::model_host(host_options options, std::shared_ptr<memhandover::serving_pool> pool,
                       std::vector<served_model> models)
    : impl_(std::make_unique<impl>(std::move(options), std::move(pool), std::move(models))) {}
model_host::~model_host() = default;

bool model_host::warm_up(std::function<bool()> const& given_up) {
  return impl_->warm_up(given_up);
}
model_state model_host::state(model_index model) const {
  return impl_->state(model);
}
request_ticket model_host::submit(model_index model, infer_request request, completion done) {
  return impl_->submit(model, std::move(request), std::move(done), false);
}
request_ticket model_host::bring(model_index model, infer_request request, completion done) {
  return impl_->submit(model, std::move(request), std::move(done), true);
}
void model_host::prepare_to_compute() {
  impl_->prepare_to_compute();
}
bool model_host::compute_here() {
  return impl_->compute_here();
}
void model_host::cancel(request_ticket which) {
  impl_->cancel(which);
}
void model_host::announce_engine() {
  impl_->announce_engine();
}
void model_host::keep_warm() {
  impl_->keep_warm();
}

void model_host::note_refused(model_index model, std::uint64_t mark, milliseconds retry_after) {
  impl_->note_refused(model, mark, retry_after);
}
void model_host::put(model_index place, served_model model) {
  impl_->put(place, std::move(model));
}
void model_host::revise(model_index place, served_model to) {
  impl_->revise(place, std::move(to));
}
void model_host::retire(model_index place) {
  impl_->retire(place);
}
host_snapshot model_host::snapshot() const {
  return impl_->snapshot();
}
nlohmann::json model_host::status() const {
  return describe(impl_->snapshot());
}
bool model_host::stop(std::chrono::milliseconds grace) {
  return impl_->stop(grace);
}

}  // namespace sluice::server
