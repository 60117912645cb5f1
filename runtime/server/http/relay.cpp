#include "runtime/server/http/relay.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <utility>

#include "runtime/server/http/endpoint_context.hpp"
#include "runtime/server/http/request_head.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

namespace net = boost::asio;
namespace http = boost::beast::http;

namespace {

/// What is read at once, on either side.
constexpr std::size_t at_once = std::size_t{16} << 10U;
/// Of the client, before the engine has taken it.
constexpr std::size_t most_ahead = std::size_t{64} << 10U;
constexpr std::uint32_t most_of_head = std::uint32_t{64} << 10U;

std::string_view text_in(boost::beast::flat_buffer const& buffer) {
  auto const bytes = buffer.cdata();
  return {static_cast<char const*>(bytes.data()), bytes.size()};
}

net::generic::stream_protocol::endpoint endpoint_of(engine_address const& address) {
  if (!address.socket.empty()) return net::local::stream_protocol::endpoint{address.socket};
  return net::ip::tcp::endpoint{net::ip::address_v4::loopback(), address.port};
}

template <typename Parser>
body_framing framing_of(Parser const& parser) {
  if (parser.chunked()) return {body_framing::kind::chunked, 0};
  if (auto const length = parser.content_length()) return {body_framing::kind::length, *length};
  return {};
}

/// Passes what can be parsed of `from`, until `to` has enough. False: it is not HTTP, or more than may be.
template <typename Parser>
bool take_pieces(Parser& parser, boost::beast::flat_buffer& from, std::string& to, bool in_chunks,
                 std::uint64_t& counted, boost::system::error_code& failure) {
  failure = {};
  while (!parser.is_done() && from.size() > 0 && to.size() < at_once) {
    auto const used = parser.put(from.data(), failure);
    from.consume(used);
    auto& came = parser.get().body();
    counted += came.size();
    if (in_chunks && !came.empty()) {
      append_chunk(to, came);
    } else {
      to += came;
    }
    came.clear();
    if (failure == http::error::need_more) {
      failure = {};
      return true;
    }
    if (failure) return false;
    if (used == 0) return true;
  }
  return true;
}

}  // namespace

template <typename... Args>
auto relay::on(void (relay::*step)(Args...)) {
  return [self = shared_from_this(), step](Args... args) {
    if (self->state_ == state_t::ended) return;
    try {
      ((*self).*step)(args...);
    } catch (std::exception const& failure) {
      spdlog::error("a relayed request ended by an exception reason={}",
                    telemetry::quoted(failure.what()));
      self->break_off(relay_outcome::failed, "internal");
    }
  };
}

relay::relay(parts given, head_parser&& parser)
    : with_(std::move(given)),
      request_(std::move(parser)),
      head_(request_.get().base()),
      version_(head_.version()),
      request_framing_(framing_of(request_)),
      limits_(with_.gateway.limits_of(with_.engine)),
      engine_(with_.client.get_executor()),
      timer_(with_.client.get_executor()),
      engine_buffer_(most_of_head + at_once) {
  static_cast<http::fields&>(request_.get())
      .clear();  // what comes from now on stands behind the body
}

void relay::start() {
  timer_.expires_at(next_limit());
  set_timer();
  read_client();
  auto admitted = [life = with_.life, relayed = weak_from_this(),
                   executor = with_.client.get_executor()](engine_admission admission) {
    std::lock_guard const lock{life->mutex};
    if (!life->alive) return;
    net::post(executor, [relayed, admission = std::move(admission)]() mutable {
      auto const self = relayed.lock();
      if (self) self->on (&relay::on_admission)(std::move(admission));
    });
  };
  ticket_ = with_.gateway.enter(with_.engine, std::move(admitted));
}

void relay::on_admission(engine_admission admission) {
  if (auto const* const failure = std::get_if<error>(&admission)) {
    ticket_ = 0;  // it has been counted there
    return end({.then = request_.is_done() && with_.may_keep_alive ? relay_end::next::keep_alive
                                                                   : relay_end::next::close,
                .refusal = oip_api::from_error(*failure)},
               relay_outcome::refused);
  }
  state_ = state_t::connecting;
  engine_.async_connect(endpoint_of(std::get<engine_address>(admission)), on(&relay::on_connected));
}

