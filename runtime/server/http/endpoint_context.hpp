/// What the connections of an endpoint share. Inside of endpoint.hpp.
#pragma once

#include <atomic>
#include <boost/asio/any_io_executor.hpp>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/server/http/api.hpp"
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
      : options(std::move(given)), service(of), api(of, options.model_config) {}

  endpoint_options options;
  inference_service& service;
  oip_api api;
  connection_registry registry;
  std::atomic<std::uint64_t> waiting_body_bytes{0};  ///< of large bodies
  boost::asio::any_io_executor bodies;               ///< where what takes long is computed
  std::shared_ptr<endpoint_life> life = std::make_shared<endpoint_life>();
};

/// The part that a large body has of all that may wait at once, for as long as it does.
class body_share {
 public:
  body_share() = default;
  body_share(body_share&& other) noexcept
      : of_(std::exchange(other.of_, nullptr)), bytes_(other.bytes_) {}
  body_share& operator=(body_share&& other) noexcept {
    std::swap(of_, other.of_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  body_share(body_share const&) = delete;
  body_share& operator=(body_share const&) = delete;
  ~body_share() {
    if (of_ != nullptr) of_->waiting_body_bytes -= bytes_;
  }

  /// From now on so large; false where others than it, and the `own` bytes beside it, are more than may wait already.
  [[nodiscard]] bool grow(endpoint_context& of, std::uint64_t bytes, std::uint64_t own = 0) {
    if (of.waiting_body_bytes > of.options.max_waiting_body_bytes + bytes_ + own) return false;
    of.waiting_body_bytes += bytes - bytes_;
    of_ = &of;
    bytes_ = bytes;
    return true;
  }

 private:
  endpoint_context* of_ = nullptr;
  std::uint64_t bytes_ = 0;
};

}  // namespace sluice::server
