/// The gRPC endpoint of the server: inference.GRPCInferenceService of the Open Inference Protocol V2, with Triton's extensions, over an
/// inference_service. A sibling of http/endpoint.hpp, which says what holds of both.
///
///   grpc_options options;
///   grpc_endpoint rpc{options, service};   // bound, listening and answering from here on
///   spdlog::info("listening address={}", rpc.address());
///   // … until it is to end …
///   rpc.stop(10s);                         // refuses new calls, finishes what runs
///
/// Where the program was built without gRPC's library there is this interface all the same, and nothing can be made of it.
///
/// Threads: `options.threads` that write answers, as many that turn large messages into tensors and give way to all others, and those of
/// gRPC, which read: half as many as there are processors, 2 to 16, and some that mostly wait. They call the service, so it must be
/// thread-safe and its `infer` must not block. All members may be called from any thread. `service` must outlive the endpoint.
///
/// A call that is cancelled, or whose connection ends, has its requests cancelled; a call's deadline is a limit of theirs.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

class access_log;
class endpoint_security;

struct grpc_options {
  std::string host = "127.0.0.1";  ///< an IP address of this machine or "localhost"
  std::uint16_t port = 8001;       ///< 0: any free one, see `grpc_endpoint::port`
  unsigned threads = 2;            ///< of each of two kinds

  /// A larger message is refused; at most 2 GiB − 1, which is what protobuf can.
  std::uint64_t max_message_bytes = 64 * (std::uint64_t{1} << 20U);
  /// Of all messages that are read, or wait until they are turned into tensors, beside one.
  std::uint64_t max_waiting_bytes = std::uint64_t{1} << 30U;
  std::size_t max_connections = 16'384;  ///< one more is closed
  /// Calls at once, a stream being one; one more is refused.
  std::size_t max_calls = 16'384;
  /// For the message of a call that is no stream.
  std::chrono::milliseconds transfer_timeout{30'000};
  /// How long a connection may stay open without a call.
  std::chrono::milliseconds idle_timeout{60'000};

  /// Whose tokens are asked for; null: nobody's.
  std::shared_ptr<endpoint_security> security;
  /// Both or none; read again within seconds when they have changed.
  std::filesystem::path certificate_file{}, key_file{};

  /// Gets a line for each request; null: there are none.
  std::shared_ptr<access_log> accesses;
};

class grpc_endpoint {
 public:
  /// Throws as `endpoint` does, and `unsupported` where there is no gRPC in this program.
  grpc_endpoint(grpc_options options, inference_service& service);
  ~grpc_endpoint();
  grpc_endpoint(grpc_endpoint const&) = delete;
  grpc_endpoint& operator=(grpc_endpoint const&) = delete;
  grpc_endpoint(grpc_endpoint&&) = delete;
  grpc_endpoint& operator=(grpc_endpoint&&) = delete;

  /// Throws `unsupported` where there is no gRPC in this program, with what would be right.
  static void require();

  /// The port that is bound.
  [[nodiscard]] std::uint16_t port() const noexcept;
  /// "127.0.0.1:8001", "[::1]:8001".
  [[nodiscard]] std::string address() const;
  /// Calls that have not ended, streams among them.
  [[nodiscard]] std::size_t calls() const;

  /// Stops listening, ends streams in which nothing waits for an answer, waits up to `grace` for the answers that are due, then cuts
  /// what is left. Calling it again does nothing.
  void stop(std::chrono::milliseconds grace);

 private:
  class impl;
  std::unique_ptr<impl> impl_;
};

}  // namespace sluice::server
