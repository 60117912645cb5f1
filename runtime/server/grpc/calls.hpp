/// The calls of inference.GRPCInferenceService that are answered at once. Each is asked of oip_api as what means the same over HTTP, so
/// that both say the same; messages are read and written here, without sockets.
///
///   auto const reply = answer_call(api, "ModelReady", message);
///   reply.status;    // as HTTP has it; grpc_code_of says what gRPC has for it
///   reply.message;   // of 200; else its reason says why there is none
///
/// Nothing here throws. Thread-safe.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "runtime/server/http/api.hpp"

namespace sluice::server {

/// Without a slash in front, as the service's calls are named in a request: "inference.GRPCInferenceService/".
inline constexpr std::string_view grpc_service_path = "inference.GRPCInferenceService/";

inline constexpr std::string_view infer_call = "ModelInfer", stream_call = "ModelStreamInfer";

struct call_reply {
  unsigned status = 200;
  std::string message{};  ///< its bytes
  std::string reason{};   ///< a sentence
  std::chrono::seconds retry_after{0};
  std::string_view cause{};  ///< as http_reply has it
};

/// Whether there is such a call; of those here, and the two that infer.
[[nodiscard]] bool is_call(std::string_view name);
/// Whether anybody may ask, for health alone.
[[nodiscard]] bool is_public_call(std::string_view name);

/// Whether it may wait for computations, or for files to be read.
[[nodiscard]] bool may_take_long(std::string_view name);

[[nodiscard]] call_reply answer_call(oip_api const& api, std::string_view name,
                                     std::string_view message);

/// Of a failure, whose body is JSON.
[[nodiscard]] call_reply failed_call(http_reply const& reply);

/// The number of gRPC's code for a status of HTTP.
[[nodiscard]] int grpc_code_of(unsigned status) noexcept;

}  // namespace sluice::server
