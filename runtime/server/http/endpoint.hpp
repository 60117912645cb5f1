/// The HTTP/1.1 endpoint of the server: Open Inference Protocol V2 with tensors in JSON or binary,
/// over an inference_service.
///
///   endpoint_options options;
///   endpoint http{options, service};   // bound, listening and answering from here on
///   spdlog::info("listening address={}", http.address());
///   // … until it is to end …
///   http.stop(10s);                    // refuses new connections, finishes what runs
///
/// States:  listening → draining → stopped.  `stop` moves it on, and the destructor stops without
/// waiting for requests.
///
/// Threads: runs `options.threads` and `options.body_threads` of its own, and one that loads and unloads models; they call the service, so the
/// service must be thread-safe and its `infer` must not block. A large body keeps none of those that read
/// and write, so that other requests, health among them, are answered meanwhile. All members may be called from any thread. `service`
/// must outlive the endpoint. A request whose client leaves is cancelled. A `done` that it calls after the endpoint is gone does nothing.
///
/// Errors of a request become `{"error": "…"}` with the status of telemetry/error_table.hpp;
/// docs/protocol.md lists routes and statuses. What an `internal` error says goes to the log, not
/// to the client.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/server/inference/socket_watcher.hpp"

namespace sluice::server {

class access_log;
class endpoint_security;
class engine_gateway;

struct endpoint_options {
  /// An IP address of this machine or "localhost". Without `security` it is for loopback alone, or a proxy in front.
  std::string host = "127.0.0.1";
  std::uint16_t port = 8000;  ///< 0: any free one, see `endpoint::port`
  unsigned threads = 2;       ///< that read and write
  /// That turn large bodies into tensors, and large tensors into bodies. They give way to all others.
  unsigned body_threads = 2;

  std::uint64_t max_body_bytes = 64 * (std::uint64_t{1} << 20U);
  /// Of all bodies that wait until they are turned into tensors, beside one; more are answered 503.
  std::uint64_t max_waiting_body_bytes = std::uint64_t{1} << 30U;
  std::uint32_t max_header_bytes = 16 * (std::uint32_t{1} << 10U);
  /// Those beyond take the place of the one that has been idle longest; if all are busy they are
  /// answered 503.
  std::size_t max_connections = 16'384;
  /// For a whole header, for a whole body, and for a whole answer to be taken off our hands.
  std::chrono::milliseconds transfer_timeout{30'000};
  /// For a handshake of TLS, from the connection on.
  std::chrono::milliseconds handshake_timeout{10'000};
  /// How long a connection may stay open between two requests.
  std::chrono::milliseconds idle_timeout{60'000};

  /// Who is answered; null: everybody. Its files are looked at each second.
  std::shared_ptr<endpoint_security> security;

  /// Gets a line for each request; null: there are none.
  std::shared_ptr<access_log> accesses;

  /// Whose requests are relayed to engines, and which; null: nobody's. It outlives the endpoint.
  engine_gateway* engines = nullptr;
};

class endpoint final : public socket_watcher {
 public:
  /// Throws `already_exists` when the port is taken, `invalid_argument` when host or an option
  /// makes no sense.
  endpoint(endpoint_options options, inference_service& service);
  ~endpoint() override;
  endpoint(endpoint const&) = delete;
  endpoint& operator=(endpoint const&) = delete;
  endpoint(endpoint&&) = delete;
  endpoint& operator=(endpoint&&) = delete;

  /// The port that is bound.
  [[nodiscard]] std::uint16_t port() const noexcept;
  /// "127.0.0.1:8000", "[::1]:8000".
  [[nodiscard]] std::string address() const;
  [[nodiscard]] bool watch(int socket, reader on_readable, std::function<void()> on_end) override;
  /// Connections open now, idle ones included.
  [[nodiscard]] std::size_t connections() const;

  /// Takes no new connection, and of each that there is no other request than the one that it has. `stop` begins with that.
  void drain();
  /// Stops listening, closes idle connections, waits up to `grace` for the answers that are due,
  /// then cuts what is left. Returns when all threads have ended. Calling it again does nothing.
  /// Not to be called by the service from within a call of the endpoint: that thread would wait for
  /// itself.
  void stop(std::chrono::milliseconds grace);

 private:
  class impl;
  std::unique_ptr<impl> impl_;
};

}  // namespace sluice::server
