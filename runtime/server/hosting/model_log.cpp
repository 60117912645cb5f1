#include "runtime/server/hosting/model_log.hpp"

#include <spdlog/spdlog.h>

namespace sluice::server {

void log_prepared(std::string const& model, std::uint64_t bytes, std::uint64_t outside) {
  spdlog::info("model prepared model={} weight_bytes={} outside_pool_bytes={}", model, bytes,
               outside);
}

void log_image(std::string const& model, std::uint64_t bytes, bool pinned) {
  spdlog::info("weights are on the host model={} weight_bytes={}", model, bytes);
  if (!pinned) {
    spdlog::warn(
        "no pinned memory for the weights of this model, cold starts take longer model={} "
        "weight_bytes={}",
        model, bytes);
  }
}

}  // namespace sluice::server
