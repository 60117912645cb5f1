#include "runtime/server/grpc/rpc_call.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <exception>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/server/grpc/inference.pb.h"
#include "runtime/server/grpc/message_buffer.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "runtime/server/http/reply_message.hpp"
#include "runtime/server/http/submission.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {

namespace net = boost::asio;

namespace {

constexpr std::string_view shutting_down = "the server is shutting down";

/// Without the service's path; another service's whole path.
std::string name_of(std::string_view path) {
  if (path.starts_with('/')) path.remove_prefix(1);
  if (path.starts_with(grpc_service_path)) path.remove_prefix(grpc_service_path.size());
  return std::string{path};
}

/// "127.0.0.1:5000" of gRPC's "ipv4:127.0.0.1:5000", "[::1]:5000" of "ipv6:%5B::1%5D:5000".
std::string peer_of(std::string text) {
  text.erase(0, text.find(':') + 1);
  for (auto const& [from, to] : {std::pair{"%5B", "["}, std::pair{"%5D", "]"}}) {
    if (auto const at = text.find(from); at != std::string::npos) text.replace(at, 3, to);
  }
  return text;
}

std::string_view metadata_of(grpc::GenericCallbackServerContext const& asked, char const* name) {
  auto const& all = asked.client_metadata();
  auto const found = all.find(name);
  if (found == all.end()) return {};
  return {found->second.data(), found->second.size()};
}

/// As much of it as gRPC's clients take: they have a limit for what surrounds messages, and most characters beyond ASCII are three there.
std::string cut(std::string const& reason) {
  constexpr std::size_t most = 6000;
  std::size_t cost = 0, end = 0;
  for (char const each : reason) {
    cost += each < ' ' || each > '~' || each == '%' ? 3 : 1;
    if (cost > most) break;
    ++end;
  }
  if (end == reason.size()) return reason;
  while (end > 0 && (static_cast<unsigned char>(reason[end]) & 0xC0U) == 0x80U) --end;
  return reason.substr(0, end) + " …";
}

grpc::Status status_of(call_reply const& reply) {
  return {static_cast<grpc::StatusCode>(grpc_code_of(reply.status)), cut(reply.reason)};
}

/// Of a refusal that no kind of error stands for.
call_reply refusal(unsigned status, std::string_view reason) {
  return failed_call(oip_api::failure(status, reason));
}

/// Nothing: it has none.
std::optional<std::chrono::microseconds> time_left(std::chrono::system_clock::time_point deadline) {
  if (deadline == std::chrono::system_clock::time_point::max()) return std::nullopt;
  constexpr std::chrono::microseconds least{1}, most = std::chrono::hours{24 * 365};
  return std::clamp(std::chrono::duration_cast<std::chrono::microseconds>(
                        deadline - std::chrono::system_clock::now()),
                    least, most);
}

}  // namespace

rpc_call::rpc_call(grpc::GenericCallbackServerContext& asked, grpc_context& context)
    : asked_(asked),
      context_(context),
      name_(name_of(asked.method())),
      is_stream_(name_ == stream_call),
      deadline_(asked.deadline()) {}

// ---- the call

void rpc_call::start() {
  std::lock_guard const lock{mutex_};
  self_ = shared_from_this();
  if (auto const reply = refuse()) return fail(*reply);
  read_on();
}

std::optional<call_reply> rpc_call::refuse() {
  if (!is_call(name_)) {
    return refusal(501, fmt::format("there is no call '{}'; this server answers those of {}", name_,
                                    grpc_service_path));
  }
  if (context_.options.security && !is_public_call(name_)) {
    auto const now = context_.options.security->current();
    auto const given = asked_.client_metadata().count("authorization");
    bool const is_known =
        given == 1 && now->tokens && now->tokens->allow(metadata_of(asked_, "authorization"));
    if (now->tokens && !is_known) {
      auto reply = refusal(401, refusal_without_token(given != 0));
      reply.cause = "token";
      return reply;
    }
  }
  if (context_.registry.is_closed()) return refusal(503, shutting_down);
  if (!context_.registry.add(self_, context_.options.max_calls)) {
    return refusal(503, fmt::format("all {} calls of the server are in use; try again later",
                                    context_.options.max_calls));
  }
  return std::nullopt;
}

void rpc_call::drain() {
  std::lock_guard const lock{mutex_};
  write_on();
}

void rpc_call::end_if_stalled(clock::time_point now) {
  std::lock_guard const lock{mutex_};
  auto const limit = context_.options.transfer_timeout;
  if (is_finished_ || is_stream_ || !reading_ || now - begin_ < limit) return;
  auto reply = refusal(408, fmt::format("the message did not arrive within {}", limit));
  reply.cause = "stalled";
  fail(reply);
}

