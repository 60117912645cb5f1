/// What the connections of an endpoint share. Inside of endpoint.hpp.
#pragma once

#include <atomic>
#include <boost/asio/any_io_executor.hpp>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/server/http/api.hpp"
#include "runtime/server/http/body_share.hpp"
#include "runtime/server/http/connection_registry.hpp"
#include "runtime/server/http/endpoint.hpp"

namespace sluice::server {

/// Whether the endpoint's io_context still exists: a service may finish a request after the
/// endpoint is gone.
struct endpoint_life {
  std::mutex mutex;
  bool alive = true;  // under mutex
};

/// What all connections of an endpoint share; outlives them.
struct endpoint_context {
  endpoint_context(endpoint_options given, inference_service& of)
      : options(std::move(given)), service(of), api(of) {}

  endpoint_options options;
  inference_service& service;
  oip_api api;
  connection_registry registry;
  std::atomic<std::uint64_t> waiting_body_bytes{0};  ///< of large bodies
  boost::asio::any_io_executor bodies;               ///< where what takes long is computed
  boost::asio::any_io_executor
      changes;  ///< where models are loaded and unloaded, one after the other
  std::shared_ptr<endpoint_life> life = std::make_shared<endpoint_life>();
};

}  // namespace sluice::server
