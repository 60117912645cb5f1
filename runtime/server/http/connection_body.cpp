// How a connection reads the body of a request: a small one on its thread, a large one where it is turned into tensors.

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <boost/beast/http/read.hpp>
#include <utility>

#include "runtime/server/http/connection_handlers.hpp"
#include "runtime/server/http/reply_message.hpp"
#include "runtime/server/http/request_head.hpp"

namespace sluice::server {

namespace net = boost::asio;
namespace http = boost::beast::http;

namespace {

/// Of a large body: what is taken from the kernel at once, and what before others have their turn.
constexpr std::size_t read_at_once = std::size_t{256} << 10U,
                      most_at_a_turn = std::size_t{1} << 20U;

}  // namespace

void connection::read_body() {
  if (parser_->is_done()) return answer_request();
  arm(context_.options.transfer_timeout);
  if (announces_large_body()) return read_large_body();
  if (!parser_->content_length()) return read_part();
  http::async_read(stream_, buffer_, *parser_, on(&connection::on_body));
}

void connection::read_part() {
  http::async_read_some(stream_, buffer_, *parser_, on(&connection::on_part));
}

/// Of a body that comes in chunks, so that nobody has said how large it is.
void connection::on_part(error_code failure, std::size_t bytes) {
  if (failure || parser_->is_done()) return on_body(failure, bytes);
  if (parser_->get().body().size() <= small_body) return read_part();
  if (!refuse_share()) read_large_body();
}

/// What has come of it, and then what comes. So long as its length is known nobody is woken for a few bytes of it.
void connection::read_large_body() {
  wake_for_rest();
  is_read_elsewhere_ = true;
  compute(
      [](connection& self) {
        auto const failure = self.take_what_is_there();
        self.post([failure](connection& own) { own.on_taken(failure); });
      },
      context_.bodies);
}

connection::error_code connection::take_what_is_there() {
  parser_->eager(true);
  for (std::size_t taken = 0;;) {
    error_code failure;
    if (buffer_.size() > 0) {
      buffer_.consume(parser_->put(buffer_.data(), failure));
      if (failure && failure != http::error::need_more) return failure;
    }
    if (parser_->is_done() || taken >= most_at_a_turn) return {};
    auto const bytes = stream_.read_now(buffer_.prepare(read_at_once), failure);
    if (failure == net::error::eof) {
      failure = {};
      parser_->put_eof(failure);
    }
    if (failure) return failure;
    buffer_.commit(bytes);
    taken += bytes;
  }
}

void connection::on_taken(error_code failure) {
  is_read_elsewhere_ = false;
  timed_out_ = timed_out_ && !parser_->is_done();  // it has come by then
  if (timed_out_) failure = net::error::operation_aborted;
  bool const waits = failure == net::error::would_block;
  if ((failure && !waits) || parser_->is_done()) {
    if (buffer_.size() == 0) buffer_.shrink_to_fit();
    return on_body(failure, 0);
  }
  if (refuse_share()) return;
  if (!waits) return read_large_body();
  wake_for_rest();
  stream_.socket().async_wait(net::ip::tcp::socket::wait_read, on(&connection::on_more));
}

void connection::wake_for_rest() {
  if (auto const left = parser_->content_length_remaining()) {
    stream_.wake_for(std::min<std::uint64_t>(most_at_a_turn, *left));
  }
}

void connection::on_more(error_code failure) {
  if (failure) return on_body(failure, 0);
  read_large_body();
}

void connection::on_body(error_code failure, std::size_t /*bytes*/) {
  disarm();
  stream_.wake_for(1);
  if (failure) return read_failed(failure);
  answer_request();
}

void connection::read_failed(error_code failure) {
  if (timed_out_) {
    return respond(oip_api::failure(408, fmt::format("the request did not arrive within {}",
                                                     context_.options.transfer_timeout)),
                   false);
  }
  auto refusal = refuse_unread(failure, context_.options);
  if (!refusal) return close();
  respond(std::move(*refusal), false);
}

bool connection::announces_large_body() const {
  return parser_->content_length().value_or(0) > small_body;
}

/// It counts as what has come, so that who announces one and sends nothing takes no room, and is not refused for what others take.
bool connection::refuse_share() {
  auto const bytes = parser_->get().body().size();
  if (bytes <= small_body || bytes == share_.bytes()) return false;
  auto refusal = take_share(bytes);
  if (!refusal) return false;
  disarm();
  stream_.wake_for(1);
  respond(std::move(*refusal), false);
  return true;
}

std::optional<http_reply> connection::take_share(std::uint64_t body_bytes) {
  if (share_.grow(context_.waiting_body_bytes, context_.options.max_waiting_body_bytes,
                  body_bytes)) {
    return std::nullopt;
  }
  return oip_api::failure(503, too_many_large_bodies);
}

}  // namespace sluice::server
