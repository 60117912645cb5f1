#include "runtime/server/hosting/model_log.hpp"

#include <spdlog/spdlog.h>

#include "runtime/telemetry/logging.hpp"

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

void log_order_of_inputs(std::string const& model) {
  spdlog::warn(
      "inputs are neither named like the arguments of forward nor <name>__<index>, they are given "
      "to "
      "it in the order of the configuration model={}",
      model);
}

void log_computed_alone(std::string const& model, std::string const& why) {
  spdlog::warn(
      "a model is computed for one request or batch at a time, and its launches are not recorded "
      "model={} reason={}",
      model, telemetry::quoted(why));
}

void log_recorded(std::string const& model) {
  spdlog::info("launches of a model are recorded as CUDA graphs model={}", model);
}

void log_not_recorded(std::string const& model, std::string const& why) {
  spdlog::warn("launches of a model are not recorded as CUDA graphs model={} reason={}", model,
               telemetry::quoted(why));
}

void log_misconfigured(std::string const& model, std::string const& how) {
  spdlog::error("a model contradicts its configuration model={} reason={}", model,
                telemetry::quoted(how));
}

}  // namespace sluice::server
