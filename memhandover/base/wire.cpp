#include "memhandover/base/wire.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/socket_address.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/waiting.hpp"
#include "posix/process_facts.hpp"

namespace sluice::memhandover {
namespace {

using clock = std::chrono::steady_clock;

constexpr std::size_t max_message_bytes = 128U << 10U;
/// How long the other side may leave its end of a full socket alone.
constexpr std::chrono::milliseconds send_patience{2000};

[[nodiscard]] std::string reason() {
  return std::strerror(errno);
}

/// Of descriptors that travel with a message; not written to before they do.
struct control_space {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * max_descriptors)> bytes;
  control_space() {}  // NOLINT(cppcoreguidelines-pro-type-member-init,modernize-use-equals-default)
};

/// Of this thread, kept: as much as a message may have would have to be written to each time.
std::span<char> receiving_space() {
  thread_local auto const space = std::make_unique_for_overwrite<char[]>(max_message_bytes);
  return {space.get(), max_message_bytes};
}

std::vector<unique_fd> descriptors_in(msghdr& header) {
  std::vector<unique_fd> found;
  for (auto* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level == SOL_SOCKET && part->cmsg_type == SCM_RIGHTS) {
      std::vector<int> numbers((part->cmsg_len - CMSG_LEN(0)) / sizeof(int));
      std::memcpy(numbers.data(), CMSG_DATA(part), numbers.size() * sizeof(int));
      for (auto const fd : numbers) {
        found.push_back(beside_standard_streams(unique_fd{fd}));
      }
    }
  }
  return found;
}

error no_json() {
  return {error_kind::invalid_argument,
          "a message over the pool's socket is not a JSON object with a type"};
}

void take_apart(std::span<char const> text, message& into) {
  constexpr char first_of_text = ' ';
  auto const* const beside = reinterpret_cast<std::byte const*>(text.data());
  if (text[0] > 0 && text[0] < first_of_text) {
    into.form = text[0];
    into.bytes.assign(beside, beside + text.size());
    return;
  }
  auto const end = std::find(text.begin(), text.end(), '\0');
  if (end != text.end()) {
    into.bytes.assign(beside + (end - text.begin()) + 1, beside + text.size());
  }
  into.body = nlohmann::json::parse(text.begin(), end, nullptr, false);
  if (!into.body.is_object() || !into.body.contains("type") || !into.body["type"].is_string()) {
    throw no_json();
  }
}

arrival receive(int socket, int flags) {
  auto const space = receiving_space();
  iovec part{space.data(), space.size()};
  control_space control;
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes.data();
  header.msg_controllen = control.bytes.size();
  ssize_t received = 0;
  // A peer that goes without having heard all resets the connection; that is told once, before what it had said.
  bool reset = false;
  do {
    received = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC | flags);
  } while (received < 0 &&
           (errno == EINTR || (errno == ECONNRESET && !std::exchange(reset, true))));
  if (received < 0 && errno == EAGAIN && flags != 0) {
    return {};
  }
  message result;
  if (received >= 0) {
    result.descriptors = descriptors_in(header);
  }
  if (received == 0 || (received < 0 && errno == ECONNRESET)) {
    return {.received = std::nullopt, .has_ended = true};
  }
  if (received < 0) {
    throw error{error_kind::unavailable, "the pool's socket failed: " + reason()};
  }
  bool const none_left = std::any_of(result.descriptors.begin(), result.descriptors.end(),
                                     [](unique_fd const& fd) { return !fd; });
  result.lost_descriptors = none_left || ((header.msg_flags & MSG_CTRUNC) != 0 &&
                                          result.descriptors.size() < max_descriptors);
  if ((header.msg_flags & MSG_TRUNC) != 0 ||
      ((header.msg_flags & MSG_CTRUNC) != 0 && !result.lost_descriptors)) {
    throw error{error_kind::invalid_argument,
                "a message over the pool's socket is longer than any of ours"};
  }
  take_apart(space.first(static_cast<std::size_t>(received)), result);
  return {.received = std::move(result)};
}

ucred peer_of(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    throw error{error_kind::unavailable,
                "cannot tell who is at the other end of a socket: " + reason()};
  }
  return peer;
}

}  // namespace

bool try_send_message(int socket, nlohmann::json const& body, std::vector<int> const& descriptors,
                      std::span<std::byte const> bytes) {
  // A name in another encoding than UTF-8 must not keep a message back.
  auto const text = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  std::byte const end{};  // which the text does not hold
  std::array const parts{std::as_bytes(std::span{text}),
                         std::span{&end, std::size_t{bytes.empty() ? 0U : 1U}}, bytes};
  return try_send_plain(socket, parts, descriptors);
}

