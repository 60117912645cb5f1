/// From policy and model repository to what the host and the service are made of. Starts nothing.
///
///   auto const choice = choose_models(policy, read_repository({policy.server.model_repository}));
///   model_service service{offered(choice.served), choice.unservable};
///   std::vector<served_model> models;
///   for (auto const& each : choice.served) {
///     models.push_back(served(each, prepare(each.entry), policy, pool->shape().backend));
///   }
///   model_host host{host_options_of(policy), pool, std::move(models)};
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memhandover/client/serving_pool.hpp"
#include "memhandover/device/device_memory.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/server/hosting/model_host.hpp"
#include "runtime/server/repository/model_repository.hpp"
#include "runtime/server/service.hpp"

namespace sluice::server {

/// One version of a model that the policy names.
struct chosen_model {
  model_entry entry;
  policy::model_policy wanted;
};

struct model_choice {
  std::vector<chosen_model> served;
  std::vector<unservable_model> unservable;  ///< all of the repository's, wanted or not
  std::vector<std::string> unnamed;          ///< by the policy
};

/// What the policy's repository has; nothing where all that it serves are engines.
[[nodiscard]] repository_contents contents_of(policy::policy const& wanted);

/// All versions of the models in the policy. Throws `not_found` with all names that the repository lacks, and if
/// none can be served, with all reasons, the kind of the first.
[[nodiscard]] model_choice choose_models(policy::policy const& wanted, repository_contents there);

/// A line for each model of the repository that is not served.
void log_what_is_left(model_choice const& choice);

[[nodiscard]] std::vector<offered_model> offered(std::vector<chosen_model> const& chosen);

/// Those models of the policy that are engines.
[[nodiscard]] std::vector<policy::model_policy> engines_of(policy::policy const& wanted);

[[nodiscard]] host_options host_options_of(policy::policy const& wanted);

/// `backend` tells how fast a load will be until loads have been measured. Without a `model`: what it is promised.
[[nodiscard]] served_model served(chosen_model const& chosen, std::unique_ptr<hosted_model> model,
                                  policy::policy const& wanted, memhandover::backend_kind backend);

/// "host" or "cuda", as the policy says or else SLUICE_BACKEND; empty or "auto": the broker chooses.
[[nodiscard]] std::string backend_of(policy::policy const& wanted);

/// What the broker is started with if none runs. Throws `unsupported` if the pool's size is a share
/// of a GPU.
[[nodiscard]] memhandover::serving_pool::options pool_options_of(policy::policy const& wanted);

}  // namespace sluice::server
