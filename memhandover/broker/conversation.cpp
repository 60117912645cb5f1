#include "memhandover/broker/conversation.hpp"

#include <poll.h>

#include "memhandover/base/waiting.hpp"

namespace sluice::memhandover {

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

void add_identity(nlohmann::json& body, process_identity const& who) {
  body.update({{"pid", who.pid}, {"start", who.start_ticks}, {"pid_namespace", who.pid_namespace}});
}

process_identity identity_in(nlohmann::json const& body) {
  return {field(body, "pid", 0), field(body, "start", std::uint64_t{0}),
          field(body, "pid_namespace", std::uint64_t{0})};
}

nlohmann::json refusal(error const& why) {
  return {{"type", "error"}, {"kind", static_cast<int>(why.kind())}, {"message", why.what()}};
}

namespace {

/// The answer if it is of that type; throws what a refusal tells.
message checked(std::optional<message> answer, std::string const& type) {
  if (!answer) {
    throw unanswered{"the other side of the pool's socket ended unexpectedly"};
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

}  // namespace

message expect(int socket, std::string const& type) {
  return checked(receive_message(socket, answer_timeout_ms), type);
}

message ask(int socket, nlohmann::json const& question, std::string const& type,
            std::vector<int> const& descriptors) {
  try {
    send_message(socket, question, descriptors);
  } catch (error const& unheard) {
    if (unheard.kind() != error_kind::unavailable) {
      throw;
    }
    if (is_ready(socket, POLLIN)) {
      (void)checked(receive_message(socket, 0), type);  // throws the reason if one was given
    }
    throw unanswered{unheard.what()};
  }
  return expect(socket, type);
}

begun_conversation ask_broker(broker_options const& options, nlohmann::json const& question,
                              std::string const& type, std::vector<int> const& descriptors) {
  constexpr int most_ending = 10;
  for (int ending = 1;; ++ending) {
    auto connection = ensure_broker(options);
    try {
      auto answer = ask(connection.get(), question, type, descriptors);
      return {std::move(connection), std::move(answer)};
    } catch (unanswered const&) {
      if (ending == most_ending) {
        throw;
      }
    }
  }
}

std::size_t rejoin_descriptors(nlohmann::json const& rejoin) {
  // ledger, mailroom, manifest, doorbell, bell, life pipe
  constexpr std::size_t of_the_pool = 6;
  return of_the_pool + (rejoin.contains("copy_holder") ? 2 : 0) +
         (rejoin.contains("copy_holder") && rejoin.contains("copy_disk") ? 1 : 0);
}

host_copy_files copy_files_in(std::vector<unique_fd>& descriptors, std::size_t first,
                              bool with_disk) {
  return {std::move(descriptors.at(first)), std::move(descriptors.at(first + 1)),
          with_disk ? std::move(descriptors.at(first + 2)) : unique_fd{}};
}

}  // namespace sluice::memhandover
