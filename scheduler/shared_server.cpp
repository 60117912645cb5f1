#include "scheduler/shared_server.hpp"

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {
namespace {

void check(concurrent_server const& server) {
  auto const need = [](bool good, char const* what, double got) {
    if (!good) {
      throw std::invalid_argument(std::string(what) + "; got " + std::to_string(got));
    }
  };
  need(server.arrivals_per_s >= 0.0 && std::isfinite(server.arrivals_per_s),
       "arrivals_per_s must be a finite number >= 0", server.arrivals_per_s);
  need(server.service.count() > 0.0 && std::isfinite(server.service.count()),
       "the service time must be a finite number of seconds > 0", server.service.count());
  need(!server.slowdown.empty(), "one computation at least must be possible", 0.0);
  for (double const each : server.slowdown) {
    need(each > 0.0 && std::isfinite(each), "a slow-down must be a finite number > 0", each);
  }
}

}  // namespace

queue_load all_of(std::span<request_class const> kinds) {
  queue_load all;
  std::vector<distribution::weighted> services;
  for (auto const& kind : kinds) {
    if (!(kind.arrivals_per_s >= 0.0) || !std::isfinite(kind.arrivals_per_s)) {
      throw std::invalid_argument("arrivals_per_s must be a finite number >= 0; got " +
                                  std::to_string(kind.arrivals_per_s));
    }
    all.arrivals_per_s += kind.arrivals_per_s;
    if (kind.arrivals_per_s > 0.0) {
      services.push_back({kind.arrivals_per_s, &kind.service});
    }
  }
  if (!services.empty()) {
    all.service = distribution::mixture_of(services);
  }
  return all;
}

seconds mean_wait_in_turn(std::span<request_class const> kinds) {
  return mean_warm_wait(all_of(kinds));
}

std::vector<seconds> mean_waits_by_rank(std::span<request_class const> kinds) {
  auto const all = all_of(kinds);
  // What is left of the service in progress, whosever it is, when one arrives.
  double const residual = 0.5 * all.arrivals_per_s * all.service.second_moment_s2();
  std::vector<seconds> waits;
  double before = 0.0;
  for (auto const& kind : kinds) {
    double const with = before + kind.arrivals_per_s * kind.service.mean().count();
    waits.push_back(with < 1.0 ? seconds{residual / ((1.0 - before) * (1.0 - with))} : forever);
    before = with;
  }
  return waits;
}

concurrent_waits waits_of(concurrent_server const& server) {
  check(server);
  double const rate = server.arrivals_per_s;
  auto const most = server.slowdown.size();
  auto const answers_per_s = [&](std::size_t busy) {
    return static_cast<double>(busy) / (server.service.count() * server.slowdown[busy - 1]);
  };
  double const full = answers_per_s(most);
  if (rate >= full) {
    return {.all_busy = 1.0, .decay_per_s = 0.0, .mean_wait = forever, .mean_response = forever};
  }
  // Weights of 0, 1, … below `most` in the system; from there on each is the one before times ρ.
  double weight = 1.0;
  double below = 0.0;
  double number_below = 0.0;
  for (std::size_t n = 0; n < most; ++n) {
    below += weight;
    number_below += weight * static_cast<double>(n);
    weight *= rate / answers_per_s(n + 1);
    if (weight > 1e200) {  // far up the first states are of no weight any more
      below /= weight;
      number_below /= weight;
      weight = 1.0;
    }
  }
  double const rho = rate / full;
  double const at_full = weight / (1.0 - rho);
  double const all = below + at_full;
  concurrent_waits result{.all_busy = at_full / all, .decay_per_s = full - rate};
  result.mean_wait = seconds{result.all_busy / result.decay_per_s};
  if (rate == 0.0) {
    result.mean_response = server.service * server.slowdown.front();
    return result;
  }
  double const number =
      number_below / all + result.all_busy * (static_cast<double>(most) + rho / (1.0 - rho));
  result.mean_response = seconds{number / rate};
  return result;
}

}  // namespace sluice::scheduler
