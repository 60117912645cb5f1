#include "runtime/server/executor/executor_session.hpp"

#include <poll.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <utility>

#include "memhandover/base/waiting.hpp"
#include "runtime/server/executor/shared_board.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using memhandover::message;
using nlohmann::json;

/// How long the end waits for a computation of a thread that receives. What else such a thread does ends by itself.
constexpr std::chrono::milliseconds last_computation{500};
constexpr std::chrono::milliseconds between_looks{20};

thread_local bool may_compute = false;  ///< this thread
thread_local bool brings = false;       ///< what it submits it computes itself, or has others woken

/// Nobody waits for what this process has, and what it has published outlives it.
[[noreturn]] void end_with_the_server() {
  std::fflush(nullptr);
  ::_exit(0);
}

}  // namespace

executor_session::executor_session(memhandover::unique_fd socket) : socket_{std::move(socket)} {
  receiver_ = std::thread{[this] { receive(detail::reader_role::member::first); }};
}

executor_session::~executor_session() {
  closing_ = true;
  ::shutdown(socket_.get(), SHUT_RDWR);
  role_.close();
  receiver_.join();
  if (second_.joinable()) {
    second_.join();
  }
}

std::optional<json> executor_session::preparation() {
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return preparation_ || orders_ || refused_orders_; });
  return preparation_;
}

void executor_session::prepared() {
  send({{{"type", "prepared"}}, {}, {}});
}

executor_orders const& executor_session::orders() {
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [this] { return orders_ || refused_orders_; });
  if (refused_orders_) {
    throw error{*refused_orders_};
  }
  return *orders_;
}

bool executor_session::serve(model_executor& host, json const& spare, json const& unservable,
                             changer const& change) {
  std::unique_lock lock{mutex_};
  host_ = &host;
  if (!second_.joinable()) {
    second_ = std::thread{[this] { begin_second(); }};
  }
  lock.unlock();
  send(wrap_text({{"type", "ready"}, {"spare", spare}},
                 unservable.dump(-1, ' ', false, json::error_handler_t::replace)));
  lock.lock();
  try {
    while (!end_wanted_) {
      changed_.wait(lock, [this] { return end_wanted_.load() || next_orders_; });
      if (next_orders_ && !end_wanted_) {
        carry_out(lock, change);
      }
    }
  } catch (...) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    host_ = nullptr;
    // The host may be destroyed next, and threads of this session may be in it.
    while (!changed_.wait_for(lock, between_looks, [this] { return in_host_ == 0; })) {
    }
    throw;
  }
  host_ = nullptr;
  auto const until = std::chrono::steady_clock::now() + last_computation;
  while (!changed_.wait_for(lock, between_looks, [this] { return in_host_ == 0; })) {
    if (std::chrono::steady_clock::now() >= until && orders_ && orders_->board->computes()) {
      return false;
    }
  }
  return true;
}

void executor_session::carry_out(std::unique_lock<std::mutex>& lock, changer const& change) {
  auto const orders = *std::exchange(next_orders_, std::nullopt);
  auto const number = next_number_;
  lock.unlock();
  auto const unservable = change ? change(orders) : json::array();
  send(wrap_text({{"type", "changed"}, {"number", number}},
                 unservable.dump(-1, ' ', false, json::error_handler_t::replace)));
  lock.lock();
}

void executor_session::fail(error const& why) noexcept {
  try {
    auto made = wrap(infer_result{why});
    made.body["type"] = "failed";
    send(made);
  } catch (std::exception const&) {
    // The server has gone as well; there is nobody left to tell.
  }
}

void executor_session::receive(detail::reader_role::member me) {
  ::pthread_setname_np(::pthread_self(), "sluice-session");
  try {
    while (role_.await_turn(me) && receive_some(me)) {
      compute(me);
    }
  } catch (std::exception const& failure) {
    if (!closing_) {
      spdlog::error("the executor cannot hear its server reason={}",
                    telemetry::quoted(failure.what()));
    }
  }
  if (!closing_) {
    end_with_the_server();
  }
}

/// Waits for one message, and takes what has come by then.
bool executor_session::receive_some(detail::reader_role::member me) {
  constexpr int most = 16;  // so that the first is computed soon
  brings = may_compute && role_.has_deputy(me);
  auto came = memhandover::receive_any(socket_.get());
  for (int taken = 0; came.received; came = memhandover::receive_if_there(socket_.get())) {
    bool const is_one_of_many = came.received->form != 0;
    take(std::move(*came.received));
    if (!is_one_of_many || ++taken == most) {
      return true;
    }
  }
  return !came.has_ended;
}

/// What takes little time, if this thread may; if it may not yet, it becomes one that may while the other one receives.
void executor_session::compute(detail::reader_role::member me) {
  auto* const host = enter_host();
  if (host == nullptr) {
    return;
  }
  if (brings) {
    role_.begin(me);
    while (host->compute_here()) {
    }
    role_.end(me);
  } else if (!may_compute && role_.has_deputy(me)) {
    role_.pass(me);
    host->prepare_to_compute();
    may_compute = true;
  }
  leave_host();
}

model_executor* executor_session::enter_host() {
  std::lock_guard const lock{mutex_};
  in_host_ += host_ != nullptr ? 1 : 0;
  return host_;
}

void executor_session::leave_host() {
  std::lock_guard const lock{mutex_};
  if (--in_host_ == 0 && end_wanted_) {
    changed_.notify_all();
  }
}

void executor_session::begin_second() {
  if (auto* const host = enter_host(); host != nullptr) {
    host->prepare_to_compute();
    may_compute = true;
    leave_host();
  }
  receive(detail::reader_role::member::second);
}