void relay::on_connected(error_code failure) {
  error_code ignored;
  bool const is_missing = failure == net::error::connection_refused ||
                          failure == boost::system::errc::no_such_file_or_directory;
  if (failure && !is_missing) {
    return refuse(503,
                  fmt::format("engine '{}' cannot be reached: {}; try again later",
                              with_.gateway.name_of(with_.engine), failure.message()),
                  relay_outcome::refused);
  }
  if (failure) {  // it has not got anything, so that another one may have it
    state_ = state_t::waiting;
    engine_.close(ignored);
    return with_.gateway.send_back(ticket_);
  }
  engine_.set_option(net::ip::tcp::no_delay{true}, ignored);  // a Unix socket has no such option
  if (with_.expects_continue && !request_.is_done() && with_.ahead.size() == 0 &&
      !with_.client.send_now(continue_line)) {
    return break_off(relay_outcome::client_left, "client_left");
  }
  state_ = state_t::asking;
  to_engine_ = request_text(head_, request_framing_, with_.from);
  pass_request();
  read_engine();
}

// ---- from the client to the engine

/// Always, as long as there is room: so its end is seen.
void relay::read_client() {
  if (client_reads_ || client_has_finished_ || with_.ahead.size() >= most_ahead) return;
  client_reads_ = true;
  client_piece_.resize(at_once);
  with_.client.async_read_some(net::buffer(client_piece_),
                               [self = shared_from_this()](error_code failure, std::size_t bytes) {
                                 self->client_reads_ = false;
                                 if (bytes > 0) {  // of the next request, if this one has ended
                                   net::buffer_copy(self->with_.ahead.prepare(bytes),
                                                    net::buffer(self->client_piece_.data(), bytes));
                                   self->with_.ahead.commit(bytes);
                                 }
                                 if (self->end_) return self->give_end();
                                 self->on (&relay::on_client_read)(failure, bytes);
                               });
}

void relay::on_client_read(error_code failure, std::size_t /*bytes*/) {
  if (failure) {
    client_has_finished_ = true;
    return break_off(relay_outcome::client_left, "client_left");
  }
  pass_request();
}

void relay::pass_request() {
  bool const may_pass =
      state_ == state_t::asking || state_ == state_t::answering || state_ == state_t::tunnel;
  if (may_pass && !engine_writes_ && !is_deaf_) {
    if (state_ == state_t::tunnel) {
      take_tunnel();
    } else if (!take_body()) {
      return;
    }
    if (!to_engine_.empty()) {
      engine_writes_ = true;
      net::async_write(engine_, net::buffer(to_engine_), on(&relay::on_request_passed));
    }
  }
  read_client();
}

void relay::take_tunnel() {
  bytes_in_ += with_.ahead.size();
  to_engine_ += text_in(with_.ahead);
  with_.ahead.consume(with_.ahead.size());
}

/// False: the relay has ended.
bool relay::take_body() {
  if (has_passed_request_) return true;
  error_code failure;
  bool const in_chunks = request_framing_.is == body_framing::kind::chunked;
  if (!take_pieces(request_, with_.ahead, to_engine_, in_chunks, bytes_in_, failure)) {
    bool const is_too_large = failure == http::error::body_limit;
    auto const why =
        is_too_large ? std::string{"the body is larger than this server takes (server.max_body)"}
                     : fmt::format("the body is not HTTP/1.1: {}", failure.message());
    if (state_ == state_t::asking) {
      refuse(is_too_large ? 413 : 400, why, relay_outcome::client_left);
    } else {
      break_off(relay_outcome::client_left, "malformed");
    }
    return false;
  }
  if (request_.is_done()) {
    has_passed_request_ = true;
    if (in_chunks) to_engine_ += last_chunk(request_.get());
  }
  return true;
}

void relay::on_request_passed(error_code failure, std::size_t /*bytes*/) {
  engine_writes_ = false;
  to_engine_.clear();
  if (failure) {
    // It may have answered all the same, and wants no more of the request.
    is_deaf_ = true;
    return;
  }
  moved_ = clock::now();
  pass_request();
}

// ---- from the engine to the client

void relay::read_engine() {
  engine_.async_read_some(engine_buffer_.prepare(at_once), on(&relay::on_engine_read));
}

void relay::on_engine_read(error_code failure, std::size_t bytes) {
  engine_buffer_.commit(bytes);
  if (failure) return on_engine_end(failure);
  moved_ = clock::now();
  pass_answer();
}

