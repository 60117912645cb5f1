#include "runtime/server/http/request_record.hpp"

#include <fmt/format.h>

#include <utility>
#include <variant>

namespace sluice::server {
namespace {

std::string text_of(boost::beast::string_view text) {
  return {text.data(), text.size()};
}

/// Of a refusal that no kind of error stands for.
std::string_view cause_of(unsigned status) {
  switch (status) {
    case 400:
      return "malformed";
    case 401:
      return "token";
    case 408:
      return "stalled";
    default:
      return status < 400 ? "" : "refused";
  }
}

}  // namespace

request_record::request_record(std::shared_ptr<access_log> log,
                               boost::asio::ip::tcp::socket const& socket)
    : log_(std::move(log)) {
  boost::system::error_code failure;
  if (!log_) return;
  auto const peer = socket.remote_endpoint(failure);
  auto const host = failure ? "?" : peer.address().to_string();
  peer_ = fmt::format("{}:{}", host.find(':') == std::string::npos ? host : '[' + host + ']',
                      failure ? 0 : peer.port());
}

void request_record::begin() {
  if (!log_) return;
  entry_.emplace();
  entry_->peer = peer_;
  entry_->begin = std::chrono::steady_clock::now();
}

void request_record::set_head(request_head const& head) {
  if (!entry_) return;
  entry_->method = text_of(head.method_string());
  auto const target = text_of(head.target());
  entry_->path = target.substr(0, target.find_first_of("?#"));
  entry_->id = text_of(head["X-Request-Id"]);
}

void request_record::set_body(std::uint64_t bytes) {
  if (entry_) entry_->bytes_in = bytes;
}

void request_record::set_label(request_label label) {
  if (!entry_) return;
  entry_->model = std::move(label.model);
  entry_->version = std::move(label.version);
  if (!label.id.empty()) entry_->id = std::move(label.id);
}

void request_record::set_result(infer_result const& result) {
  if (!entry_) return;
  if (auto const* const failure = std::get_if<error>(&result)) {
    entry_->cause = to_string(failure->kind());
    return;
  }
  auto const& response = std::get<infer_response>(result);
  entry_->version = response.version;
  entry_->times = response.times;
}

void request_record::set_reply(http_reply const& reply) {
  if (!entry_) return;
  entry_->status = reply.status;
  entry_->bytes_out = reply.body.size();
  for (auto const& each : reply.tensors) entry_->bytes_out += each.size();
  if (!reply.cause.empty()) entry_->cause = reply.cause;
  if (entry_->cause.empty()) entry_->cause = cause_of(reply.status);
}

void request_record::set_relayed(relay_end const& end) {
  if (!entry_) return;
  entry_->status = end.status;
  entry_->cause = end.cause;
  entry_->bytes_in = end.bytes_in;
  entry_->bytes_out = end.bytes_out;
}

void request_record::end(std::string_view cause) {
  if (!entry_) return;
  if (entry_->cause.empty()) entry_->cause = cause;
  entry_->total = std::chrono::steady_clock::now() - entry_->begin;
  log_->write(*std::exchange(entry_, std::nullopt));
}

}  // namespace sluice::server
