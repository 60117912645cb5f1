#include "runtime/server/status_socket.hpp"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <boost/asio/post.hpp>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <string_view>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/socket_address.hpp"
#include "memhandover/base/system_error.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

constexpr int look_every_ms = 1000;
constexpr timeval patience{2, 0};
constexpr int backlog = 8;
constexpr std::size_t longest_line = 64;

void send_all(int fd, std::string_view text) {
  while (!text.empty()) {
    auto const sent = ::send(fd, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(sent));
  }
}

/// Without its newline; what came, if it is too long or the client waits.
std::string read_line(int fd) {
  std::string text;
  char next = 0;
  while (text.size() < longest_line && ::recv(fd, &next, 1, 0) == 1 && next != '\n') {
    text.push_back(next);
  }
  return text;
}

}  // namespace

status_socket::status_socket(std::string path, sources answers)
    : path_(std::move(path)), answers_(std::move(answers)), end_(::eventfd(0, EFD_CLOEXEC)) {
  try {
    if (!end_) throw memhandover::system_error("cannot make an eventfd");
    listen();
  } catch (error const& failure) {
    spdlog::warn("sluice status asks the endpoint instead of a socket reason={}",
                 telemetry::quoted(failure.what()));
    return;
  }
  thread_ = std::thread{[this] { serve(); }};
}

status_socket::~status_socket() {
  if (!thread_.joinable()) return;
  static_cast<void>(::eventfd_write(end_.get(), 1));
  thread_.join();
  askers_.join();
  if (inode() == own_inode_) ::unlink(path_.c_str());
}

std::uint64_t status_socket::inode() const {
  struct stat about {};
  return ::lstat(path_.c_str(), &about) == 0 ? about.st_ino : 0;
}

void status_socket::listen() {
  memhandover::unique_fd fresh{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  // Under another name first: whoever finds it can connect to it.
  auto const draft = path_ + "~";
  auto const address = memhandover::socket_address(draft);
  if (!address) {
    throw error{error_kind::invalid_argument,
                "the path of the runtime folder is too long for " + path_};
  }
  ::unlink(draft.c_str());
  if (!fresh ||
      ::bind(fresh.get(), reinterpret_cast<sockaddr const*>(&*address), sizeof(*address)) != 0 ||
      ::listen(fresh.get(), backlog) != 0 || std::rename(draft.c_str(), path_.c_str()) != 0) {
    throw memhandover::system_error("cannot listen on " + path_);
  }
  listening_ = std::move(fresh);
  own_inode_ = inode();
}

void status_socket::serve() {
  while (true) {
    std::array<pollfd, 2> events{{{end_.get(), POLLIN, 0}, {listening_.get(), POLLIN, 0}}};
    auto const ready = ::poll(events.data(), events.size(), look_every_ms);
    if (events[0].revents != 0) return;
    try {
      if (ready > 0) accept();
      if (inode() == 0) listen();
    } catch (std::exception const& failure) {
      spdlog::debug("sluice status got no answer reason={}", telemetry::quoted(failure.what()));
    }
  }
}

void status_socket::accept() {
  memhandover::unique_fd client{::accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
  if (!client) return;
  auto const shared = std::make_shared<memhandover::unique_fd>(std::move(client));
  boost::asio::post(askers_, [this, shared] { answer(shared->get()); });
}

void status_socket::answer(int client) const {
  ::setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  ::setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  auto const made = [&]() -> nlohmann::json {
    try {
      auto const wanted = read_line(client);
      auto const found = answers_.find(wanted);
      if (found == answers_.end()) {
        throw error{error_kind::unsupported, "this server does not know what '" + wanted + "' is"};
      }
      return found->second();
    } catch (...) {
      auto const why = caught_error();
      return {{"error", why.what()}, {"kind", static_cast<int>(why.kind())}};
    }
  }();
  send_all(client, made.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace sluice::server
