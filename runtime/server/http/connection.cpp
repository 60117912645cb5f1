#include "runtime/server/http/connection.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/read.hpp>
#include <string>
#include <utility>

#include "runtime/server/http/connection_handlers.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "runtime/server/http/reply_message.hpp"
#include "runtime/server/http/request_head.hpp"
#include "runtime/server/http/submission.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

namespace net = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr unsigned char tls_handshake = 22;  ///< with which a client begins TLS

/// Of a request that no line is written of, only what other lines may have.
request_label label_of(infer_request const& request, bool is_recorded) {
  return is_recorded ? request_label{request.model, request.version, request.id}
                     : request_label{{}, {}, request.id};
}

}  // namespace

// ---- connection

connection::connection(net::ip::tcp::socket socket, endpoint_context& context,
                       std::shared_ptr<void const> held)
    : context_(context),
      record_(context.options.accesses, socket),
      stream_(std::move(socket)),
      io_(&static_cast<net::io_context&>(
          net::query(stream_.get_executor(), net::execution::context))),
      held_with_it_(std::move(held)),
      timer_(stream_.get_executor()) {}

void connection::start() {
  post([](connection& self) {
    error_code ignored;
    self.stream_.socket().set_option(net::ip::tcp::no_delay{true}, ignored);
    if (self.tls()) return self.await_handshake();
    self.await_request();
  });
}

void connection::start_refused() {
  post([](connection& self) {
    self.is_refused_ = true;
    if (self.tls()) return self.await_handshake();
    self.refuse_connection();
  });
}

void connection::refuse_connection() {
  record_.begin();
  respond(oip_api::failure(
              503, fmt::format("all {} connections of the server are in use; try again later",
                               context_.options.max_connections)),
          false);
}

void connection::drain() {
  end_if_idle();
}

void connection::end_if_idle() {
  post([](connection& self) {
    if (self.state_ == state_t::idle) self.close();
  });
}

void connection::abort() {
  post([](connection& self) { self.close(); });
}

// ---- TLS

std::shared_ptr<tls_context> connection::tls() const {
  return context_.options.security ? context_.options.security->current()->tls : nullptr;
}

void connection::await_handshake() {
  if (context_.registry.is_closed()) return close();
  state_ = state_t::idle;
  if (!is_refused_) context_.registry.rest(shared_from_this());
  arm(context_.options.handshake_timeout);
  stream_.async_read_some(buffer_.prepare(4096), on(&connection::on_hello));
}

void connection::on_hello(error_code failure, std::size_t bytes) {
  context_.registry.wake(*this);
  if (failure) return close();
  buffer_.commit(bytes);
  auto const certificate = tls();
  if (*static_cast<unsigned char const*>(buffer_.cdata().data()) != tls_handshake || !certificate) {
    disarm();
    record_.begin();
    return respond(oip_api::failure(400, "this port speaks TLS; ask with https"), false);
  }
  state_ = state_t::reading;
  stream_.async_handshake(certificate, buffer_.cdata(), on(&connection::on_handshake));
}

void connection::on_handshake(error_code failure, std::size_t /*bytes*/) {
  disarm();
  buffer_.clear();  // a client that has not been answered has sent no more
  if (failure) return timed_out_ ? close() : on_shutdown({});
  if (is_refused_) return refuse_connection();
  await_request();
}

// ---- requests

void connection::await_request() {
  if (context_.registry.is_closed()) return close();
  ++sequence_;
  speaks_openai_ = false;
  parser_.emplace();
  parser_->header_limit(context_.options.max_header_bytes);
  parser_->body_limit(context_.options.max_body_bytes);
  if (buffer_.size() > 0) return read_header();
  state_ = state_t::idle;
  context_.registry.rest(shared_from_this());
  arm(context_.options.idle_timeout);
  if (watched_) return;  // it reads already
  stream_.async_read_some(buffer_.prepare(4096), on(&connection::on_first_bytes));
}

