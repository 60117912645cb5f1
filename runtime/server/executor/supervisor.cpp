// The supervisor of remote_executor: the thread that starts, hears and ends processes.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/waiting.hpp"
#include "runtime/server/executor/detail/remote_executor_impl.hpp"
#include "runtime/server/executor/shared_board.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using detail::deadline_slack;
using memhandover::unique_fd;
using nlohmann::json;
using std::chrono::milliseconds;
using namespace std::chrono_literals;

/// How often the supervisor looks after what nobody wakes it for.
constexpr milliseconds look_every{1000};
/// Between processes that end before they can serve.
constexpr milliseconds first_back_off{100}, longest_back_off{10'000};
/// For so long at most a spare is not started, for the sake of what has waited for an executor.
constexpr milliseconds longest_storm{5'000};

char const* verb_of(activity what) {
  switch (what) {
    case activity::preparing:
      return "prepared";
    case activity::loading:
      return "loaded";
    case activity::computing:
    case activity::none:
      break;
  }
  return "computed";
}

infer_result result_in(memhandover::message const& received, std::string id) {
  try {
    auto result = unwrap_result(received);
    if (auto* const response = std::get_if<infer_response>(&result)) {
      response->id = std::move(id);
    }
    return result;
  } catch (...) {
    return caught_error();
  }
}

/// How many requests the computation was for, if this one stands for it; 0: another one does.
std::size_t computed_with(memhandover::message const& answer) {
  auto const share = batch_of(answer);
  return share.is_first ? share.requests : 0;
}

}  // namespace

void remote_executor::impl::supervise() {
  ::pthread_setname_np(::pthread_self(), "sluice-watch");
  for (;;) {
    std::unique_lock lock{mutex_};
    if (phase_ == phase::between) {
      if (stopping_) {
        end(true);
      } else if (clock::now() >= next_start_) {
        start_again();
      }
    }
    if (phase_ == phase::ended) {
      return;
    }
    look_after_spare();
    sleeps_until_ = next_look();
    auto const until = sleeps_until_;
    auto const socket = socket_.get();
    bool const is_full = !outbox_.empty();
    auto const spare = spare_.awaited();
    lock.unlock();

    bool const has_gone = !wait_and_receive(socket, is_full, spare, until);

    if (has_gone) {
      end_reading_elsewhere();
      await_end();
    }

    lock.lock();
    bool const begins_to_serve = phase_ == phase::serving && !std::exchange(is_read_, true);
    auto refusals = std::exchange(late_answers_, {});
    if (has_gone) {
      on_end(refusals);
    } else {
      flush();
      watch_over();
    }
    expire(refusals);
    lock.unlock();
    refusals.give();
    if (begins_to_serve && !has_gone) {
      read_elsewhere(socket);
    }
  }
}

remote_executor::impl::clock::time_point remote_executor::impl::next_look() const {
  auto const now = clock::now();
  auto next = now + std::min(look_every, how_.compute_limit);
  if (auto const deadline = pending_.next_deadline()) {
    next = std::min(next, *deadline + deadline_slack);
  }
  for (auto const& each : computations()) {
    next = std::min(next, std::max(now, each.since + how_.compute_limit));
  }
  if (phase_ == phase::serving) {
    auto const look = std::max(spare_.next_look(), is_quiet() ? now : ready_since_ + longest_storm);
    next = std::min(next, std::max(now, look));
  }
  return phase_ == phase::between ? std::min(next, next_start_) : next;
}

/// What had waited for the process when it was ready has been answered.
bool remote_executor::impl::is_quiet() const {
  return pending_.first().value_or(waited_until_ + 1) > waited_until_ ||
         clock::now() >= ready_since_ + longest_storm;
}

void remote_executor::impl::look_after_spare() {
  auto const now = clock::now();
  spare_.hear(now);
  if (stopping_) {
    spare_.end();
  } else if (phase_ == phase::serving && is_quiet() && spare_.is_due(now)) {
    spare_.start(now);
  }
}

bool remote_executor::impl::wait_and_receive(int socket, bool is_full, int spare,
                                             clock::time_point until) {
  bool const is_read = elsewhere_ && elsewhere_->goes_on;
  std::array<pollfd, 3> waited{
      pollfd{socket, static_cast<short>((is_read ? 0 : POLLIN) | (is_full ? POLLOUT : 0)), 0},
      pollfd{wake_.get(), POLLIN, 0}, pollfd{spare, POLLIN, 0}};
  (void)::poll(waited.data(), waited.size(), memhandover::poll_timeout(until));
  if (waited[1].revents != 0) {
    std::uint64_t count = 0;
    (void)!::read(wake_.get(), &count, sizeof count);
  }
  if (socket < 0 || (is_read && (waited[0].revents & ~POLLOUT) == 0)) {
    return true;
  }
  return receive(socket);
}

bool remote_executor::impl::receive(int socket) {
  constexpr int most = 64;  // so that whoever reads looks after others in between
  try {
    for (int i = 0; i < most; ++i) {
      auto came = memhandover::receive_if_there(socket);
      if (!came.received) {
        return !came.has_ended;
      }
      take(std::move(*came.received));
    }
    return true;
  } catch (std::exception const& failure) {
    spdlog::error("what the executor says is not understood reason={}",
                  telemetry::quoted(failure.what()));
    ::shutdown(socket, SHUT_RDWR);  // whoever reads next finds its end
    return false;
  }
}

void remote_executor::impl::read_elsewhere(int socket) {
  auto const made = std::make_shared<detail::reading_elsewhere>();
  auto const read = [this, made](int own) {
    std::lock_guard const lock{made->mutex};
    return !made->is_over && receive(own);
  };
  auto const end = [this, made] {
    made->goes_on = false;
    std::lock_guard const lock{made->mutex};
    if (!made->is_over) {
      wake();  // the supervisor goes on
    }
  };
  if (how_.reader != nullptr && how_.reader->watch(socket, read, end)) {
    elsewhere_ = made;
  }
}

/// None of its messages is being taken any more, and none will be.
void remote_executor::impl::end_reading_elsewhere() {
  if (auto const reading = std::exchange(elsewhere_, nullptr)) {
    std::lock_guard const lock{reading->mutex};
    reading->is_over = true;
  }
}

void remote_executor::impl::take(memhandover::message received) {
  std::unique_lock lock{mutex_};
  heard_ = clock::now();
  asked_.reset();
  bool const is_plain = received.form != 0;
  auto const type = is_plain ? "result" : received.body["type"].get<std::string>();
  if (type == "result") {
    auto const ticket =
        is_plain ? facts_of(received).ticket : received.body.value("ticket", request_ticket{0});
    if (auto const* const answered = pending_.find(ticket); answered != nullptr && is_plain) {
      admission_.on_answer(answered->model, ticket, heard_, computed_with(received));
    }
    auto to = pending_.take(ticket);
    if (ticket <= waited_until_) {
      wake();  // a spare may be due
    }
    if (to && received.lost_descriptors) {
      refuse(std::move(*to), lost_tensors(), late_answers_);
      wake();
    } else if (to) {
      lock.unlock();
      answer(std::move(*to), std::move(received));
    }
  } else if (type == "changed") {
    note_unservable(received);
    carried_out_ = std::max(carried_out_, received.body.value("number", std::uint64_t{0}));
    changed_.notify_all();
  } else if (type == "ready") {
    phase_ = phase::serving;
    has_served_ = true;
    carried_out_ = std::max(carried_out_, given_orders_);
    admission_.restart(heard_);
    back_off_ = milliseconds{0};
    waited_until_ = last_ticket_;
    ready_since_ = heard_;
    note_unservable(received);
    if (how_.spare) {
      spare_.want(received.body.value("spare", json::object()));
    }
    refuse_retired();
    if (given_orders_ < orders_number_) {
      send_change();
    }
    for (auto const each : pending_.tickets()) {
      if (auto& expected = pending_.find(each)->request.expected) {
        expected = std::chrono::nanoseconds{0};  // it has been admitted
      }
      outbox_.push_back({each, {}});
    }
    outbox_.push_back({0, {{"type", "status"}}});  // to have one when it has ended
    flush();
    changed_.notify_all();
  } else if (type == "failed") {
    reason_ = failure_in(received.body);
  } else if (type == "status" && !received.lost_descriptors) {
    status_ = unwrap_text(received);
    ++statuses_;
    changed_.notify_all();
  }
}

/// Of models that this process cannot serve; the next one may. Each reason is logged once.
void remote_executor::impl::note_unservable(memhandover::message const& ready) {
  auto const given =
      ready.lost_descriptors ? json{} : json::parse(unwrap_text(ready), nullptr, false);
  std::vector<std::optional<error>> noted(orders_.models.size());
  for (auto const& each : given) {
    auto const place = each.is_object() ? each.value("place", noted.size()) : noted.size();
    if (place < noted.size()) {
      noted[place] = failure_in(each);
    }
  }
  for (std::size_t i = 0; i < noted.size(); ++i) {
    auto const& before = unservable_[i];
    if (noted[i] && (!before || std::string_view{before->what()} != noted[i]->what())) {
      spdlog::error("a model that the policy names cannot be served model={} reason={}",
                    orders_.models[i].name, telemetry::quoted(noted[i]->what()));
    }
  }
  unservable_ = std::move(noted);
}

void remote_executor::impl::answer(detail::pending_request to, memhandover::message received) {
  if (!is_large(received)) {
    finish(std::move(to), received);
    return;
  }
  auto const shared = std::make_shared<std::pair<detail::pending_request, memhandover::message>>(
      std::move(to), std::move(received));
  bodies_.post([this, shared] { finish(std::move(shared->first), shared->second); });
}

void remote_executor::impl::finish(detail::pending_request to,
                                   memhandover::message const& received) {
  auto result = result_in(received, std::move(to.id));
  {
    std::lock_guard const lock{mutex_};
    auto const* const failure = std::get_if<error>(&result);
    pending_.on_answer(to.model, failure);
    if (failure == nullptr) {
      health_[to.model].on_answer();
    }
  }
  to.done(std::move(result));
}

/// That the process has ended is seen when its socket is read.
void remote_executor::impl::give_orders(int socket, parcel const& orders, int board) {
  std::vector<int> descriptors{board};
  if (orders.file) {
    descriptors.push_back(orders.file.get());
  }
  try {
    memhandover::send_message(socket, orders.body, descriptors, orders.bytes);
  } catch (error const& failure) {
    if (failure.kind() != error_kind::unavailable) {
      throw;
    }
  }
}

void remote_executor::impl::start_process() {
  auto made = make_shared_board();
  auto const policy = orders_of("start");
  given_orders_ = orders_number_;
  auto spare = spare_.take();
  was_spare_ = spare.has_value();
  was_ready_spare_ = was_spare_ && spare->was_ready;
  auto process = spare ? std::move(spare->process) : detail::start_connected(how_.program);
  process.child.watch_from_now();
  give_orders(process.socket.get(), policy, made.file.get());
  child_ = std::move(process.child);
  socket_ = std::move(process.socket);
  heard_ = clock::now();
  board_ = std::move(made.board);
  is_read_ = false;
  phase_ = phase::starting;
  ++started_;
  killed_for_.clear();
  hung_.reset();
  reason_.reset();
  asked_.reset();
}

void remote_executor::impl::start_again() {
  try {
    start_process();
  } catch (error const& failure) {
    spdlog::error("an executor cannot be started reason={}", telemetry::quoted(failure.what()));
    child_ = {};
    be_between();
  }
}

void remote_executor::impl::be_between() {
  phase_ = phase::between;
  next_start_ = clock::now() + back_off_;
  back_off_ = std::clamp(2 * back_off_, first_back_off, longest_back_off);
}

void remote_executor::impl::end(bool well) {
  phase_ = phase::ended;
  ended_well_ = well;
  changed_.notify_all();
}

/// What a process that lives, and is not ended yet, computes.
std::vector<host_board::action> remote_executor::impl::computations() const {
  bool const lives = phase_ == phase::serving || phase_ == phase::starting;
  if (!lives || !killed_for_.empty()) {
    return {};
  }
  auto seen = board_->actions();
  auto const now = clock::now();
  std::erase_if(seen, [&](auto const& each) {  // what the process may have written into it, too
    return each.what != activity::computing || each.model >= orders_.models.size() ||
           each.since.time_since_epoch() < 0ns || each.since > now;
  });
  return seen;
}

void remote_executor::impl::watch_over() {
  auto const now = clock::now();
  for (auto const& each : computations()) {
    if (now - each.since >= how_.compute_limit && killed_for_.empty()) {
      auto const again = computations();
      if (std::find(again.begin(), again.end(), each) != again.end()) {
        hung_ = each;
        kill(fmt::format("has been ended, since a computation took longer than {} ms",
                         how_.compute_limit.count()));
      }
    }
  }
  bool const is_waited_for =
      phase_ == phase::serving ? !pending_.empty() : phase_ == phase::starting && was_ready_spare_;
  if (!asked_ && is_waited_for && now >= heard_ + look_every) {
    asked_ = now;
    send({0, {{"type", "ping"}}});
  } else if (asked_ && now >= *asked_ + how_.answer_limit && killed_for_.empty()) {
    kill(fmt::format("has been ended, since it said nothing for {} ms", how_.answer_limit.count()));
  }
}

void remote_executor::impl::kill(std::string why) {
  killed_for_ = std::move(why);
  child_.kill();
}

/// Of a process that has hung up. One that ends in order is given the time that `stop` gives it.
void remote_executor::impl::await_end() {
  {
    std::lock_guard const lock{mutex_};
    if (!stopping_) {
      child_.kill();
    }
  }
  child_.await_end();
}

void remote_executor::impl::on_end(detail::refusals& into) {
  bool const was_serving = phase_ == phase::serving;
  socket_.reset();
  outbox_.clear();
  asked_.reset();
  auto const how = child_.wait();
  changed_.notify_all();
  if (stopping_) {
    if (!how.well && !is_dropped_) {
      spdlog::warn("the executor has not ended in order reason={}", telemetry::quoted(how.text));
    }
    end(how.well || is_dropped_);
    return;
  }
  auto const suspects = suspects_of(how);
  how_it_ended_ = reason_ ? std::string{reason_->what()}
                          : "its process " + (killed_for_.empty() ? how.text : killed_for_);
  last_end_ = how_it_ended_ + doing_text(suspects);  // where there is a reason nobody is suspect
  bool const leaves_one_out =
      is_preparing() && suspects.size() == 1 && suspects[0].what == activity::preparing;
  if (!has_served_ && !leaves_one_out) {
    failure_ =
        reason_ ? *reason_ : error{error_kind::aborted, "the executor cannot start: " + last_end_};
    end(false);
    return;
  }
  ++ends_.at(static_cast<std::size_t>(cause_of(how, suspects)));
  spdlog::error("another executor takes the place of one that has ended reason={}",
                telemetry::quoted(last_end_));
  for (auto const& each : suspects) {
    if (each.requests > 1) {
      pending_.separate(each.model);  // next time the guilty one is by itself
    }
    if (suspects.size() == 1 || !may_try_again(each)) {
      blame(each, into);
    }
  }
  refuse_cancelled(into);
  if (was_serving || was_spare_) {  // a spare may have been killed together with the one before it
    back_off_ = milliseconds{0};
  }
  be_between();
}

/// What may have ended the process: the computation that hung, what the thread did that ended it, or where it could not
/// say so, all that it did. Nothing, if somebody else has ended it.
std::vector<host_board::action> remote_executor::impl::suspects_of(process_end const& how) const {
  if (hung_) {
    return {*hung_};
  }
  if (reason_ || how.from_outside || !killed_for_.empty()) {
    return {};
  }
  auto seen = board_->actions();
  std::erase_if(seen, [&](auto const& each) { return each.model >= orders_.models.size(); });
  auto const culprit = board_->culprit();
  auto const its = std::find_if(seen.begin(), seen.end(),
                                [&](auto const& each) { return culprit && each.lane == *culprit; });
  return its == seen.end() ? seen : std::vector{*its};
}

detail::end_cause remote_executor::impl::cause_of(
    process_end const& how, std::vector<host_board::action> const& suspects) const {
  using detail::end_cause;
  if (hung_) {
    return end_cause::hang;
  }
  if (!killed_for_.empty()) {
    return end_cause::silence;
  }
  if (reason_) {
    return end_cause::failed;
  }
  if (how.from_outside) {
    return end_cause::killed;
  }
  return suspects.empty() ? end_cause::unknown : end_cause::model;
}

std::string remote_executor::impl::doing_text(
    std::vector<host_board::action> const& suspects) const {
  std::vector<std::string> texts;
  texts.reserve(suspects.size());
  for (auto const& each : suspects) {
    texts.push_back(
        fmt::format("{} model '{}'", verb_of(each.what), orders_.models[each.model].name));
  }
  return texts.empty() ? "" : fmt::format(" while it {}", fmt::join(texts, ", "));
}

/// One of several suspects may be innocent: the next process computes each with nothing beside it.
bool remote_executor::impl::may_try_again(host_board::action const& suspect) {
  auto* const request = pending_.find(suspect.request);
  return request == nullptr || !std::exchange(request->request.is_suspect, true);
}

/// For a process that it has ended.
void remote_executor::impl::blame(host_board::action const& doing, detail::refusals& into) {
  auto const now = clock::now();
  auto& health = health_[doing.model];
  health.on_offence(now);
  if (is_preparing() && doing.what == activity::preparing) {
    left_out_[doing.model] = error{error_kind::aborted, last_end_};
  }
  last_offences_[doing.model] =
      fmt::format("{} while it {} it", how_it_ended_, verb_of(doing.what));
  if (auto guilty = doing.requests == 1 ? pending_.take(doing.request) : std::nullopt) {
    auto const kind = hung_ ? error_kind::deadline_exceeded : error_kind::aborted;
    refuse(std::move(*guilty), {kind, last_end_}, into);
  }
  if (health.failed_for(now) > 0s) {
    for (auto& each : pending_.take_all_of(doing.model)) {
      refuse(std::move(each), *refuse(doing.model, now), into);
    }
  }
}

bool remote_executor::impl::is_preparing() const {
  return phase_ == phase::starting || carried_out_ < orders_number_;
}

/// The process that answered what they had has ended, and the next one has nothing in their places.
void remote_executor::impl::refuse_retired() {
  for (std::size_t place = 0; place < orders_.models.size(); ++place) {
    if (!orders_.models[place].is_retired) {
      continue;
    }
    for (auto& each : pending_.take_all_of(place)) {
      refuse(std::move(each), not_served(orders_.models[place].name), late_answers_);
    }
  }
}

void remote_executor::impl::expire(detail::refusals& into) {
  auto const now = clock::now();
  for (auto& [ticket, late] : pending_.take_late(now - deadline_slack)) {
    if (phase_ == phase::serving) {
      send({0, {{"type", "cancel"}, {"ticket", ticket}}});
    }
    auto const took = std::chrono::duration_cast<milliseconds>(now - late.arrival);
    auto const& name = orders_.models[late.model].name;
    refuse(std::move(late),
           {error_kind::deadline_exceeded,
            fmt::format("the request's time is over after {} ms; the executor of model '{}' {}",
                        took.count(), name,
                        phase_ == phase::serving ? "does not answer" : "is starting")},
           into);
  }
}

}  // namespace sluice::server