void relay::on_engine_end(error_code failure) {
  engine_has_left_ = true;
  if (state_ == state_t::asking) {
    return refuse(503,
                  fmt::format("engine '{}' ended, or closed the connection, before it answered; "
                              "try again",
                              with_.gateway.name_of(with_.engine)),
                  relay_outcome::failed);
  }
  if (state_ == state_t::tunnel) {
    engine_has_left_ = false;
    return finish(relay_end::next::close);
  }
  if (failure == net::error::eof) {
    failure = {};
    answer_->put_eof(failure);
  }
  if (failure) return break_off(relay_outcome::failed, "engine_left");
  engine_has_left_ = false;  // it ends what it has said so
  pass_answer();
}

void relay::pass_answer() {
  to_client_.clear();
  if (state_ == state_t::asking && !take_head()) return;
  if (state_ == state_t::tunnel) {
    bytes_out_ += engine_buffer_.size();
    to_client_ += text_in(engine_buffer_);
    engine_buffer_.consume(engine_buffer_.size());
  } else {
    take_answer();
    if (state_ == state_t::ended) return;
  }
  if (!to_client_.empty()) {
    client_writes_ = true;
    client_written_since_ = clock::now();
    return net::async_write(with_.client, net::buffer(to_client_), on(&relay::on_answer_passed));
  }
  if (answer_is_over_) return on_answer_passed({}, 0);
  read_engine();
}

/// False: there is no answer yet, or none that can be passed.
bool relay::take_head() {
  auto const& name = with_.gateway.name_of(with_.engine);
  for (;;) {
    if (!answer_) {
      answer_.emplace();
      answer_->header_limit(most_of_head);
      answer_->body_limit(boost::none);
      answer_->skip(head_.method() == http::verb::head);
    }
    error_code failure;
    engine_buffer_.consume(answer_->put(engine_buffer_.data(), failure));
    if (failure == http::error::need_more) {
      read_engine();
      return false;
    }
    auto const status = failure ? 0 : answer_->get().result_int();
    bool const is_change = status == 101;
    if (failure || (is_change && !asks_for_websocket(head_))) {
      refuse(502,
             fmt::format("what engine '{}' answers is not HTTP/1.1: {}", name,
                         failure ? failure.message() : "it changes to what nobody has asked for"),
             relay_outcome::failed);
      return false;
    }
    if (status >= 200 || is_change) {
      begin_answer();
      return true;
    }
    answer_.reset();  // said on the way
  }
}

void relay::begin_answer() {
  auto const status = answer_->get().result_int();
  bool const has_no_body = head_.method() == http::verb::head || status == 204 || status == 304;
  answer_framing_ = framing_of(*answer_);
  bool const is_open = answer_framing_.is == body_framing::kind::chunked || answer_->need_eof();
  if (has_no_body && is_open) {
    answer_framing_ = {};
  } else if (is_open && status != 101) {
    answer_framing_ = {version_ == 11 ? body_framing::kind::chunked : body_framing::kind::until_end,
                       0};
  }
  keep_alive_ = with_.may_keep_alive && answer_framing_.is != body_framing::kind::until_end;
  until_answer_ = clock::now() - arrival_;
  status_ = status;
  to_client_ = answer_text(answer_->get().base(), {.version = version_,
                                                   .body = answer_framing_,
                                                   .keep_alive = keep_alive_,
                                                   .is_websocket = status == 101});
  static_cast<http::fields&>(answer_->get()).clear();
  state_ = status == 101 ? state_t::tunnel : state_t::answering;
  moved_ = clock::now();
  timer_.expires_at(std::min(next_limit(), moved_ + with_.transfer_timeout));
  set_timer();
  if (state_ == state_t::tunnel) pass_request();
}

void relay::take_answer() {
  error_code failure;
  bool const in_chunks = answer_framing_.is == body_framing::kind::chunked;
  if (!take_pieces(*answer_, engine_buffer_, to_client_, in_chunks, bytes_out_, failure)) {
    return break_off(relay_outcome::failed, "engine_malformed");
  }
  if (answer_->is_done() && !answer_is_over_) {
    answer_is_over_ = true;
    if (in_chunks) to_client_ += last_chunk(answer_->get());
  }
}

