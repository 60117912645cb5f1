#include "memhandover/membership.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "memhandover/descriptor_limit.hpp"
#include "memhandover/error.hpp"

namespace sluice::memhandover {
namespace {

constexpr int answer_timeout_ms =
    70'000;  // a broker may first have to create the chunks of a whole GPU

message expect(int socket, std::string const& type) {
  auto answer = receive_message(socket, answer_timeout_ms);
  if (!answer) {
    throw error{error_kind::unavailable, "the broker ended while it was being joined"};
  }
  if (answer->body["type"] == "error") {
    auto const kind = answer->body.value("kind", static_cast<int>(error_kind::internal));
    throw error{static_cast<error_kind>(kind),
                answer->body.value("message", std::string{"the broker refused"})};
  }
  if (answer->body["type"] != type) {
    throw error{error_kind::internal, "the broker answered " +
                                          answer->body["type"].get<std::string>() + " where " +
                                          type + " was due"};
  }
  return std::move(*answer);
}

}  // namespace

membership::membership(broker_options broker, client_kind kind, std::string const& name,
                       std::string const& endpoint)
    : broker_(std::move(broker)), kind_(kind) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot create the life pipe: "} + std::strerror(errno)};
  }
  life_read_ = unique_fd{ends[0]};
  life_write_ = unique_fd{ends[1]};
  socket_ = ensure_broker(broker_);
  send_message(socket_.get(),
               {{"type", "join"},
                {"version", protocol_version},
                {"kind", kind == client_kind::server ? "server" : "training"},
                {"name", name},
                {"endpoint", endpoint}},
               {life_read_.get()});
  auto joined = expect(socket_.get(), "joined");
  constexpr std::size_t joined_descriptors = 4;
  if (joined.descriptors.size() != joined_descriptors) {
    throw error{error_kind::internal, "the broker's answer came without its four descriptors"};
  }
  slot_ = joined.body.at("slot").get<std::uint32_t>();
  files_.ledger = std::move(joined.descriptors[0]);
  files_.mailroom = std::move(joined.descriptors[1]);
  files_.doorbell = std::move(joined.descriptors[2]);
  bell_ = std::move(joined.descriptors[3]);
  auto const expected = joined.body.at("chunk_descriptors").get<std::size_t>();
  make_room_for_descriptors(expected);
  while (files_.chunks.size() < expected) {
    auto batch = expect(socket_.get(), "chunks");
    std::move(batch.descriptors.begin(), batch.descriptors.end(),
              std::back_inserter(files_.chunks));
  }
  auto const access = kind == client_kind::server ? shared_segment::access::read_write
                                                  : shared_segment::access::read_only;
  view_.emplace(files_.ledger.get(), files_.mailroom.get(), access);
}

std::optional<message> membership::receive() {
  try {
    if (auto received = receive_message(socket_.get())) {
      return received;
    }
  } catch (error const&) {
    // Treated like the end of the conversation: what it says could not be trusted.
  }
  socket_.reset();
  return std::nullopt;
}

void membership::tell(nlohmann::json const& body) {
  if (!socket_) {
    return;
  }
  try {
    send_message(socket_.get(), body);
  } catch (error const&) {
    socket_.reset();
  }
}

bool membership::reconnect() {
  try {
    auto socket = ensure_broker(broker_);
    send_message(socket.get(),
                 {{"type", "rejoin"},
                  {"version", protocol_version},
                  {"pool_id", view_->header().pool_id},
                  {"slot", slot_},
                  {"chunk_descriptors", files_.chunks.size()}},
                 {files_.ledger.get(), files_.mailroom.get(), files_.doorbell.get(), bell_.get(),
                  life_read_.get()});
    auto answer = receive_message(socket.get(), answer_timeout_ms);
    if (answer && answer->body["type"] == "send_chunks") {
      send_chunks(socket.get(), files_.chunks);
      answer = receive_message(socket.get(), answer_timeout_ms);
    }
    if (!answer || answer->body["type"] != "rejoined") {
      return false;
    }
    socket_ = std::move(socket);
    return true;
  } catch (std::exception const&) {
    return false;
  }
}

}  // namespace sluice::memhandover
