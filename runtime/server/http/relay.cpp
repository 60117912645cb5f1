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
#include "runtime/server/http/openai_form.hpp"
#include "runtime/server/http/request_head.hpp"
#include "runtime/server/http/tcp_progress.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

namespace net = boost::asio;
namespace http = boost::beast::http;

namespace {

/// What is read at once, on either side.
constexpr std::size_t at_once = std::size_t{16} << 10U;
/// Of the client, before the engine has taken it.
constexpr std::size_t most_ahead = std::size_t{64} << 10U;
/// Of a request, so that it can be sent once more.
constexpr std::size_t most_again = std::size_t{64} << 10U;
/// Of tokens, so that who counts them is not asked for each.
constexpr std::chrono::seconds report_every{1};
constexpr std::size_t most_unreported = 256;
constexpr std::uint32_t most_of_head = std::uint32_t{64} << 10U;

std::string_view text_in(boost::beast::flat_buffer const& buffer) {
  auto const bytes = buffer.cdata();
  return {static_cast<char const*>(bytes.data()), bytes.size()};
}

net::generic::stream_protocol::endpoint endpoint_of(engine_address const& address) {
  if (!address.socket.empty()) return net::local::stream_protocol::endpoint{address.socket};
  return net::ip::tcp::endpoint{net::ip::address_v4::loopback(), address.port};
}

/// What is wrong with a body as HTTP has it.
struct http_fault {
  boost::system::error_code is;
};

template <typename Parser>
body_framing framing_of(Parser const& parser) {
  if (parser.chunked()) return {body_framing::kind::chunked, 0};
  if (auto const length = parser.content_length()) return {body_framing::kind::length, *length};
  return {};
}

void append_piece(std::string& to, std::string_view piece, bool in_chunks) {
  if (in_chunks && !piece.empty()) {
    append_chunk(to, piece);
  } else {
    to += piece;
  }
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

relay::relay(parts given, std::unique_ptr<request_parser> parser)
    : with_(std::move(given)),
      parser_(std::move(parser)),
      request_(*parser_),
      head_(request_.get().base()),
      version_(head_.version()),
      request_framing_(framing_of(request_)),
      limits_(with_.gateway.limits_of(with_.engine)),
      arrival_(with_.arrival),
      may_be_followed_(limits_.keeps_connections && may_be_followed(head_, request_framing_)),
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
  address_ = std::move(std::get<engine_address>(admission));
  if (take_over(with_.gateway.reuse(ticket_))) return ask();
  connect();
}

/// False: a new one is needed.
bool relay::take_over(engine_connection kept) {
  run_ = kept.run;
  if (!kept.socket) return false;
  error_code failure;
  engine_.assign(endpoint_of(address_).protocol(), kept.socket.get(), failure);
  if (failure) return false;
  auto const socket = kept.socket.release();
  is_used_ = true;
  has_heard_ = has_sent_ = false;
  if (!asks_again_) sent_.emplace();
  acknowledged_before_ = acknowledged_bytes(socket);
  return true;
}

void relay::connect() {
  state_ = state_t::connecting;
  is_used_ = false;
  engine_.async_connect(endpoint_of(address_), on(&relay::on_connected));
}

void relay::on_connected(error_code failure) {
  error_code ignored;
  bool const is_missing = failure == net::error::connection_refused ||
                          failure == boost::system::errc::no_such_file_or_directory;
  if (failure && (!is_missing || may_have_come_)) {
    engine_has_left_ = is_missing;
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
  ask();
}

void relay::ask() {
  if (with_.expects_continue && !request_.is_done() && with_.ahead.size() == 0 &&
      !with_.client.send_now(continue_line)) {
    return break_off(relay_outcome::client_left, "client_left");
  }
  with_.expects_continue = false;  // it has been told so
  state_ = state_t::asking;
  to_engine_ = asks_again_ && sent_
                   ? *sent_
                   : request_text(head_, request_framing_, with_.from, may_be_followed_);
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
      if (is_used_ && !asks_again_ && sent_) {
        if (sent_->size() + to_engine_.size() > most_again) {
          sent_.reset();
        } else {
          *sent_ += to_engine_;
        }
      }
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
  try {
    take_parts_of_body();
    return true;
  } catch (error const& wrong) {
    refuse_body(400, wrong.what());
  } catch (http_fault const& wrong) {
    bool const is_too_large = wrong.is == http::error::body_limit;
    refuse_body(is_too_large ? 413 : 400,
                is_too_large ? "the body is larger than this server takes (server.max_body)"
                             : fmt::format("the body is not HTTP/1.1: {}", wrong.is.message()));
  }
  return false;
}

/// Throws what is wrong with it: the engine does not get the rest, and has no whole request then.
void relay::take_parts_of_body() {
  bool const in_chunks = request_framing_.is == body_framing::kind::chunked;
  append_piece(to_engine_, with_.begun.bytes, in_chunks);
  bytes_in_ += with_.begun.bytes.size();
  with_.begun.bytes = {};
  error_code failure;
  bool const is_http = to_engine_.size() >= at_once ||
                       take_pieces(request_, with_.ahead, failure, [&](std::string const& piece) {
                         bytes_in_ += piece.size();
                         if (with_.begun.named) with_.begun.named->take(piece);
                         append_piece(to_engine_, piece, in_chunks);
                         return to_engine_.size() < at_once;
                       });
  if (!is_http) throw http_fault{failure};
  if (!request_.is_done()) return;
  if (with_.begun.named) with_.begun.named->finish();
  has_passed_request_ = true;
  if (in_chunks) to_engine_ += last_chunk(request_.get());
}

void relay::refuse_body(unsigned status, std::string_view why) {
  if (state_ == state_t::asking) return refuse(status, why, relay_outcome::client_left);
  break_off(relay_outcome::client_left, "malformed");
}

void relay::on_request_passed(error_code failure, std::size_t bytes) {
  engine_writes_ = false;
  has_sent_ = has_sent_ || bytes > 0;
  to_engine_.clear();
  with_.begun.share = {};
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
  has_heard_ = has_heard_ || bytes > 0;
  if (failure) return on_engine_end(failure);
  moved_ = clock::now();
  pass_answer();
}

void relay::on_engine_end(error_code failure) {
  if (state_ == state_t::asking && !has_heard_ && may_ask_again(failure)) return ask_again();
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
  if (failure) {
    return fail("engine_left", "ended, or closed the connection, before its answer was whole");
  }
  engine_has_left_ = false;  // it ends what it has said so
  pass_answer();
}

/// Whether the engine may have closed the connection without having seen the request, which can be sent once more.
bool relay::may_ask_again(error_code failure) {
  if (!is_used_ || asks_again_ || !sent_ || engine_writes_) return false;
  // Of a reset it is not known what had come before.
  bool const is_in_order = failure == net::error::eof || failure == net::error::broken_pipe;
  bool const has_come_nowhere =
      !has_sent_ || (is_in_order && acknowledged_before_ &&
                     acknowledged_bytes(engine_.native_handle()) == acknowledged_before_);
  may_have_come_ = !has_come_nowhere;
  return has_come_nowhere || is_idempotent(head_.method());
}

void relay::ask_again() {
  asks_again_ = true;
  is_deaf_ = false;
  error_code ignored;
  engine_.close(ignored);
  engine_buffer_.clear();
  answer_.reset();
  connect();
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
    if (state_ == state_t::ended || !failed_for_.empty()) return;
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
    // It had waited for a request for too long, and says so to one that has come too late (RFC 9110 section 15.5.9).
    if (status == 408 && !answer_->keep_alive() && may_ask_again(net::error::eof)) {
      ask_again();
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
  answers_early_ = !has_passed_request_;
  until_answer_ = clock::now() - arrival_;
  status_ = status;
  if (with_.begun.named && status == 200 && comes_in_events(answer_->get().base())) {
    events_.emplace();
  }
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
  if (!take_pieces(*answer_, engine_buffer_, failure, [&](std::string const& piece) {
        bytes_out_ += piece.size();
        if (events_) note_tokens(events_->take(piece));
        append_piece(to_client_, piece, in_chunks);
        return to_client_.size() < at_once;
      })) {
    return fail("engine_malformed", "sends what is not HTTP/1.1");
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

/// So many have come at once.
void relay::note_tokens(std::size_t events) {
  if (events == 0) return;
  auto const now = clock::now();
  if (!last_token_) {
    tokens_.first = now - arrival_;
    last_token_ = reported_ = now;
    --events;
  }
  for (; events > 0; --events) {
    tokens_.gaps.push_back(now - *last_token_);
    last_token_ = now;
  }
  if (tokens_.first || now - reported_ >= report_every || tokens_.gaps.size() >= most_unreported) {
    report_tokens();
  }
}

void relay::report_tokens() {
  if (!tokens_.first && tokens_.gaps.empty()) return;
  with_.gateway.note_tokens(ticket_, tokens_);
  tokens_ = {};
  reported_ = clock::now();
}

/// Before anything of an answer has been written.
void relay::refuse(unsigned status, std::string_view message, relay_outcome outcome) {
  auto refusal = oip_api::failure(status, message);
  bool const is_read = request_.is_done() && with_.may_keep_alive;
  end({.then = is_read ? relay_end::next::keep_alive : relay_end::next::close,
       .refusal = std::move(refusal),
       .cause = outcome == relay_outcome::failed ? "engine_failed" : "refused"},
      outcome);
}

/// Within an answer.
void relay::fail(std::string_view cause, std::string_view why) {
  bool const can_be_said = events_ && events_->is_between_events() && !client_writes_ &&
                           answer_framing_.is == body_framing::kind::chunked;
  if (!can_be_said) return break_off(relay_outcome::failed, cause);
  failed_for_ = cause;
  error_code ignored;
  engine_.close(ignored);
  append_chunk(
      to_client_,
      openai_error_event(std_view(head_.target()),
                         fmt::format("engine '{}' {}", with_.gateway.name_of(with_.engine), why)));
  client_writes_ = true;
  client_written_since_ = clock::now();
  net::async_write(with_.client, net::buffer(to_client_), on(&relay::on_failure_sent));
}

void relay::on_failure_sent(error_code /*failure*/, std::size_t /*bytes*/) {
  break_off(relay_outcome::failed, failed_for_);
}

void relay::break_off(relay_outcome outcome, std::string_view cause) {
  if (answer_framing_.is == body_framing::kind::until_end) {
    // The end of the connection is the end of the body: only a reset says that it is not.
    error_code ignored;
    with_.client.socket().set_option(net::socket_base::linger{true, 0}, ignored);
  }
  end({.then = relay_end::next::cut, .cause = cause}, outcome);
}

/// The answer is over.
bool relay::keeps_connection() const {
  bool const is_all_read = has_passed_request_ && !engine_writes_ && !is_deaf_ &&
                           engine_buffer_.size() == 0 && answer_->keep_alive();
  // A server that refuses a request may have left its body where it is, and one that answers early as well. Behind an answer that has
  // no body stands, of careless servers, one all the same.
  bool const has_body = request_framing_.is != body_framing::kind::none;
  bool const is_clear =
      !answers_early_ && status_ != 204 && status_ != 304 && (!has_body || status_ / 100 == 2);
  return may_be_followed_ && state_ == state_t::answering && is_all_read && is_clear;
}

void relay::finish(relay_end::next then) {
  if (answer_is_over_ && keeps_connection()) {
    error_code failure;
    memhandover::unique_fd socket{engine_.release(failure)};
    if (!failure) with_.gateway.keep(ticket_, {std::move(socket), run_});
  }
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
  report_tokens();
  if (auto const ticket = std::exchange(ticket_, 0); ticket != 0) {
    bool const is_broken_off = outcome == relay_outcome::failed && until_answer_;
    with_.gateway.leave(ticket, {outcome, until_answer_, engine_has_left_, is_broken_off});
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
      if (!failed_for_.empty()) return break_off(relay_outcome::failed, failed_for_);
      if (client_writes_) return break_off(relay_outcome::client_left, "stalled");
      return fail("engine_silent", fmt::format("has been silent for {} (engine.max_silence)",
                                               std::chrono::duration<double>{limits_.silence}));
  }
}

}  // namespace sluice::server
