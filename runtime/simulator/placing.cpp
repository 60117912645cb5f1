#include "runtime/simulator/placing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "memhandover/base/error.hpp"
#include "runtime/simulator/traffic.hpp"

namespace sluice::simulator {

placing_rule parse_placing(std::string const& description) {
  if (description == "work") {
    return placing_rule::work;
  }
  if (description == "round-robin") {
    return placing_rule::round_robin;
  }
  if (description == "first-fit") {
    return placing_rule::first_fit;
  }
  if (description == "attainment") {
    return placing_rule::attainment;
  }
  throw error{error_kind::invalid_argument,
              fmt::format("there is no placing '{}'; there are attainment, work, round-robin and "
                          "first-fit",
                          description)};
}

std::vector<scheduler::placeable_model> placeable_models(trace const& requests,
                                                         placeable_settings const& settings) {
  auto const traffic = traffic_of(requests);
  if (settings.bytes.size() != 1 && settings.bytes.size() != traffic.size()) {
    throw error{error_kind::invalid_argument,
                fmt::format("there are {} sizes for {} models; there must be one for all, or one "
                            "for each in the order in which they come",
                            settings.bytes.size(), traffic.size())};
  }
  bool const is_released = settings.idle_timeout < scheduler::forever;
  std::vector<scheduler::placeable_model> made;
  for (std::size_t i = 0; i < traffic.size(); ++i) {
    auto const bytes = settings.bytes[settings.bytes.size() == 1 ? 0 : i];
    made.push_back(
        {.bytes = bytes,
         .arrivals_per_s = traffic[i].rate_per_s,
         .service = traffic[i].service,
         .load = is_released ? load_times(settings.costs, bytes) : scheduler::distribution{},
         .latency = settings.latency,
         .idle_timeout = settings.idle_timeout,
         .instances = settings.instances});
  }
  return made;
}

scheduler::model_placement place(trace const& requests,
                                 std::vector<scheduler::placeable_model> const& models,
                                 std::vector<scheduler::placement_device> const& devices,
                                 placing_rule rule, scheduler::placement_settings const& settings) {
  switch (rule) {
    case placing_rule::round_robin:
      return scheduler::place_in_rotation(models, devices);
    case placing_rule::first_fit:
      return scheduler::place_first_fit(models, devices);
    case placing_rule::attainment:
      return scheduler::place_by_attainment(models, devices, settings);
    case placing_rule::work:
      break;
  }
  scheduler::model_placement made;
  for (auto const device : place_models(requests, static_cast<unsigned>(devices.size()))) {
    made.devices_of.push_back({device});
  }
  return made;
}

std::vector<unsigned> place_models(trace const& requests, unsigned devices) {
  std::vector<double> work(requests.models.size());
  for (auto const& each : requests.requests) {
    work[each.model] += each.service_s;
  }
  std::vector<std::size_t> order(work.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return work[a] > work[b]; });
  std::vector<double> load(devices);
  std::vector<std::size_t> models(devices);
  std::vector<unsigned> result(work.size());
  for (auto const model : order) {
    unsigned least = 0;
    for (unsigned d = 1; d < devices; ++d) {
      least = std::pair{load[d], models[d]} < std::pair{load[least], models[least]} ? d : least;
    }
    load[least] += work[model];
    ++models[least];
    result[model] = least;
  }
  return result;
}

}  // namespace sluice::simulator