bool try_send_plain(int socket, std::span<std::span<std::byte const> const> parts,
                    std::vector<int> const& descriptors) {
  std::array<iovec, 4> vectors{};
  std::size_t whole = 0, used = 0;
  for (auto const& each : parts) {
    // An iovec is of what is written to, too. NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
    vectors.at(used++) = {const_cast<std::byte*>(each.data()), each.size()};
    whole += each.size();
  }
  if (whole > max_message_bytes || descriptors.size() > max_descriptors) {
    throw error{error_kind::internal, "a message of " + std::to_string(whole) + " bytes and " +
                                          std::to_string(descriptors.size()) +
                                          " descriptors is more than the pool's socket carries; " +
                                          std::to_string(max_message_bytes) + " and " +
                                          std::to_string(max_descriptors) + " are its limits"};
  }
  msghdr header{};
  header.msg_iov = vectors.data();
  header.msg_iovlen = used;
  control_space control;
  if (!descriptors.empty()) {
    auto const size = sizeof(int) * descriptors.size();
    control.bytes.fill(0);
    header.msg_control = control.bytes.data();
    header.msg_controllen = CMSG_SPACE(size);
    auto* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), size);
  }
  while (::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EAGAIN) {
      return false;
    }
    if (errno == ENOBUFS || errno == ENOMEM || errno == ETOOMANYREFS) {
      throw error{error_kind::out_of_memory, "a message cannot be sent: " + reason()};
    }
    if (errno != EINTR) {
      throw error{error_kind::unavailable,
                  "the other side of the pool's socket is gone: " + reason()};
    }
  }
  return true;
}

void send_message(int socket, nlohmann::json const& body, std::vector<int> const& descriptors,
                  std::span<std::byte const> bytes) {
  auto const until = clock::now() + send_patience;
  while (!try_send_message(socket, body, descriptors, bytes)) {
    if (!await_ready(socket, POLLOUT, until)) {
      throw error{error_kind::unavailable,
                  "the other side of the pool's socket has taken nothing for " +
                      std::to_string(send_patience.count()) + " ms"};
    }
  }
}

void send_chunks(int socket, std::span<unique_fd const> chunks) {
  for (std::size_t first = 0; first < chunks.size(); first += max_descriptors) {
    std::vector<int> batch;
    for (auto const& chunk :
         chunks.subspan(first, std::min(max_descriptors, chunks.size() - first))) {
      batch.push_back(chunk.get());
    }
    send_message(socket, {{"type", "chunks"}, {"first", first}}, batch);
  }
}

std::optional<message> receive_message(int socket, int timeout_ms) {
  if (timeout_ms >= 0 &&
      !await_ready(socket, POLLIN, clock::now() + std::chrono::milliseconds{timeout_ms})) {
    throw error{error_kind::unavailable,
                "no answer over the pool's socket within " + std::to_string(timeout_ms) + " ms"};
  }
  auto received = receive_what_came(socket);
  if (received && received->lost_descriptors) {
    throw error{error_kind::unavailable,
                "this process may not open as many files as the pool has descriptors; raise its "
                "limit (ulimit -n)"};
  }
  return received;
}

std::optional<message> receive_what_came(int socket) {
  auto came = receive(socket, 0).received;
  if (came && came->form != 0) {
    throw no_json();
  }
  return came;
}

arrival receive_any(int socket) {
  return receive(socket, 0);
}

arrival receive_if_there(int socket) {
  return receive(socket, MSG_DONTWAIT);
}

sockaddr_un broker_address(std::string const& runtime_dir) {
  auto const address = socket_address(runtime_dir + "/broker.sock");
  if (!address) {
    throw error{error_kind::invalid_argument,
                "the runtime folder's path " + runtime_dir +
                    " is too long for a socket; choose one under 90 characters with --runtime-dir"};
  }
  return *address;
}

std::optional<unique_fd> connect_to_broker(std::string const& runtime_dir) {
  auto const address = broker_address(runtime_dir);
  auto socket =
      beside_standard_streams(unique_fd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)});
  if (!socket) {
    throw system_error("cannot create a socket");
  }
  if (::connect(socket.get(), reinterpret_cast<sockaddr const*>(&address), sizeof address) != 0) {
    if (errno == ENOENT || errno == ENOTDIR || errno == ECONNREFUSED) {
      return std::nullopt;
    }
    auto const why = "cannot reach the broker in " + runtime_dir + ": " + reason();
    if (errno == EACCES) {
      throw error{error_kind::unavailable,
                  why + "; run `chmod 0600 " + shell_word(address.sun_path) + "`"};
    }
    throw error{error_kind::unavailable, why};
  }
  if (peer_uid(socket.get()) != ::geteuid()) {
    throw error{error_kind::invalid_argument,
                "the broker in " + runtime_dir + " belongs to another user"};
  }
  return socket;
}

unsigned peer_uid(int socket) {
  return peer_of(socket).uid;
}
int peer_pid(int socket) {
  return peer_of(socket).pid;
}

std::uint64_t process_start_ticks(int pid) {
  return posix::start_ticks_of(std::to_string(pid));
}

}  // namespace sluice::memhandover
