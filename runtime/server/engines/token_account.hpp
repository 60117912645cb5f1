/// When the tokens of an engine's streams came: the first of each, and how long after one another.
///
///   token_account account{{.window = 5min, .ttft = 300ms, .tbt = 50ms}, now};
///   account.add(now, {.first = 120ms, .gaps = {20ms, 21ms}});
///   account.first().counts;       // by `token_distribution::bounds`
///   account.first_in_time(now);   // 1.0
///
/// Not thread-safe.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "runtime/policy/policy.hpp"
#include "runtime/server/inference/engine_gateway.hpp"
#include "scheduler/estimators.hpp"

namespace sluice::server {

struct token_distribution {
  /// In seconds.
  static constexpr std::array bounds{0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04,
                                     0.05,  0.075,  0.1,   0.15, 0.2,   0.3,  0.4,  0.5,
                                     0.75,  1.0,    2.5,   5.0,  10.0,  20.0, 40.0, 80.0};
  std::array<std::uint64_t, bounds.size() + 1> counts{};  ///< the last one: beyond
  std::chrono::nanoseconds total{};

  void add(std::chrono::nanoseconds took);
};

class token_account {
 public:
  using clock = std::chrono::steady_clock;

  /// As the promise has it, of which `ttft` and `tbt` may not be given: then what they would be held against is not.
  token_account(policy::objective_policy const& promise, clock::time_point now);

  void add(clock::time_point now, token_times const& came);

  [[nodiscard]] token_distribution const& first() const noexcept { return first_; }
  [[nodiscard]] token_distribution const& gaps() const noexcept { return gaps_; }
  /// The share, of those of the promise's window, that came in time; nothing: there were none, or nothing is promised.
  [[nodiscard]] std::optional<double> first_in_time(clock::time_point now) noexcept;
  [[nodiscard]] std::optional<double> gaps_in_time(clock::time_point now) noexcept;

 private:
  policy::microseconds ttft_, tbt_;  ///< 0: not promised
  token_distribution first_, gaps_;
  scheduler::attainment_window first_seen_, gaps_seen_;
};

}  // namespace sluice::server
