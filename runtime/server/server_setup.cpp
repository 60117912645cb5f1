#include "runtime/server/server_setup.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"
#include "runtime/server/engines/scheduling_settings.hpp"
#include "runtime/telemetry/logging.hpp"

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

}  // namespace

std::vector<policy::model_policy> engines_of(policy::policy const& wanted) {
  std::vector<policy::model_policy> engines;
  std::copy_if(wanted.models.begin(), wanted.models.end(), std::back_inserter(engines),
               [](auto const& each) { return each.engine.has_value(); });
  return engines;
}

repository_contents contents_of(policy::policy const& wanted) {
  return engines_of(wanted).size() == wanted.models.size()
             ? repository_contents{}
             : read_repository({wanted.server.model_repository});
}

model_choice choose_models(policy::policy const& wanted, repository_contents there) {
  model_choice choice;
  choice.unservable = std::move(there.unservable);
  std::vector<std::string> missing, reasons;
  std::optional<error_kind> first;
  std::set<std::string> present, named;
  for (auto const& entry : there.models) {
    present.insert(entry.metadata.name);
  }
  for (auto const& model : wanted.models) {
    if (model.engine) {
      continue;
    }
    named.insert(model.name);
    auto const fault =
        std::find_if(choice.unservable.begin(), choice.unservable.end(),
                     [&](unservable_model const& each) { return each.name == model.name; });
    if (fault != choice.unservable.end()) {
      fault->is_wanted = true;
      first = first.value_or(fault->reason.kind());
      reasons.push_back(fmt::format("model '{}': {}", fault->name, fault->reason.what()));
    } else if (!present.contains(model.name)) {
      missing.push_back(model.name);
    }
    for (auto const& entry : there.models) {
      if (entry.metadata.name == model.name) {
        choice.served.push_back({entry, model});
      }
    }
  }
  if (!missing.empty()) {
    throw error{error_kind::not_found,
                fmt::format("{} names models that the repository {} does not have: {}; it has {}{}",
                            wanted.file.string(), wanted.server.model_repository.string(),
                            fmt::join(missing, ", "), fmt::join(present, ", "),
                            reasons.empty() ? ""
                                            : fmt::format("; and models that cannot be served: {}",
                                                          fmt::join(reasons, "; ")))};
  }
  if (choice.served.empty() && !reasons.empty()) {
    throw error{first.value(), fmt::format("no model that {} names can be served: {}",
                                           wanted.file.string(), fmt::join(reasons, "; "))};
  }
  for (auto const& name : present) {
    if (!named.contains(name)) {
      choice.unnamed.push_back(name);
    }
  }
  return choice;
}

void log_what_is_left(model_choice const& choice) {
  for (auto const& name : choice.unnamed) {
    spdlog::info("model is not served, the policy does not name it model={}", name);
  }
  for (auto const& each : choice.unservable) {
    spdlog::log(each.is_wanted ? spdlog::level::err : spdlog::level::warn,
                "a model {} cannot be served model={} reason={}",
                each.is_wanted ? "that the policy names" : "of the repository",
                telemetry::quoted(each.name), telemetry::quoted(each.reason.what()));
  }
}

std::vector<offered_model> offered(std::vector<chosen_model> const& chosen) {
  std::vector<offered_model> result;
  result.reserve(chosen.size());
  for (auto const& each : chosen) {
    result.push_back(
        {each.entry.metadata, each.entry.version, each.entry.max_batch_size, each.entry.config});
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
  served_model result;
  result.name = chosen.entry.metadata.name;
  result.version = chosen.entry.version;
  result.scheduling = scheduling_of(chosen.wanted);
  result.scheduling.load = load_before_measured(model ? model->bytes() : 0, backend);
  result.scheduling.may_prewarm =
      chosen.wanted.warm.mode == policy::warm_mode::automatic && chosen.wanted.warm.prewarm;
  result.scheduling.reject_on_miss = chosen.wanted.on_miss_predicted == policy::miss_action::reject;
  result.model = std::move(model);
  result.always_warm = chosen.wanted.warm.mode == policy::warm_mode::always;
  result.max_queue = chosen.wanted.max_queue;
  result.batching = chosen.entry.batching;
  result.warmup = chosen.entry.warmup;
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
  options.host_copy_bytes = wanted.host_copies.memory;
  options.host_copy_disk = {wanted.host_copies.disk_path, wanted.host_copies.disk};
  options.park_stay = wanted.training.park == policy::park_rule::never ? 0 : wanted.training.stay;
  options.resident_share = wanted.training.resident_share;
  options.resident_window = wanted.training.resident_window;
  auto const engines = engines_of(wanted);
  options.demands_from_engines = std::any_of(
      engines.begin(), engines.end(), [](auto const& each) { return each.engine->is_tenant(); });
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
