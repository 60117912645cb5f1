#include "runtime/simulator/placing.hpp"

#include <algorithm>
#include <numeric>

namespace sluice::simulator {

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
