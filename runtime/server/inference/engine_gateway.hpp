/// What the endpoint asks of who keeps engines: inference servers of their own, to which requests are relayed. Neither side
/// knows the other's insides.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"

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

/// A connection to an engine, between two requests or for a new one.
struct engine_connection {
  memhandover::unique_fd socket;  ///< empty: it is to be made
  std::uint64_t run = 0;  ///< of the engine; after its end or its parking it belongs to nobody
};

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
  /// It has failed when its answer had begun.
  bool is_broken_off = false;
};

/// Whose request it is, as far as its path says.
struct engine_route {
  enum class kind {
    path,  ///< that engine's
    model,  ///< as OpenAI's clients send it: of the engine whose model its body names, or about all of them
  };
  kind by = kind::path;
  std::size_t engine = 0;  ///< with `path`

  bool operator==(engine_route const&) const = default;
};

/// When tokens of a stream came, of those that have not been reported yet.
struct token_times {
  std::optional<std::chrono::nanoseconds> first = std::nullopt;  ///< after the request
  std::vector<std::chrono::nanoseconds> gaps{};                  ///< each after the one before it
};

struct engine_limits {
  std::chrono::microseconds until_answer{};  ///< from a request's arrival to the head of its answer
  std::chrono::microseconds silence{};       ///< of both sides within an answer
  bool keeps_connections = false;            ///< for the next request
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

  /// Whose request that target is; nothing: no engine's. Throws `invalid_argument` for a target that might mean another
  /// path to the engine than here.
  [[nodiscard]] virtual std::optional<engine_route> find(std::string_view target) const = 0;
  /// Whose model that is, of those that are found by name.
  [[nodiscard]] virtual std::optional<std::size_t> find_model(std::string_view name) const = 0;
  /// All of these names.
  [[nodiscard]] virtual std::vector<std::string> model_names() const = 0;
  /// A list of those models as OpenAI's clients read it: from the policy, and what engines said when they could be asked. None is
  /// woken or waited for.
  [[nodiscard]] virtual nlohmann::json models() const = 0;
  /// As the policy has it, for who reads messages.
  [[nodiscard]] virtual std::string const& name_of(std::size_t engine) const = 0;
  [[nodiscard]] virtual engine_limits limits_of(std::size_t engine) const = 0;
  /// Asks for a place at the engine, which is started if it is not. `admitted` is called once for that, on any thread and perhaps before this
  /// returns, unless `leave` comes first; it must not call the gateway. Each request that has entered must leave.
  virtual engine_ticket enter(std::size_t engine,
                              std::function<void(engine_admission)> admitted) = 0;
  /// A connection of an earlier request for this one, which is inside.
  virtual engine_connection reuse(engine_ticket which) = 0;
  /// The connection may serve the next request. Before the one that has used it leaves.
  virtual void keep(engine_ticket which, engine_connection connection) = 0;
  /// Of the answer of one that is inside, again and again while it comes.
  virtual void note_tokens(engine_ticket which, token_times const& came) = 0;
  /// Nobody listens where it was sent to: it waits again, before others, and `admitted` is called again.
  virtual void send_back(engine_ticket which) = 0;
  /// It has ended, or waits no longer.
  virtual void leave(engine_ticket which, relay_report const& report) = 0;
};

}  // namespace sluice::server
