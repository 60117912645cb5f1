#include "runtime/server/engines/kept_connections.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace sluice::server {
namespace {

/// What comes on a connection without a request is either its end or nobody's answer.
bool is_alive(int socket) {
  char byte = 0;
  return ::recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
         (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace

engine_connection kept_connections::take(clock::time_point now) {
  while (!idle_.empty()) {
    auto last = std::move(idle_.back());
    idle_.pop_back();
    auto const idle = now - last.since;
    if (idle >= longest_) {  // so have all before it
      idle_.clear();
      break;
    }
    if (is_alive(last.socket.get())) return {std::move(last.socket), run_};
    longest_ = std::min(longest_, idle / 2);
  }
  return {{}, run_};
}

void kept_connections::keep(engine_connection which, clock::time_point now) {
  if (which.run != run_ || !which.socket || most_ == 0) return;
  if (idle_.size() >= most_) idle_.pop_front();
  idle_.push_back({std::move(which.socket), now});
}

void kept_connections::drop() {
  idle_.clear();
  ++run_;
  longest_ = longest_idle;
}

void kept_connections::close_old(clock::time_point now) {
  while (!idle_.empty() && now - idle_.front().since >= longest_) idle_.pop_front();
}

std::optional<kept_connections::clock::time_point> kept_connections::next_end() const {
  if (idle_.empty()) return std::nullopt;
  return idle_.front().since + longest_;
}

}  // namespace sluice::server