void connection::on_first_bytes(error_code failure, std::size_t bytes) {
  context_.registry.wake(*this);
  disarm();
  if (failure) return close();
  buffer_.commit(bytes);
  read_header();
}

void connection::read_header() {
  state_ = state_t::reading;
  record_.begin();
  arm(context_.options.transfer_timeout);
  http::async_read_header(stream_, buffer_, *parser_, on(&connection::on_header));
}

void connection::on_header(error_code failure, std::size_t /*bytes*/) {
  disarm();
  record_.set_head(parser_->get());
  std::optional<http_reply> misled;
  auto const engine = find_engine(misled);
  speaks_openai_ = engine && engine->by == engine_route::kind::model;
  if (failure) return read_failed(failure);
  arrival_ = std::chrono::steady_clock::now();
  bool const expects_continue = parser_->get().count(http::field::expect) > 0;
  auto refusal = refuse_header(parser_->get());
  if (!refusal) refusal = refuse_stranger();
  if (!refusal) refusal = std::move(misled);
  if (!refusal && engine) return pass_to_engine(*engine);
  if (!refusal && expects_continue) refusal = context_.api.refuse(view());
  if (!refusal && announces_large_body()) refusal = take_share(0);
  if (refusal) return respond(std::move(*refusal), false);
  // A body that is already here needs no invitation.
  if (!expects_continue || parser_->is_done() || buffer_.size() > 0) return read_body();
  arm(context_.options.transfer_timeout);
  net::async_write(stream_, net::buffer(continue_line.data(), continue_line.size()),
                   on(&connection::on_continue_written));
}

void connection::on_continue_written(error_code failure, std::size_t /*bytes*/) {
  disarm();
  if (failure) return close();
  read_body();
}

std::optional<http_reply> connection::refuse_stranger() const {
  if (!context_.options.security) return std::nullopt;
  auto const now = context_.options.security->current();
  if (!now->tokens) return std::nullopt;
  return server::refuse_stranger(parser_->get(), !parser_->is_done(), *now->tokens);
}

http_request connection::view() const {
  return view_of(parser_->get(), body_, context_.options.max_body_bytes);
}

void connection::answer_request() {
  body_ = std::make_shared<std::string>(std::move(parser_->get().body()));
  auto const bytes = body_->size();
  record_.set_body(bytes);
  arrival_ = std::chrono::steady_clock::now();
  has_result_ = false;
  early_.reset();
  bool const may_take_long = oip_api::may_take_long(view());
  if (bytes <= small_body && !may_take_long && !oip_api::may_wait(view())) {
    return on_outcome(context_.api.handle(view()));
  }
  if (bytes > small_body) {  // the last part, too
    if (auto refusal = take_share(bytes)) return respond(std::move(*refusal), false);
  }
  state_ = state_t::waiting;
  submitting_ = true;
  compute(
      [as_it_came = bytes > small_body ? bytes : 0](connection& self) {
        body_share decompressed;  // this thread's, while `share_` is the connection's
        auto asked = self.view();
        asked.on_growth = [&](std::uint64_t becomes) {
          if (becomes > small_body &&
              !decompressed.grow(self.context_.waiting_body_bytes,
                                 self.context_.options.max_waiting_body_bytes, becomes,
                                 as_it_came)) {
            throw error{error_kind::unavailable, too_many_large_bodies};
          }
        };
        auto const of = std::make_shared<oip_api::outcome>(self.context_.api.handle(asked));
        if (auto* const request = std::get_if<decoded_request>(of.get())) {
          auto form = std::move(request->form);
          auto label = label_of(*request, self.context_.options.accesses != nullptr);
          auto const ticket = self.infer(std::move(*request));
          decompressed = {};  // the service has taken of it what it needs
          self.post([ticket, form = std::move(form), label = std::move(label)](connection& own) {
            own.on_submitted(ticket, form, label);
          });
          return;
        }
        decompressed = {};
        self.post([of](connection& own) { own.on_outcome(std::move(*of)); });
      },
      may_take_long ? context_.changes : context_.bodies);
}

