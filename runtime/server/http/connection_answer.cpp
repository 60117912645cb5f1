// The second half of a connection: whether its client is still there, the answer's way to it, and the end.

#include <fmt/format.h>

#include <boost/beast/http/message_generator.hpp>
#include <chrono>
#include <string_view>
#include <utility>

#include "runtime/server/http/connection_handlers.hpp"
#include "runtime/server/http/reply_message.hpp"

namespace sluice::server {

namespace net = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

constexpr std::chrono::milliseconds linger_limit{1000};
/// Of requests that a client sends ahead while one of its is being answered; beyond, it is not watched.
constexpr std::size_t most_sent_ahead = std::size_t{64} << 10U;

}  // namespace

// ---- whether the client is still there

void connection::watch() {
  if (buffer_.size() >= most_sent_ahead) return;
  watched_ = true;
  reads_ahead_ = !stream_.is_encrypted();
  stream_.async_read_some(buffer_.prepare(most_sent_ahead - buffer_.size()),
                          on(&connection::on_watched));
}

bool connection::watch_goes_on() {
  watched_ = false;
  if (!held_) return true;
  respond(std::move(*std::exchange(held_, std::nullopt)), parser_->get().keep_alive());
  return false;
}

void connection::on_watched(error_code failure, std::size_t bytes) {
  if (state_ == state_t::idle) {
    watched_ = false;
    return on_first_bytes(failure, bytes);
  }
  if (state_ == state_t::lingering) {
    watched_ = false;
    return;
  }
  if (state_ == state_t::writing) {  // the answer has begun, and what comes now is for later
    watched_ = false;
    buffer_.commit(bytes);
    (void)stream_.note_end(failure);
    return;
  }
  buffer_.commit(bytes);
  bool const has_finished = stream_.note_end(failure);
  if (!watch_goes_on()) return;
  if (!failure) return watch();
  if (!has_finished) return close();
  on_finished_sending();
}

void connection::on_finished_sending() {
  if (parser_->get().version() == 11 && !stream_.send_now(continue_line)) return close();
  watched_ = true;
  reads_ahead_ = false;
  stream_.socket().async_wait(net::ip::tcp::socket::wait_error, on(&connection::on_reset));
}

void connection::on_reset(error_code /*failure*/) {
  if (watch_goes_on()) close();
}

void connection::respond(http_reply answer, bool keep_alive) {
  state_ = state_t::writing;
  search_.reset();
  share_ = {};
  if (speaks_openai_) answer = in_openai_form(std::move(answer));
  keep_alive_ = keep_alive && !context_.registry.is_closed();
  record_.set_reply(answer);
  arm(context_.options.transfer_timeout);
  // An HTTP/1.0 client learns only from an answer of its own version that the connection stays
  // open.
  unsigned const version = parser_ ? parser_->get().version() : 11;
  bool const is_head = parser_ && parser_->get().method() == http::verb::head;
  auto message = message_of(std::move(answer), {version, is_head, keep_alive_});
  beast::async_write(stream_, std::move(message), on(&connection::on_written));
}

void connection::on_written(error_code failure, std::size_t /*bytes*/) {
  disarm();
  if (failure) return close();
  record_.end();
  if (keep_alive_) return await_request();
  linger();
}

// Closing with unread bytes makes TCP reset the connection, which can take the answer away from the
// client again: say that nothing more comes, and read for a while what was on its way.
void connection::linger() {
  if (watched_) {  // it stays open no longer, after all
    error_code ignored;
    stream_.socket().cancel(ignored);
  }
  state_ = state_t::lingering;
  arm(linger_limit);
  if (stream_.is_encrypted()) return stream_.async_shutdown(on(&connection::on_shutdown));
  on_shutdown({});
}

// What TLS has said of it counts no more: all that comes is passed over.
void connection::on_shutdown(error_code /*failure*/) {
  if (timed_out_) return close();
  state_ = state_t::lingering;
  arm(linger_limit);
  error_code failure;
  stream_.socket().shutdown(net::ip::tcp::socket::shutdown_send, failure);
  if (failure) return close();
  on_lingered({}, 0);
}

void connection::on_lingered(error_code failure, std::size_t /*bytes*/) {
  if (failure || timed_out_) return close();
  buffer_.clear();
  stream_.socket().async_read_some(buffer_.prepare(std::size_t{64} << 10U),
                                   on(&connection::on_lingered));
}

void connection::close() {
  state_ = state_t::closed;
  record_.end(context_.registry.is_closed() ? "stopping" : timed_out_ ? "stalled" : "client_left");
  share_ = {};
  disarm();
  ++timer_round_;
  timer_.cancel();
  if (auto const left = std::exchange(ticket_, 0); left != 0) context_.service.cancel(left);
  if (auto const relayed = std::exchange(relay_, nullptr)) relayed->cancel();
  error_code ignored;
  if (is_read_elsewhere_) {
    stream_.socket().shutdown(net::ip::tcp::socket::shutdown_both, ignored);
  } else {
    stream_.socket().close(ignored);
  }
  context_.registry.remove(shared_from_this());
}

}  // namespace sluice::server
