#include "runtime/server/executor/remote_executor.hpp"

#include <fmt/format.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "runtime/server/executor/detail/remote_executor_impl.hpp"
#include "runtime/server/hosting/host_status.hpp"

namespace sluice::server {
namespace {

using detail::deadline_slack;
using memhandover::unique_fd;
using nlohmann::json;
using std::chrono::ceil;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using namespace std::chrono_literals;

constexpr milliseconds status_patience{1000};
constexpr milliseconds patience_for_leaving{2000};
/// How often it is looked at what a process does that is to end.
constexpr milliseconds between_looks{20};

json places_of(std::vector<std::optional<error>> const& faults) {
  auto list = json::array();
  for (std::size_t place = 0; place < faults.size(); ++place) {
    if (auto const& why = faults[place]) {
      list.push_back(failure_at(place, *why));
    }
  }
  return list;
}

void check_number(std::size_t models) {
  if (models > host_board::max_models) {
    throw error{error_kind::unsupported,
                fmt::format("the policy names {} versions of models; a server offers at most {}",
                            models, host_board::max_models)};
  }
}

}  // namespace

char const* remote_executor::impl::to_string(phase value) {
  switch (value) {
    case phase::starting:
      return "starting";
    case phase::serving:
      return "ready";
    case phase::between:
      return "restarting";
    case phase::ended:
      return "ended";
  }
  return "ended";
}

remote_executor::impl::impl(options how)
    : how_(std::move(how)),
      wake_(memhandover::beside_standard_streams(
          unique_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)})),
      orders_(how_.first),
      left_out_(orders_.models.size()),
      admission_(orders_.models.size(), how_.one_by_one
                                            ? scheduler::admission::lines::one_for_all
                                            : scheduler::admission::lines::one_for_each_model),
      host_{[this](std::size_t model) { return state_now(model) == model_state::warm; },
            [this](request_ticket which) { return computed_since(which); }},
      pending_(orders_.models.size(),
               [this](model_index model, request_ticket which) {
                 admission_.remove(model, which, clock::now(), host_);
               }),
      health_(orders_.models.size()),
      last_offences_(orders_.models.size()),
      unservable_(orders_.models.size()),
      spare_(how_.program, how_.spare_limit) {
  check_number(orders_.models.size());
  if (!wake_) {
    throw memhandover::system_error("cannot start an executor");
  }
  start_process();
  supervisor_ = std::thread{[this] { supervise(); }};
}

remote_executor::impl::~impl() {
  (void)stop(0ms, way_to_end::at_once);
  supervisor_.join();
  end_reading_elsewhere();
  bodies_.finish();
}

bool remote_executor::impl::wait_until_ready(std::function<bool()> const& given_up) {
  constexpr milliseconds between_questions{50};
  std::unique_lock lock{mutex_};
  while (phase_ != phase::serving) {
    if (failure_) {
      throw error{*failure_};
    }
    lock.unlock();
    if (given_up()) {
      return false;
    }
    lock.lock();
    changed_.wait_for(lock, between_questions,
                      [this] { return phase_ == phase::serving || failure_; });
  }
  return true;
}

readiness remote_executor::impl::ready() const {
  std::lock_guard const lock{mutex_};
  if (phase_ == phase::serving) {
    return {};
  }
  if (phase_ == phase::ended) {
    return {false, "the server is shutting down"};
  }
  if (last_end_.empty()) {
    return {false, "the executor is starting"};
  }
  auto const rest = next_start_ - clock::now();
  return {false,
          fmt::format("another executor is starting, since the last one has ended: {}", last_end_),
          phase_ == phase::between && rest > 0s ? std::optional{ceil<milliseconds>(rest)}
                                                : std::nullopt};
}

model_state remote_executor::impl::state(model_index model) const {
  std::lock_guard const lock{mutex_};
  return state_now(model);
}

model_state remote_executor::impl::state_now(model_index model) const {
  return phase_ == phase::serving ? board_->state(model) : model_state::cold;
}

readiness remote_executor::impl::model_ready(model_index model) const {
  std::lock_guard const lock{mutex_};
  auto const now = clock::now();
  if (auto const& why = unservable_.at(model)) {
    return {false, why->what()};
  }
  if (auto const rest = health_.at(model).failed_for(now); rest > 0s) {
    return {false, "failed: " + failure_text(model, now), ceil<milliseconds>(rest)};
  }
  return readiness_of(state_now(model));
}

std::optional<error> remote_executor::impl::unservable(model_index model) const {
  std::lock_guard const lock{mutex_};
  return unservable_.at(model);
}

std::string remote_executor::impl::failure_text(model_index model, clock::time_point now) const {
  return fmt::format("{}; it is tried again in {:.1f} s", last_offences_[model],
                     std::chrono::duration<double>{health_[model].failed_for(now)}.count());
}