void executor_session::take(message received) {
  if (received.form != 0) {
    infer(std::move(received));
    return;
  }
  auto const type = received.body["type"].get<std::string>();
  if (type == "cancel") {
    cancel(received.body.value("ticket", request_ticket{0}));
  } else if (type == "ping") {
    send({{{"type", "pong"}}, {}, {}});
  } else if (type == "status") {
    std::unique_lock lock{mutex_};
    auto const status = host_ == nullptr ? json::object() : host_->status();
    lock.unlock();
    send(wrap_text({{"type", "status"}},
                   status.dump(-1, ' ', false, json::error_handler_t::replace)));
  } else if (type == "keep") {
    std::lock_guard const lock{mutex_};
    if (host_ != nullptr) {
      host_->keep_warm();
    }
  } else if (type == "announce") {
    std::lock_guard const lock{mutex_};
    if (host_ != nullptr) {
      host_->announce_engine();
    }
  } else if (type == "refused") {
    std::lock_guard const lock{mutex_};
    if (host_ != nullptr) {
      host_->note_refused(received.body.value("model", model_executor::model_index{0}),
                          received.body.value("mark", std::uint64_t{0}),
                          std::chrono::milliseconds{received.body.value("retry_after_ms", 0)});
    }
  } else if (type == "end") {
    std::lock_guard const lock{mutex_};
    end_wanted_ = true;
    changed_.notify_all();
  } else if (type == "prepare") {
    std::lock_guard const lock{mutex_};
    preparation_ = received.body.value("for", json::object());
    changed_.notify_all();
  } else if (type == "start") {
    std::lock_guard const lock{mutex_};
    try {
      error const lacks_board{error_kind::invalid_argument, "an executor starts with a board"};
      if (received.descriptors.empty() || received.lost_descriptors) {
        throw error{lacks_board};
      }
      auto board = open_shared_board(std::move(received.descriptors.front()));
      received.descriptors.erase(received.descriptors.begin());
      orders_ = orders_in(received);
      orders_->board = std::move(board);
    } catch (error const& wrong) {
      refused_orders_ = wrong;
    }
    changed_.notify_all();
  } else if (type == "change") {
    auto orders = orders_in(received);
    std::lock_guard const lock{mutex_};
    orders.board = orders_ ? orders_->board : nullptr;
    next_orders_ = std::move(orders);  // instead of those that nobody has begun with
    next_number_ = received.body.value("number", std::uint64_t{0});
    changed_.notify_all();
  } else {
    throw error{error_kind::invalid_argument, "a message of an unknown type, " + type};
  }
}

executor_orders executor_session::orders_in(message& received) {
  error const wrong{error_kind::invalid_argument, "orders are settings and a policy"};
  if (received.lost_descriptors) {
    throw error{wrong};
  }
  executor_orders made;
  auto const given = json::parse(unwrap_text(received), nullptr, false);
  if (!given.is_object() || !given.contains("settings") || !given.contains("policy") ||
      !given["policy"].is_string()) {
    throw error{wrong};
  }
  made.settings = given["settings"];
  made.policy = given["policy"];
  made.left_out = given.value("left_out", json::array());
  made.is_first = given.value("is_first", true);
  return made;
}

void executor_session::infer(message received) {
  auto const ticket = facts_of(received).ticket;
  if (received.lost_descriptors) {
    answer(ticket, lost_tensors());
    return;
  }
  if (!is_large(received)) {
    submit(received, ticket);
    return;
  }
  {
    std::lock_guard const lock{mutex_};
    being_read_.insert(ticket);
  }
  auto const shared = std::make_shared<message>(std::move(received));
  bodies_.post([this, shared, ticket] { submit(*shared, ticket); });
}

void executor_session::submit(message const& received, request_ticket ticket) {
  try {
    auto request = unwrap_request(received);
    auto const model = facts_of(received).place;
    std::lock_guard const lock{mutex_};
    if (is_large(received) && being_read_.erase(ticket) == 0) {
      throw error{error_kind::cancelled, "the client has left"};
    }
    if (host_ == nullptr) {
      throw error{error_kind::unavailable, "the server is shutting down"};
    }
    auto done = [this, ticket](infer_result result) { answer(ticket, result); };
    if (brings) {
      host_->bring(model, std::move(request), std::move(done));
    } else {
      host_->submit(model, std::move(request), std::move(done));
    }
  } catch (...) {
    answer(ticket, caught_error());
  }
}

void executor_session::cancel(request_ticket which) {
  std::lock_guard const lock{mutex_};
  if (being_read_.erase(which) == 0 && host_ != nullptr) {
    host_->cancel(which);
  }
}

void executor_session::answer(request_ticket which, infer_result const& result) noexcept {
  try {
    parcel made;
    try {
      made = wrap(result);
    } catch (...) {
      made = wrap(infer_result{caught_error()});
    }
    made.ticket = which;
    if (made.form == parcel_form::json) {
      made.body["ticket"] = which;
    }
    send(made);
  } catch (std::exception const& failure) {
    // The server is gone, or this process has no memory for a word: what is lost with it is computed by the next one.
    if (!closing_) {
      spdlog::error("an answer could not be given to the server reason={}",
                    telemetry::quoted(failure.what()));
      ::_exit(EXIT_FAILURE);
    }
  }
}

/// As long as it takes: a server that has gone hangs up.
void executor_session::send(parcel const& what) {
  std::lock_guard const lock{sending_};
  while (!what.try_send(socket_.get())) {
    (void)memhandover::await_ready(socket_.get(), POLLOUT, std::nullopt);
  }
}

}  // namespace sluice::server