void rpc_call::OnReadDone(bool ok) {
  exchange_ptr one;
  grpc::ByteBuffer message;
  {
    std::lock_guard const lock{mutex_};
    reading_ = false;
    if (is_finished_) return;
    if (!ok) {
      is_at_end_ = true;
      return is_stream_ ? write_on() : fail(refusal(400, "the call has no message"));
    }
    one = new_exchange();
    one->entry.bytes_in = incoming_.Length();
    exchanges_.push_back(one);
    handling_ = true;
    message.Swap(&incoming_);
  }
  auto const bytes = message.Length();
  if (may_take_long(name_)) {
    return context_.changes.post(
        [self = shared_from_this(), one, message]() mutable { self->handle(one, message); });
  }
  if (bytes <= small_body) return handle(one, message);
  if (!one->share.grow(context_.waiting_bytes, context_.options.max_waiting_bytes, bytes)) {
    answer(one, refusal(503, "too many large bodies are being read; try again later"));
    return handled(one);
  }
  net::post(context_.bodies,
            [self = shared_from_this(), one, message]() mutable { self->handle(one, message); });
}

void rpc_call::OnWriteDone(bool ok) {
  exchange_ptr one;
  std::lock_guard const lock{mutex_};
  writing_ = false;
  one = exchanges_.front();
  exchanges_.pop_front();
  log(one->entry, ok ? "" : "client_left");
  if (is_finished_) return;
  if (!ok) return finish(grpc::Status::CANCELLED);
  write_on();
  read_on();
}

void rpc_call::OnCancel() {
  std::vector<request_ticket> left;
  {
    std::lock_guard const lock{mutex_};
    for (auto const& each : exchanges_) {
      if (each->ticket != 0) left.push_back(std::exchange(each->ticket, 0));
    }
    if (!is_finished_) finish(grpc::Status::CANCELLED);
  }
  for (auto const each : left) context_.service.cancel(each);
}

void rpc_call::OnDone() {
  std::shared_ptr<rpc_call> self;
  std::string_view const cause = !asked_.IsCancelled()           ? ""
                                 : context_.registry.is_closed() ? "stopping"
                                                                 : "client_left";
  {
    std::lock_guard const lock{mutex_};
    for (auto const& each : exchanges_) log(each->entry, cause);
    exchanges_.clear();
    self = std::move(self_);
  }
  context_.registry.remove(this);
}

void rpc_call::read_on() {
  bool const has_room = exchanges_.size() < (is_stream_ ? most_in_flight : 1);
  if (is_finished_ || reading_ || handling_ || is_at_end_ || !has_room) return;
  if (context_.registry.is_closed()) return;
  reading_ = true;
  StartRead(&incoming_);
}

void rpc_call::write_on() {
  if (is_finished_ || writing_) return;
  if (exchanges_.empty()) {
    if (!is_stream_) return;
    if (is_at_end_) return finish(grpc::Status::OK);
    if (context_.registry.is_closed()) finish(status_of(refusal(503, shutting_down)));
    return;
  }
  auto& next = *exchanges_.front();
  if (!next.is_answered) return;
  if (next.refusal) return fail(*next.refusal);
  if (is_stream_) {
    writing_ = true;
    return StartWrite(&next.message);
  }
  is_finished_ = true;
  StartWriteAndFinish(&next.message, grpc::WriteOptions{}, grpc::Status::OK);
}

void rpc_call::fail(call_reply const& reply) {
  if (exchanges_.empty()) exchanges_.push_back(new_exchange());
  auto& entry = exchanges_.front()->entry;
  entry.status = reply.status;
  if (entry.cause.empty()) entry.cause = reply.cause.empty() ? "refused" : reply.cause;
  if (reply.retry_after.count() > 0) {
    asked_.AddTrailingMetadata("retry-after", std::to_string(reply.retry_after.count()));
  }
  finish(status_of(reply));
}

void rpc_call::finish(grpc::Status const& status) {
  is_finished_ = true;
  Finish(status);
}

// ---- its requests

rpc_call::exchange_ptr rpc_call::new_exchange() const {
  auto one = std::make_shared<exchange>();
  one->entry.begin = is_stream_ ? clock::now() : begin_;
  if (!context_.options.accesses) return one;
  one->entry.peer = peer_of(asked_.peer());
  one->entry.method = "POST";  // as gRPC has it
  one->entry.path = asked_.method();
  one->entry.id = metadata_of(asked_, "x-request-id");
  return one;
}

