#include "runtime/simulator/traffic.hpp"

#include <algorithm>
#include <cstddef>

namespace sluice::simulator {
namespace {

constexpr std::size_t most_samples = 1024;

}  // namespace

std::vector<traffic_seen> traffic_of(trace const& requests) {
  struct sums {
    std::uint64_t count = 0;
    double last_s = 0.0, gaps = 0.0, squares = 0.0;
    std::vector<double> services;
  };
  std::vector<sums> all(requests.models.size());
  for (auto const& each : requests.requests) {
    auto& its = all[each.model];
    double const gap = each.at_s - its.last_s;
    its.last_s = each.at_s;
    its.gaps += its.count > 0 ? gap : 0.0;
    its.squares += its.count > 0 ? gap * gap : 0.0;
    ++its.count;
    its.services.push_back(each.service_s);
  }
  std::vector<traffic_seen> result;
  for (auto& its : all) {
    traffic_seen seen;
    if (its.count > 0) {
      seen.rate_per_s = static_cast<double>(its.count) / std::max(requests.length_s, 1e-9);
      std::vector<double> samples;
      auto const stride = std::max<std::size_t>(1, its.services.size() / most_samples);
      for (std::size_t i = 0; i < its.services.size(); i += stride) {
        samples.push_back(its.services[i]);
      }
      seen.service = scheduler::distribution::of_samples(samples);
    }
    if (its.count > 2 && its.gaps > 0.0) {
      auto const n = static_cast<double>(its.count - 1);
      seen.gap_scv = std::max(0.0, n * its.squares / (its.gaps * its.gaps) - 1.0);
    }
    result.push_back(std::move(seen));
  }
  return result;
}

scheduler::distribution load_times(load_costs const& costs, std::uint64_t bytes) {
  draws random{1};
  std::vector<double> samples(most_samples);
  double const copy = static_cast<double>(bytes) / costs.bytes_per_s;
  std::generate(samples.begin(), samples.end(), [&]() {
    return costs.handover.draw(random) + random.gamma(costs.fixed_s, costs.fixed_scv) + copy;
  });
  return scheduler::distribution::of_samples(samples);
}

}  // namespace sluice::simulator