request_ticket remote_executor::impl::submit(model_index model, infer_request request,
                                             completion done) {
  auto const now = clock::now();
  auto const arrival = request.arrival.value_or(now);
  auto const timeout = request.timeout;
  auto const ticket = ++last_ticket_;
  request.ticket = ticket;
  request.arrival = arrival;
  request.mark = scheduler::retries::mark_of(request.id);
  auto const mark = request.mark;
  auto id = std::exchange(request.id, {});
  detail::pending_request made{model, wrap(request), std::move(id), std::move(done), arrival, {}};
  made.request.place = model;

  std::unique_lock lock{mutex_};
  auto const deadline = made.deadline =
      deadline_of(timeout, arrival, orders_.models.at(model).queue_timeout);
  auto refusal = refuse(model, now);
  bool would_be_late = false;
  if (!refusal && phase_ == phase::serving) {
    auto const verdict = admission_.ask(model, now, deadline, host_);
    would_be_late =
        !verdict.admitted && deadline > now;  // else its time is over, and it hears that
    if (would_be_late) {
      refusal = too_late(model, verdict, deadline - now);
    } else if (orders_.models[model].foretells) {
      made.request.expected =
          now - arrival + std::chrono::duration_cast<nanoseconds>(verdict.predicted);
    }
  }
  if (refusal) {
    pending_.on_refusal(model, would_be_late);
    if (would_be_late) {
      send({0,
            {{"type", "refused"},
             {"model", model},
             {"mark", mark},
             {"retry_after_ms", refusal->retry_after().value_or(0ms).count()}}});
    }
    lock.unlock();
    made.done(std::move(*refusal));
    return ticket;
  }
  auto const looked_after = made.deadline + deadline_slack >= sleeps_until_;
  admission_.add(model, ticket, now, deadline, host_);
  pending_.add(ticket, std::move(made));
  if (phase_ == phase::serving) {
    send({ticket, {}});
  }
  if (!looked_after) {
    wake();
  }
  return ticket;
}

void remote_executor::impl::cancel(request_ticket which) {
  detail::refusals refusals;
  std::unique_lock lock{mutex_};
  auto* const request = pending_.find(which);
  if (request == nullptr) {
    return;
  }
  request->is_cancelled = true;
  admission_.cancel(request->model, which);
  if (phase_ == phase::serving) {
    send({0, {{"type", "cancel"}, {"ticket", which}}});  // it answers
    return;
  }
  refuse_cancelled(refusals);
  lock.unlock();
  refusals.give();
}

void remote_executor::impl::keep_warm() {
  std::lock_guard const lock{mutex_};
  if (phase_ == phase::serving) {
    send({0, {{"type", "keep"}}});
  }
}

/// Where it cannot be said at once it would come too late.
void remote_executor::impl::announce_engine() {
  std::lock_guard const lock{mutex_};
  if (phase_ == phase::serving) {
    send({0, {{"type", "announce"}}});
  }
}

bool remote_executor::impl::change(orders to) {
  check_number(to.models.size());
  std::unique_lock lock{mutex_};
  auto const models = std::max(to.models.size(), orders_.models.size());
  admission_.extend(models);
  pending_.extend(models);
  health_.resize(models);
  last_offences_.resize(models);
  unservable_.resize(models);
  left_out_.resize(models);
  for (std::size_t place = 0; place < std::min(to.models.size(), orders_.models.size()); ++place) {
    if (orders_.models[place].is_retired && !to.models[place].is_retired) {
      admission_.forget(place);
      pending_.forget(place);
      health_[place] = {};
      last_offences_[place].clear();
      unservable_[place].reset();
      left_out_[place].reset();
    }
  }
  orders_ = std::move(to);
  auto const wanted = ++orders_number_;
  if (phase_ == phase::serving) {
    send_change();
  }
  changed_.wait(lock, [&] {
    return carried_out_ >= wanted || changes_end_ || stopping_ || phase_ == phase::ended;
  });
  return carried_out_ >= wanted;
}

void remote_executor::impl::end_changes() {
  std::lock_guard const lock{mutex_};
  changes_end_ = true;
  changed_.notify_all();
}

bool remote_executor::impl::is_free(model_index place) const {
  std::lock_guard const lock{mutex_};
  return orders_.models.at(place).is_retired && pending_.counts(place).waiting == 0;
}

parcel remote_executor::impl::orders_of(char const* type) const {
  json const made{{"settings", orders_.settings},
                  {"policy", orders_.policy},
                  {"is_first", started_ == 0},
                  {"left_out", places_of(left_out_)}};
  return wrap_text({{"type", type}, {"number", orders_number_}},
                   made.dump(-1, ' ', false, json::error_handler_t::replace));
}

