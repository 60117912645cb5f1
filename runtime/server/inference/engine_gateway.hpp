/// What the endpoint asks of who keeps engines: inference servers of their own, to which requests are relayed. Neither side
/// knows the other's insides.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "memhandover/base/error.hpp"

namespace sluice::server {

/// Where an engine listens: on a Unix socket, or where that is empty on a port of 127.0.0.1.
struct engine_address {
  std::string socket;
  std::uint16_t port = 0;
};

/// Where a request may be sent, or why not.
using engine_admission = std::variant<engine_address, error>;
/// Names a request from `enter` on; none has 0.
using engine_ticket = std::uint64_t;

/// How a request of an engine has ended.
enum class relay_outcome {
  answered,     ///< with the engine's answer, whatever its status
  refused,      ///< without having reached it
  failed,       ///< the engine has broken off, or was silent for too long
  client_left,  ///< or took nothing for too long
};

struct relay_report {
  relay_outcome outcome = relay_outcome::answered;
  /// From the request's arrival to the first byte of its answer; nothing: there was none.
  std::optional<std::chrono::nanoseconds> until_answer = std::nullopt;
  /// Its connection has ended before its answer: it may have, too.
  bool engine_has_left = false;
};

struct engine_limits {
  std::chrono::microseconds until_answer{};  ///< from a request's arrival to the head of its answer
  std::chrono::microseconds silence{};       ///< of both sides within an answer
};

/// Thread-safe.
class engine_gateway {
 public:
  engine_gateway() = default;
  engine_gateway(engine_gateway const&) = delete;
  engine_gateway& operator=(engine_gateway const&) = delete;
  engine_gateway(engine_gateway&&) = delete;
  engine_gateway& operator=(engine_gateway&&) = delete;
  virtual ~engine_gateway() = default;

  /// The engine whose request that target is; nothing: it is none's. Throws `invalid_argument` for a target that might mean another
  /// path to the engine than here.
  [[nodiscard]] virtual std::optional<std::size_t> find(std::string_view target) const = 0;
  /// As the policy has it, for who reads messages.
  [[nodiscard]] virtual std::string const& name_of(std::size_t engine) const = 0;
  [[nodiscard]] virtual engine_limits limits_of(std::size_t engine) const = 0;
  /// Asks for a place at the engine, which is started if it is not. `admitted` is called once for that, on any thread and perhaps before this
  /// returns, unless `leave` comes first; it must not call the gateway. Each request that has entered must leave.
  virtual engine_ticket enter(std::size_t engine,
                              std::function<void(engine_admission)> admitted) = 0;
  /// Nobody listens where it was sent to: it waits again, before others, and `admitted` is called again.
  virtual void send_back(engine_ticket which) = 0;
  /// It has ended, or waits no longer.
  virtual void leave(engine_ticket which, relay_report const& report) = 0;
};

}  // namespace sluice::server