void rpc_call::log(access_entry& entry, std::string_view cause) const {
  if (!context_.options.accesses) return;
  if (entry.cause.empty()) entry.cause = cause;
  entry.total = clock::now() - entry.begin;
  context_.options.accesses->write(std::move(entry));
}

void rpc_call::handle(exchange_ptr const& one, grpc::ByteBuffer& message) {
  try {
    if (is_stream_ || name_ == infer_call) {
      infer(one, message);
    } else {
      received_message const received{message, context_.options.max_message_bytes};
      answer(one, received.is_too_large() ? too_large()
                                          : answer_call(context_.api, name_, received.joined()));
    }
  } catch (error const& failure) {
    answer(one, failed_call(oip_api::from_error(failure)));
  } catch (std::exception const& failure) {
    answer(one, failed_call(oip_api::from_error({error_kind::internal, failure.what()})));
  }
  handled(one);
}

call_reply rpc_call::too_large() const {
  return refusal(413, fmt::format("decompressed the message is larger than the {} bytes that this "
                                  "server takes",
                                  context_.options.max_message_bytes));
}

void rpc_call::handled(exchange_ptr const& one) {
  std::lock_guard const lock{mutex_};
  one->share = {};
  handling_ = false;
  read_on();
}

void rpc_call::infer(exchange_ptr const& one, grpc::ByteBuffer& message) {
  auto const arrival = clock::now();
  infer_message asked;
  {
    received_message const received{message, context_.options.max_message_bytes};
    if (received.is_too_large()) return answer(one, too_large());
    asked = read_infer_request(received.parts());
  }
  message.Clear();
  {
    std::lock_guard const lock{mutex_};
    one->id = asked->id();
    one->entry.model = asked->model_name();
    one->entry.version = asked->model_version();
    if (!one->id.empty()) one->entry.id = one->id;
  }
  auto request = decode_infer_request(
      asked, context_.service.metadata(asked->model_name(), asked->model_version()));
  request.arrival = arrival;
  if (auto const left = time_left(deadline_)) {
    request.timeout = std::min(request.timeout.value_or(*left), *left);
  }
  auto const ticket = submit(
      context_.service, std::move(request),
      [life = context_.life, call = weak_from_this(), one](infer_result result) {
        std::lock_guard const lock{life->mutex};
        auto const target = life->alive ? call.lock() : nullptr;
        if (!target) return;
        auto& context = target->context_;
        net::post(is_large(result, {.binary = true}) ? context.bodies : context.answers,
                  [target, one, result = std::move(result)] { target->on_result(one, result); });
      });
  {
    std::lock_guard const lock{mutex_};
    if (one->is_answered) return;
    if (!is_finished_) {
      one->ticket = ticket;
      return;
    }
  }
  context_.service.cancel(ticket);
}

void rpc_call::on_result(exchange_ptr const& one, infer_result const& result) {
  try {
    if (auto const* const failure = std::get_if<error>(&result)) throw *failure;
    auto const& response = std::get<infer_response>(result);
    {
      std::lock_guard const lock{mutex_};
      one->entry.version = response.version;
      one->entry.times = response.times;
    }
    answer(one, is_stream_ ? encode_stream_message(response) : encode_infer_message(response));
  } catch (error const& failure) {
    answer(one, failed_call(oip_api::from_error(failure, one->id)));
  } catch (std::exception const& failure) {
    answer(one, failed_call(oip_api::from_error({error_kind::internal, failure.what()}, one->id)));
  }
}

void rpc_call::answer(exchange_ptr const& one, call_reply reply) {
  if (reply.status == 200) return answer(one, pieces_of(reply.message));
  if (is_stream_) {
    {
      std::lock_guard const lock{mutex_};
      one->entry.status = reply.status;
      one->entry.cause = reply.cause.empty() ? "refused" : reply.cause;
    }
    return answer(one, encode_stream_error(reply.reason, one->id));
  }
  std::lock_guard const lock{mutex_};
  one->ticket = 0;
  one->refusal = std::move(reply);
  one->is_answered = true;
  write_on();
}

void rpc_call::answer(exchange_ptr const& one, message_pieces const& pieces) {
  auto message = buffer_of(pieces);
  std::lock_guard const lock{mutex_};
  one->ticket = 0;
  one->entry.bytes_out = message.Length();
  if (one->entry.status == 0) one->entry.status = 200;
  one->message.Swap(&message);
  one->is_answered = true;
  write_on();
}

}  // namespace sluice::server