void remote_executor::impl::send_change() {
  given_orders_ = orders_number_;
  send({.orders = std::make_shared<parcel const>(orders_of("change"))});
}

void remote_executor::impl::refuse_cancelled(detail::refusals& into) {
  for (auto const each : pending_.tickets()) {
    if (pending_.find(each)->is_cancelled) {
      refuse(*pending_.take(each), {error_kind::cancelled, "the client has left"}, into);
    }
  }
}

json remote_executor::impl::status() {
  std::unique_lock lock{mutex_};
  if (phase_ == phase::serving) {
    auto const seen = statuses_;
    send({0, {{"type", "status"}}});
    changed_.wait_for(lock, status_patience,
                      [&] { return statuses_ != seen || phase_ != phase::serving; });
  }
  auto const text = status_;
  lock.unlock();
  auto result = json::parse(text, nullptr, false);
  if (!result.is_object() || !result.contains("models")) {
    result = server::describe(host_snapshot{});  // none has been heard of yet
  }
  lock.lock();
  describe(result);
  return result;
}

bool remote_executor::impl::stop(milliseconds grace, way_to_end way) {
  detail::refusals refusals;
  std::unique_lock lock{mutex_};
  if (!std::exchange(stopping_, true)) {
    changed_.notify_all();
    is_dropped_ = phase_ == phase::starting || way == way_to_end::at_once;
    if (is_dropped_) {
      child_.kill();
    } else if (way == way_to_end::leaving && socket_) {
      ::shutdown(socket_.get(), SHUT_RDWR);  // the process ends as it is
    } else if (phase_ == phase::serving) {
      send({0, {{"type", "end"}}});
    }
    wake();
    await_end_within(grace, lock);
    for (auto& each : pending_.take_all()) {
      refuse(std::move(each), {error_kind::unavailable, "the server is shutting down"}, refusals);
    }
  }
  bool const well = ended_well_;
  lock.unlock();
  refusals.give();
  return well;
}

void remote_executor::impl::await_end_within(milliseconds grace,
                                             std::unique_lock<std::mutex>& lock) {
  auto const asked = clock::now();
  auto const has_ended = [this] { return phase_ == phase::ended; };
  while (!changed_.wait_for(lock, between_looks, has_ended)) {
    auto const waited = clock::now() - asked;
    if (waited >= how_.end_limit || (waited >= grace && !computations().empty())) {
      child_.kill();
      changed_.wait(lock, has_ended);
    }
  }
}

std::optional<error> remote_executor::impl::refuse(model_index model, clock::time_point now) const {
  auto const& is = orders_.models[model];
  if (stopping_) {
    return error{error_kind::unavailable, "the server is shutting down"};
  }
  if (is.is_retired) {
    return not_served(is.name);
  }
  if (auto const& why = unservable_[model]) {
    return error{error_kind::unavailable,
                 fmt::format("model '{}' cannot be served: {}", is.name, why->what())};
  }
  if (auto const rest = health_[model].failed_for(now); rest > 0s) {
    return error{error_kind::unavailable,
                 fmt::format("model '{}' has failed: {}", is.name, failure_text(model, now)),
                 ceil<milliseconds>(rest)};
  }
  // One that serves counts them itself, and its scheduler with it; unless it does not answer.
  auto const bound = phase_ == phase::serving ? 2 * is.max_queue : is.max_queue;
  if (pending_.counts(model).waiting >= bound) {
    return error{error_kind::unavailable,
                 fmt::format("{} requests wait for model '{}' already; try again later",
                             is.max_queue, is.name)};
  }
  return std::nullopt;
}

error remote_executor::impl::too_late(model_index model,
                                      scheduler::admission::verdict const& verdict,
                                      scheduler::seconds left) const {
  return {error_kind::unavailable,
          fmt::format("model '{}' could not answer in time: its answer is predicted after "
                      "{:.3f} s, since others come before it, and the request's time is over "
                      "after {:.3f} s; try again in {:.3f} s",
                      orders_.models[model].name, verdict.predicted.count(), left.count(),
                      verdict.retry_after.count()),
          ceil<milliseconds>(verdict.retry_after)};
}

std::optional<scheduler::instant> remote_executor::impl::computed_since(
    request_ticket which) const {
  if (phase_ == phase::serving) {
    for (auto const& each : board_->actions()) {
      if (each.what == activity::computing && each.request == which) {
        return each.since;
      }
    }
  }
  return std::nullopt;
}

void remote_executor::impl::refuse(detail::pending_request&& which, error why,
                                   detail::refusals& into) {
  pending_.on_answer(which.model, &why);
  into.add(std::move(which), std::move(why));
}

void remote_executor::impl::send(detail::outgoing what) {
  outbox_.push_back(std::move(what));
  flush();
  if (!outbox_.empty()) {
    wake();  // it waits until the socket takes more
  }
}

