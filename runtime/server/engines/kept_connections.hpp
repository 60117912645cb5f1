/// Connections to an engine that wait between two requests: HTTP/1.1's persistent ones (RFC 9112 section 9.3).
///
///   kept_connections kept{64};
///   auto found = kept.take(now);              // its socket is empty: a new one is needed
///   kept.keep(std::move(found), now);         // the answer is over, and all of it has been read
///   kept.drop();                          // the engine ends, or is parked: none may be used again
///
/// One is given out if it is alive: nothing has come on it, no end either, since it was put here. It stays for `longest_idle` at most,
/// which is less than what servers usually wait before they close one. An engine that closes them earlier is seen to do so, and from
/// then on they stay half as long as that one did: so the moment in which a request meets a close is not met again and again.
///
/// Not thread-safe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

class kept_connections {
 public:
  using clock = std::chrono::steady_clock;

  /// uvicorn and Node.js wait for 5 s, most others for longer.
  static constexpr std::chrono::milliseconds longest_idle{4'000};

  explicit kept_connections(std::size_t most) : most_(most) {}

  /// The one that was used last, of those that are alive.
  [[nodiscard]] engine_connection take(clock::time_point now);
  /// Unless it is of before a `drop`; beyond `most` the one that was used longest ago is closed.
  void keep(engine_connection which, clock::time_point now);
  void drop();
  /// Closes those whose time is over.
  void close_old(clock::time_point now);
  /// When one has to be closed; nothing: there are none.
  [[nodiscard]] std::optional<clock::time_point> next_end() const;

  [[nodiscard]] std::size_t size() const noexcept { return idle_.size(); }

 private:
  struct idle_one {
    memhandover::unique_fd socket;
    clock::time_point since;
  };

  std::size_t const most_;
  std::deque<idle_one> idle_;  ///< who was used last is at the end
  std::uint64_t run_ = 1;
  clock::duration longest_ = longest_idle;
};

}  // namespace sluice::server
