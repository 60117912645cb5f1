#include "memhandover/detail/conversation.hpp"

namespace sluice::memhandover::detail {

nlohmann::json wish_message(std::string const& type, broker_options const& options) {
  nlohmann::json body{{"type", type},
                      {"version", protocol_version},
                      {"backend", options.backend},
                      {"pool_bytes", options.pool_bytes},
                      {"chunk_bytes", options.chunk_bytes}};
  if (options.device) {
    body["device"] = *options.device;
  }
  return body;
}

nlohmann::json refusal(error const& why) {
  return {{"type", "error"}, {"kind", static_cast<int>(why.kind())}, {"message", why.what()}};
}

message expect(int socket, std::string const& type) {
  auto answer = receive_message(socket, answer_timeout_ms);
  if (!answer) {
    throw error{error_kind::unavailable, "the other side of the pool's socket ended unexpectedly"};
  }
  if (answer->body["type"] == "error") {
    auto const kind = field(answer->body, "kind", static_cast<int>(error_kind::internal));
    throw error{static_cast<error_kind>(kind),
                field(answer->body, "message", std::string{"the other side refused"})};
  }
  if (answer->body["type"] != type) {
    throw error{error_kind::internal, "the answer over the pool's socket was " +
                                          answer->body["type"].get<std::string>() + " where " +
                                          type + " was due"};
  }
  return std::move(*answer);
}

}  // namespace sluice::memhandover::detail