void connection::on_outcome(oip_api::outcome of) {
  if (auto* const request = std::get_if<decoded_request>(&of)) {
    state_ = state_t::waiting;
    auto form = std::move(request->form);
    auto label = label_of(*request, context_.options.accesses != nullptr);
    submitting_ = true;
    auto const ticket = infer(std::move(*request));
    return on_submitted(ticket, std::move(form), std::move(label));
  }
  submitting_ = false;
  share_ = {};
  body_.reset();
  respond(std::get<http_reply>(std::move(of)), parser_->get().keep_alive());
}

void connection::on_submitted(request_ticket ticket, output_form form, request_label label) {
  submitting_ = false;
  share_ = {};
  body_.reset();  // the service has taken of it what it needs
  form_ = std::move(form);
  id_ = label.id;
  record_.set_label(std::move(label));
  if (state_ != state_t::waiting) return context_.service.cancel(ticket);
  ticket_ = ticket;
  watch();
  if (early_) on_result(sequence_, *std::exchange(early_, std::nullopt));
}

request_ticket connection::infer(infer_request request) {
  request.arrival = arrival_;
  return submit(context_.service, std::move(request),
                [life = context_.life, io = io_, client = weak_from_this(),
                 sequence = sequence_](infer_result result) {
                  if (io_of_this_thread == io) {  // which lives, then
                    if (auto const here = client.lock())
                      here->on_result_here(sequence, std::move(result));
                    return;
                  }
                  // To the connection's thread, if both still exist.
                  std::lock_guard const lock{life->mutex};
                  auto const target = life->alive ? client.lock() : nullptr;
                  if (!target) return;
                  target->post([sequence, result = std::move(result)](connection& self) mutable {
                    self.on_result(sequence, std::move(result));
                  });
                });
}

/// From within a call of the service; as a handler otherwise.
void connection::on_result_here(std::uint64_t sequence, infer_result result) {
  if (state_ == state_t::closed) return;
  try {
    on_result(sequence, std::move(result));
  } catch (std::exception const& failure) {
    spdlog::error("connection ended by an exception reason={}", telemetry::quoted(failure.what()));
    close();
  }
}

void connection::on_result(std::uint64_t sequence, infer_result result) {
  if (state_ != state_t::waiting || sequence != sequence_ || has_result_) return;
  if (submitting_) {
    early_ = std::move(result);
    return;
  }
  has_result_ = true;
  ticket_ = 0;
  record_.set_result(result);
  if (!is_large(result, form_)) return on_answer(oip_api::answer(result, form_, id_));
  compute(
      [result = std::move(result)](connection& self) {
        self.post([answer = oip_api::answer(result, self.form_, self.id_)](
                      connection& own) mutable { own.on_answer(std::move(answer)); });
      },
      context_.bodies);
}

void connection::on_answer(http_reply answer) {
  bool const keep_alive = parser_->get().keep_alive() && !context_.registry.is_closed();
  if (watched_ && !(reads_ahead_ && keep_alive && buffer_.size() == 0)) {
    held_ = std::move(answer);
    error_code ignored;
    stream_.socket().cancel(ignored);
    return;
  }
  respond(std::move(answer), keep_alive);
}

void connection::arm(std::chrono::milliseconds limit) {
  timed_out_ = false;
  limit_ = std::chrono::steady_clock::now() + limit;
  if (!timer_set_ || timer_.expiry() > limit_) set_timer();
}

void connection::set_timer() {
  timer_set_ = true;
  timer_.expires_at(limit_);
  timer_.async_wait([self = shared_from_this(), round = ++timer_round_](error_code failure) {
    if (!failure && round == self->timer_round_ && self->state_ != state_t::closed) {
      self->on_timer();
    }
  });
}

void connection::on_timer() {
  timer_set_ = false;
  if (limit_ == std::chrono::steady_clock::time_point::max()) return;
  if (limit_ > std::chrono::steady_clock::now()) return set_timer();
  timed_out_ = true;
  error_code ignored;
  stream_.socket().cancel(ignored);
}

}  // namespace sluice::server