void relay::on_answer_passed(error_code failure, std::size_t /*bytes*/) {
  client_writes_ = false;
  if (failure) return break_off(relay_outcome::client_left, "client_left");
  moved_ = clock::now();
  if (!answer_is_over_) return pass_answer();
  // What is left of the request would be taken for the next one.
  finish(keep_alive_ && request_.is_done() ? relay_end::next::keep_alive : relay_end::next::close);
}

// ---- the end

/// Before anything of an answer has been written.
void relay::refuse(unsigned status, std::string_view message, relay_outcome outcome) {
  auto refusal = oip_api::failure(status, message);
  bool const is_read = request_.is_done() && with_.may_keep_alive;
  end({.then = is_read ? relay_end::next::keep_alive : relay_end::next::close,
       .refusal = std::move(refusal),
       .cause = outcome == relay_outcome::failed ? "engine_failed" : "refused"},
      outcome);
}

void relay::break_off(relay_outcome outcome, std::string_view cause) {
  if (answer_framing_.is == body_framing::kind::until_end) {
    // The end of the connection is the end of the body: only a reset says that it is not.
    error_code ignored;
    with_.client.socket().set_option(net::socket_base::linger{true, 0}, ignored);
  }
  end({.then = relay_end::next::cut, .cause = cause}, outcome);
}

void relay::finish(relay_end::next then) {
  end({.then = then}, relay_outcome::answered);
}

void relay::end(relay_end how, relay_outcome outcome) {
  if (state_ == state_t::ended) return;
  leave(outcome);
  how.status = status_;
  how.bytes_in = bytes_in_;
  how.bytes_out = bytes_out_;
  bool const is_cut = how.then == relay_end::next::cut;
  end_ = std::move(how);
  if (client_reads_ && !is_cut) {  // until it has stopped reading
    error_code ignored;
    with_.client.socket().cancel(ignored);
    return;
  }
  give_end();
}

void relay::give_end() {
  auto const done = std::exchange(with_.done, nullptr);
  auto end = *std::exchange(end_, std::nullopt);
  if (done) done(std::move(end));
}

void relay::cancel() {
  if (state_ == state_t::ended) return end_.reset();
  with_.done = nullptr;
  leave(relay_outcome::client_left);
}

void relay::leave(relay_outcome outcome) {
  state_ = state_t::ended;
  error_code ignored;
  engine_.close(ignored);
  timer_.cancel();
  if (auto const ticket = std::exchange(ticket_, 0); ticket != 0) {
    with_.gateway.leave(ticket, {outcome, until_answer_, engine_has_left_});
  }
}

relay::clock::time_point relay::next_limit() const {
  if (state_ != state_t::answering && state_ != state_t::tunnel) {
    return arrival_ + limits_.until_answer;
  }
  auto const silent = moved_ + limits_.silence;
  return client_writes_ ? std::min(silent, client_written_since_ + with_.transfer_timeout) : silent;
}

void relay::set_timer() {
  timer_.async_wait([self = shared_from_this()](error_code cancelled) {
    if (!cancelled) self->on (&relay::on_timer)();
  });
}

void relay::on_timer() {
  auto const now = clock::now();
  if (auto const limit = next_limit(); limit > now) {
    // A write that begins meanwhile has its limit, too.
    timer_.expires_at(std::min(limit, now + with_.transfer_timeout));
    return set_timer();
  }
  auto const& name = with_.gateway.name_of(with_.engine);
  auto const limit = std::chrono::duration<double>{limits_.until_answer};
  switch (state_) {
    case state_t::waiting:
      return refuse(504,
                    fmt::format("engine '{}' could not take the request within {} "
                                "(server.request_timeout)",
                                name, limit),
                    relay_outcome::refused);
    case state_t::connecting:
    case state_t::asking:
      if (!request_.is_done() && !engine_writes_) {
        return refuse(408, fmt::format("the request did not arrive within {}", limit),
                      relay_outcome::client_left);
      }
      return refuse(504,
                    fmt::format("engine '{}' did not begin to answer within {} "
                                "(server.request_timeout)",
                                name, limit),
                    relay_outcome::failed);
    default:
      return client_writes_ ? break_off(relay_outcome::client_left, "stalled")
                            : break_off(relay_outcome::failed, "engine_silent");
  }
}

}  // namespace sluice::server
