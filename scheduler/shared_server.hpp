/// Waits of requests of several kinds that share what computes them: one server, or several computations beside each other
/// that slow each other down.
///
///   std::vector<request_class> const kinds{{.arrivals_per_s = 20.0, .service = small},
///                                          {.arrivals_per_s = 1.0, .service = large}};
///   mean_wait_in_turn(kinds);                              // first come, first served
///   mean_waits_by_rank(kinds);                             // the first kind before the second
///   concurrent_server device{.arrivals_per_s = 30.0, .service = 50ms, .slowdown = {1.0, 1.2}};
///   waits_of(device).mean_response;                        // two at once, each 1.2 times as long
///
/// Arrivals are Poisson. Pure functions of any thread; they throw `std::invalid_argument` for what is negative or no number.
///
/// Sources: Kleinrock, Queueing Systems I, 3.4 and 5.6 (birth and death, Pollaczek–Khinchine); Erlang, Elektroteknikeren 13
/// (1917); Cobham, Operations Research 2 (1954).
#pragma once

#include <span>
#include <vector>

#include "scheduler/distribution.hpp"
#include "scheduler/queueing.hpp"
#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// Requests of one model, say.
struct request_class {
  double arrivals_per_s = 0.0;
  distribution service{};
};

/// What the server sees: all arrivals, and the services as a mixture in proportion to them. Its load is zero.
[[nodiscard]] queue_load all_of(std::span<request_class const> kinds);

/// First come, first served: all wait alike. `forever` at utilisation ≥ 1.
[[nodiscard]] seconds mean_wait_in_turn(std::span<request_class const> kinds);

/// Each kind goes before those behind it, and interrupts nobody. `forever` from the kind on with which the server is full.
[[nodiscard]] std::vector<seconds> mean_waits_by_rank(std::span<request_class const> kinds);

/// As many computations at once as `slowdown` has numbers; of n at once each takes slowdown[n − 1] times as long as alone.
struct concurrent_server {
  double arrivals_per_s = 0.0;
  seconds service{0.0};  ///< alone, on average; exponential
  std::vector<double> slowdown{1.0};
};

/// P(wait > t) = all_busy · e^{−decay t}.
struct concurrent_waits {
  double all_busy = 0.0;     ///< share of requests that wait
  double decay_per_s = 0.0;  ///< 0 if the server is overloaded
  seconds mean_wait{0.0};
  seconds mean_response{0.0};
};

/// A birth and death process, exact for exponential services. Without a slow-down it is Erlang's M/M/c.
[[nodiscard]] concurrent_waits waits_of(concurrent_server const& server);

}  // namespace sluice::scheduler
