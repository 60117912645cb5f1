#include "memhandover/wire.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "memhandover/error.hpp"

namespace sluice::memhandover {
namespace {

constexpr std::size_t max_message_bytes = 128U << 10U;

[[nodiscard]] std::string reason() {
  return std::strerror(errno);
}

sockaddr_un address_of(std::string const& runtime_dir) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  auto const path = runtime_dir + "/broker.sock";
  if (path.size() >= sizeof address.sun_path) {
    throw error{error_kind::invalid_argument,
                "the runtime folder's path " + runtime_dir +
                    " is too long for a socket; choose one under 90 characters"};
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  return address;
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

void send_message(int socket, nlohmann::json const& body, std::vector<int> const& descriptors) {
  // A name in another encoding than UTF-8 must not keep a message back.
  auto text = body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > max_message_bytes || descriptors.size() > max_descriptors) {
    throw error{error_kind::internal, "a message of " + std::to_string(text.size()) +
                                          " bytes and " + std::to_string(descriptors.size()) +
                                          " descriptors is more than the pool's socket carries; " +
                                          std::to_string(max_message_bytes) + " and " +
                                          std::to_string(max_descriptors) + " are its limits"};
  }
  iovec part{text.data(), text.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * max_descriptors)> control{};
  if (!descriptors.empty()) {
    auto const bytes = sizeof(int) * descriptors.size();
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(bytes);
    auto* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), bytes);
  }
  while (::sendmsg(socket, &header, MSG_NOSIGNAL) < 0) {
    if (errno == EAGAIN) {
      pollfd ready{socket, POLLOUT, 0};
      if (::poll(&ready, 1, 2000) == 1) {
        continue;
      }
    }
    if (errno != EINTR) {
      throw error{error_kind::unavailable,
                  "the other side of the pool's socket is gone: " + reason()};
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
  if (timeout_ms >= 0) {
    pollfd ready{socket, POLLIN, 0};
    int const events = ::poll(&ready, 1, timeout_ms);
    if (events == 0 || (events < 0 && errno != EINTR)) {
      throw error{error_kind::unavailable,
                  "no answer over the pool's socket within " + std::to_string(timeout_ms) + " ms"};
    }
  }
  std::string text(max_message_bytes, '\0');
  iovec part{text.data(), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * max_descriptors)> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t received = 0;
  do {
    received = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);

  message result;
  if (received >= 0) {
    for (auto* part_header = CMSG_FIRSTHDR(&header); part_header != nullptr;
         part_header = CMSG_NXTHDR(&header, part_header)) {
      if (part_header->cmsg_level == SOL_SOCKET && part_header->cmsg_type == SCM_RIGHTS) {
        std::vector<int> numbers((part_header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        std::memcpy(numbers.data(), CMSG_DATA(part_header), numbers.size() * sizeof(int));
        for (auto const fd : numbers) {
          result.descriptors.emplace_back(fd);
        }
      }
    }
  }
  if (received == 0 || (received < 0 && errno == ECONNRESET)) {
    return std::nullopt;
  }
  if (received < 0) {
    throw error{error_kind::unavailable, "the pool's socket failed: " + reason()};
  }
  if ((header.msg_flags & MSG_CTRUNC) != 0 && result.descriptors.size() < max_descriptors) {
    throw error{error_kind::unavailable,
                "this process may not open as many files as the pool has descriptors; raise its "
                "limit (ulimit -n)"};
  }
  if ((header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    throw error{error_kind::invalid_argument,
                "a message over the pool's socket is longer than any of ours"};
  }
  text.resize(static_cast<std::size_t>(received));
  result.body = nlohmann::json::parse(text, nullptr, false);
  if (!result.body.is_object() || !result.body.contains("type") ||
      !result.body["type"].is_string()) {
    throw error{error_kind::invalid_argument,
                "a message over the pool's socket is not a JSON object with a type"};
  }
  return result;
}

std::string prepare_runtime_dir(std::string const& wanted) {
  auto from_environment = [](char const* name) {
    char const* value = std::getenv(name);
    return std::string{value == nullptr ? "" : value};
  };
  auto dir = wanted;
  if (dir.empty()) {
    dir = from_environment("SLUICE_RUNTIME_DIR");
  }
  if (dir.empty() && !from_environment("XDG_RUNTIME_DIR").empty()) {
    dir = from_environment("XDG_RUNTIME_DIR") + "/sluice";
  }
  if (dir.empty()) {
    dir = "/tmp/sluice-" + std::to_string(::geteuid());
  }
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) {
    throw error{error_kind::invalid_argument,
                "cannot create the runtime folder " + dir + ": " + reason() +
                    "; name a folder that you can write with --runtime-dir"};
  }
  struct stat status {};
  if (::lstat(dir.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    throw error{error_kind::invalid_argument, "the runtime folder " + dir + " is not a folder"};
  }
  if (status.st_uid != ::geteuid() || (status.st_mode & 077U) != 0) {
    throw error{error_kind::invalid_argument,
                "the runtime folder " + dir +
                    " must be yours with mode 0700; run `chmod 700` on it or choose another"};
  }
  return dir;
}

std::optional<unique_fd> connect_to_broker(std::string const& runtime_dir) {
  auto const address = address_of(runtime_dir);
  unique_fd socket{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
  if (!socket) {
    throw error{error_kind::unavailable, "cannot create a socket: " + reason()};
  }
  if (::connect(socket.get(), reinterpret_cast<sockaddr const*>(&address), sizeof address) != 0) {
    if (errno == ENOENT || errno == ECONNREFUSED) {
      return std::nullopt;
    }
    throw error{error_kind::unavailable,
                "cannot reach the broker in " + runtime_dir + ": " + reason()};
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
  std::ifstream file{"/proc/" + std::to_string(pid) + "/stat"};
  std::string line;
  if (!std::getline(file, line)) {
    return 0;
  }
  // The command name, field 2, may hold anything; fields are counted behind its closing
  // parenthesis.
  auto const close = line.rfind(')');
  if (close == std::string::npos) {
    return 0;
  }
  std::istringstream rest{line.substr(close + 1)};
  std::string field;
  constexpr int start_time = 22;
  for (int number = 3; number <= start_time; ++number) {
    rest >> field;
  }
  return std::strtoull(field.c_str(), nullptr, 10);
}

}  // namespace sluice::memhandover