void remote_executor::impl::flush() {
  try {
    for (; !outbox_.empty(); outbox_.pop_front()) {
      auto const& next = outbox_.front();
      auto const* const request = pending_.find(next.request);
      if (next.request != 0 && request == nullptr) {
        continue;  // it has been answered
      }
      bool const taken = request != nullptr ? request->request.try_send(socket_.get())
                         : next.orders      ? next.orders->try_send(socket_.get())
                                       : memhandover::try_send_message(socket_.get(), next.other);
      if (!taken) {
        return;
      }
    }
  } catch (error const& failure) {
    if (failure.kind() == error_kind::unavailable) {  // it has ended, which the supervisor sees
      outbox_.clear();
      return;
    }
    auto const which = outbox_.front().request;
    outbox_.pop_front();
    if (auto request = pending_.take(which)) {
      refuse(std::move(*request), failure, late_answers_);
      wake();
    }
  }
}

void remote_executor::impl::wake() {
  std::uint64_t const one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
}

void remote_executor::impl::describe(json& into) const {
  auto const now = clock::now();
  auto const computed = computations();
  for (auto& each : into["models"]) {
    auto const found =
        std::find_if(orders_.models.begin(), orders_.models.end(), [&](served const& is) {
          return !is.is_retired && each.value("name", "") == is.name &&
                 each.value("version", "") == is.version;
        });
    if (found == orders_.models.end()) {
      continue;
    }
    auto const index = static_cast<std::size_t>(found - orders_.models.begin());
    auto const& counts = pending_.counts(index);
    auto const& health = health_[index];
    auto const rest = health.failed_for(now);
    auto const& why = unservable_[index];
    each["state"] = rest > 0s || why ? "failed" : server::to_string(state_now(index));
    each["unservable"] = why ? json(why->what()) : json{};
    each["requests"] = counts.requests;
    each["failed"] = counts.failed;
    each["cancelled"] = counts.cancelled;
    each["refused"] = each.value("refused", std::uint64_t{0}) + counts.refused;
    each["refused_for_time"] = counts.refused;
    each["queue"] = counts.waiting;
    each["computing"] = std::accumulate(computed.begin(), computed.end(), std::size_t{0},
                                        [index](std::size_t sum, auto const& is) {
                                          return sum + (is.model == index ? is.requests : 0);
                                        });
    each["ended_executors"] = health.offences();
    each["retry_in_s"] = std::chrono::duration<double>{rest}.count();
  }
  auto const total = pending_.total();
  into["requests"] = {
      {"total", total.requests}, {"failed", total.failed}, {"in_flight", total.waiting}};
  auto ended = json::object();
  for (std::size_t cause = 0; cause < ends_.size(); ++cause) {
    ended[std::string{detail::end_cause_names.at(cause)}] = ends_.at(cause);
  }
  into["executor"] = {{"pid", child_.pid() == 0 ? json{} : json(child_.pid())},
                      {"state", to_string(phase_)},
                      {"started", started_},
                      {"ended", std::move(ended)},
                      {"spare", spare_.state()},
                      {"spare_pid", spare_.pid() == 0 ? json{} : json(spare_.pid())},
                      {"last_end", last_end_}};
}

remote_executor::remote_executor(options how) : impl_(std::make_unique<impl>(std::move(how))) {}
remote_executor::~remote_executor() = default;

bool remote_executor::wait_until_ready(std::function<bool()> const& given_up) {
  return impl_->wait_until_ready(given_up);
}
readiness remote_executor::ready() const {
  return impl_->ready();
}
readiness remote_executor::model_ready(model_index model) const {
  return impl_->model_ready(model);
}
std::optional<error> remote_executor::unservable(model_index model) const {
  return impl_->unservable(model);
}
model_state remote_executor::state(model_index model) const {
  return impl_->state(model);
}
request_ticket remote_executor::submit(model_index model, infer_request request, completion done) {
  return impl_->submit(model, std::move(request), std::move(done));
}
void remote_executor::cancel(request_ticket which) {
  impl_->cancel(which);
}
bool remote_executor::change(orders to) {
  return impl_->change(std::move(to));
}
void remote_executor::end_changes() {
  impl_->end_changes();
}
bool remote_executor::is_free(model_index place) const {
  return impl_->is_free(place);
}
void remote_executor::announce_engine() {
  impl_->announce_engine();
}
void remote_executor::keep_warm() {
  impl_->keep_warm();
}
nlohmann::json remote_executor::status() const {
  return impl_->status();
}
void remote_executor::leave() {
  (void)impl_->stop(patience_for_leaving, impl::way_to_end::leaving);
}
bool remote_executor::stop(milliseconds grace) {
  return impl_->stop(grace, impl::way_to_end::giving_back);
}

}  // namespace sluice::server
