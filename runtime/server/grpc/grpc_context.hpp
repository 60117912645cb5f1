/// What the calls of a gRPC endpoint share. Inside of grpc_endpoint.hpp.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <memory>
#include <utility>

#include "runtime/server/grpc/call_registry.hpp"
#include "runtime/server/grpc/grpc_endpoint.hpp"
#include "runtime/server/http/api.hpp"
#include "runtime/server/http/endpoint_context.hpp"
#include "runtime/server/inference/background_thread.hpp"

namespace sluice::server {

struct grpc_context {
  grpc_context(grpc_options given, inference_service& of)
      : options(std::move(given)),
        service(of),
        api(of),
        answers(static_cast<int>(options.threads)),
        bodies(static_cast<int>(options.threads)) {}

  grpc_options options;
  inference_service& service;
  oip_api api;
  call_registry registry;
  std::atomic<std::uint64_t> waiting_bytes{0};  ///< of large messages
  boost::asio::io_context answers;              ///< where answers are handed to gRPC
  boost::asio::io_context bodies;               ///< where what takes long is computed
  background_thread changes;                    ///< where models are loaded and unloaded
  std::shared_ptr<endpoint_life> life = std::make_shared<endpoint_life>();
};

}  // namespace sluice::server
