#include "runtime/server/server_setup.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

using namespace sluice::literals;
using std::chrono::ceil;
using std::chrono::milliseconds;

/// A load before any has been measured: what a handover takes, and bytes at a pace that most
/// machines exceed.
scheduler::duration_prior load_before_measured(std::uint64_t bytes,
                                               memhandover::backend_kind backend) {
  bool const gpu = backend == memhandover::backend_kind::cuda;
  scheduler::seconds const handover{gpu ? 0.005 : 0.02};
  auto const bytes_per_s = static_cast<double>(gpu ? 20_GiB : 2_GiB);
  return {.mean = handover + scheduler::seconds{static_cast<double>(bytes) / bytes_per_s},
          .scv = 0.25};
}

scheduler::idle_limits limits_of(policy::warm_policy const& warm) {
  switch (warm.mode) {
    case policy::warm_mode::automatic:
      return {warm.min_idle, warm.max_idle};
    case policy::warm_mode::fixed:
      return {warm.max_idle, warm.max_idle};
    case policy::warm_mode::always:
      break;
  }
  // Predicted as what it is; the host leaves such a model alone.
  return {std::chrono::hours{24 * 365}, scheduler::forever};
}

}  // namespace

std::vector<chosen_model> choose_models(policy::policy const& wanted,
                                        std::vector<model_entry> const& entries) {
  std::vector<chosen_model> chosen;
  std::vector<std::string> missing;
  std::set<std::string> present, served;
  for (auto const& entry : entries) {
    present.insert(entry.metadata.name);
  }
  for (auto const& model : wanted.models) {
    served.insert(model.name);
    if (!present.contains(model.name)) {
      missing.push_back(model.name);
      continue;
    }
    for (auto const& entry : entries) {
      if (entry.metadata.name == model.name) {
        chosen.push_back({entry, model});
      }
    }
  }
  if (!missing.empty()) {
    throw error{error_kind::not_found,
                fmt::format("{} names models that the repository {} does not have: {}; it has {}",
                            wanted.file.string(), wanted.server.model_repository.string(),
                            fmt::join(missing, ", "), fmt::join(present, ", "))};
  }
  for (auto const& name : present) {
    if (!served.contains(name)) {
      spdlog::info("model is not served, the policy does not name it model={}", name);
    }
  }
  return chosen;
}

std::vector<offered_model> offered(std::vector<chosen_model> const& chosen) {
  std::vector<offered_model> result;
  result.reserve(chosen.size());
  for (auto const& each : chosen) {
    result.push_back({each.entry.metadata, each.entry.version, each.entry.max_batch_size > 0});
  }
  return result;
}

host_options host_options_of(policy::policy const& wanted) {
  host_options options;
  switch (wanted.training.pause) {
    case policy::pause_rule::on_launch:
      options.pause = pause_mode::on_launch;
      break;
    case policy::pause_rule::on_request:
      options.pause = pause_mode::on_request;
      break;
    case policy::pause_rule::on_cold_start:
      options.pause = pause_mode::on_cold_start;
      break;
    case policy::pause_rule::never:
      options.pause = pause_mode::never;
      break;
  }
  options.pause_hysteresis = wanted.training.pause_hysteresis;
  options.min_share = wanted.training.min_share;
  options.run_ahead = wanted.training.run_ahead;
  options.tick = ceil<milliseconds>(wanted.scheduler.tick);
  options.reserve_bytes = wanted.scheduler.reserve;
  return options;
}

served_model served(chosen_model const& chosen, std::unique_ptr<hosted_model> model,
                    policy::policy const& wanted, memhandover::backend_kind backend) {
  auto const& slo = chosen.wanted.slo;
  served_model result;
  result.name = chosen.entry.metadata.name;
  result.version = chosen.entry.version;
  result.scheduling = {
      .goal = {.percentile = slo.percentile,
               .latency = slo.latency,
               .attainment = slo.attainment,
               .window = slo.window},
      .limits = limits_of(chosen.wanted.warm),
      .load = load_before_measured(model->bytes(), backend),
      .reject_on_miss = chosen.wanted.on_miss_predicted == policy::miss_action::reject};
  result.model = std::move(model);
  result.always_warm = chosen.wanted.warm.mode == policy::warm_mode::always;
  result.max_queue = chosen.wanted.max_queue;
  result.queue_timeout = ceil<milliseconds>(wanted.server.request_timeout);
  return result;
}

std::string backend_of(policy::policy const& wanted) {
  return wanted.pool.backend == policy::pool_backend::automatic
             ? environment("SLUICE_BACKEND")
             : std::string{policy::to_string(wanted.pool.backend)};
}

memhandover::serving_pool::options pool_options_of(policy::policy const& wanted) {
  memhandover::serving_pool::options options;
  options.backend = backend_of(wanted);
  options.device = wanted.pool.device;
  options.chunk_bytes = wanted.pool.chunk.value_or(0);
  if (wanted.pool.memory && wanted.pool.memory->share > 0.0) {
    throw error{
        error_kind::unsupported,
        fmt::format("{}: pool.memory: a share of the free memory is not supported yet; give "
                    "an amount, such as 4GiB",
                    wanted.file.string())};
  }
  if (wanted.pool.memory) {
    options.pool_bytes = wanted.pool.memory->bytes;
  }
  return options;
}

}  // namespace sluice::server
