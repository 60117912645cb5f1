#include "runtime/simulator/replicas.hpp"

#include <algorithm>
#include <utility>

#include "runtime/simulator/draws.hpp"

namespace sluice::simulator {

spread_trace spread(trace requests, std::vector<std::vector<std::size_t>> const& devices_of,
                    spread_settings const& settings) {
  spread_trace made;
  made.nowhere.resize(devices_of.size());
  std::vector<std::uint32_t> first_of;  // replica
  bool is_each_on_one = true;
  for (std::uint32_t model = 0; model < devices_of.size(); ++model) {
    first_of.push_back(static_cast<std::uint32_t>(made.model_of.size()));
    for (auto const device : devices_of[model]) {
      made.model_of.push_back(model);
      made.device_of.push_back(static_cast<unsigned>(device));
    }
    is_each_on_one = is_each_on_one && devices_of[model].size() == 1;
  }
  if (is_each_on_one) {
    made.requests = std::move(requests);
    return made;
  }
  draws random{settings.seed};
  std::size_t kept = 0;
  std::uint64_t counted = 0, counted_nowhere = 0;
  for (auto const& each : requests.requests) {
    bool const counts = each.at_s >= settings.count_from_s;
    counted += counts ? 1 : 0;
    auto const replicas = devices_of[each.model].size();
    if (replicas == 0) {
      made.nowhere[each.model] += counts ? 1 : 0;
      counted_nowhere += counts ? 1 : 0;
      continue;
    }
    auto const drawn =
        replicas == 1 ? std::size_t{0}
                      : static_cast<std::size_t>(random.uniform() * static_cast<double>(replicas));
    auto it = each;
    it.model = first_of[each.model] + static_cast<std::uint32_t>(std::min(drawn, replicas - 1));
    requests.requests[kept++] = it;
  }
  requests.requests.resize(kept);
  if (counted > 0) {
    made.share_somewhere =
        static_cast<double>(counted - counted_nowhere) / static_cast<double>(counted);
  }
  std::vector<std::string> names;
  names.reserve(made.model_of.size());
  for (auto const model : made.model_of) {
    names.push_back(requests.models[model]);
  }
  requests.models = std::move(names);
  made.requests = std::move(requests);
  return made;
}

std::vector<simulated_model> replicas_of(std::vector<scheduler::placeable_model> const& models,
                                         spread_trace const& there,
                                         scheduler::objective const& goal) {
  std::vector<simulated_model> replicas;
  replicas.reserve(there.model_of.size());
  for (std::size_t i = 0; i < there.model_of.size(); ++i) {
    auto const& model = models[there.model_of[i]];
    replicas.push_back({.bytes = model.bytes,
                        .goal = goal,
                        .device = there.device_of[i],
                        .instances = model.instances});
  }
  return replicas;
}

simulation_outcome gathered(simulation_outcome of_replicas, spread_trace const& from) {
  std::vector<model_outcome> models(from.nowhere.size());
  std::vector<unsigned> replicas(models.size());
  for (std::size_t i = 0; i < from.model_of.size(); ++i) {
    models[from.model_of[i]] += of_replicas.models[i];
    ++replicas[from.model_of[i]];
  }
  bool const has_predictions = std::any_of(models.begin(), models.end(),
                                           [](auto const& each) { return each.predictions > 0; });
  for (std::size_t model = 0; model < models.size(); ++model) {
    models[model].predictions += has_predictions ? from.nowhere[model] : 0;
    models[model].requests += from.nowhere[model];
    models[model].refused += from.nowhere[model];
    models[model].released_s /= std::max(1U, replicas[model]);
  }
  of_replicas.models = std::move(models);
  return of_replicas;
}

}  // namespace sluice::simulator
