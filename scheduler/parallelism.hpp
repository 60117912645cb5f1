/// How many models compute at once: as many as may, unless they are seen to hinder each other.
///
/// To compute beside others is what lets a model of a millisecond not wait for one of a hundred, and costs nothing as long as
/// the device does as much work in all. Of n that compute at once let each take r times as long as alone: then the device
/// does n/r of the work that it does one by one, its *yield*. Below `least_yield` they take memory, caches and order from
/// each other, and fewer compute at once.
///
///   parallelism models{4};
///   models.add(7, 2.0, 30ms);   // model 7 has computed beside one other
///   models.bound();             // so many at most from now on
///
/// What a model takes alone is learned from when it was alone; models that never are teach nothing. A number that has been
/// found too large is tried again after `tried_again` computations, since the models may be others then.
///
/// Pure; one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

class parallelism {
 public:
  static constexpr double least_yield = 0.8;
  static constexpr std::uint64_t tried_again = 4096;

  /// Throws `std::invalid_argument` unless at least one may.
  explicit parallelism(std::size_t most);

  /// A computation has ended. `at_once`: how many computed meanwhile, itself included, on average over its time.
  void add(std::size_t model, double at_once, seconds took);
  /// Another model has its number from now on.
  void forget(std::size_t model) { alone_.erase(model); }
  [[nodiscard]] std::size_t bound() const noexcept { return bound_; }
  /// Of 1, 2, … `bound` at once: how many times as long each takes; 1 where that is not known.
  [[nodiscard]] std::vector<double> slowdowns() const;
  /// What a model takes alone; nothing before that is known.
  [[nodiscard]] std::optional<seconds> alone(std::size_t model) const;

 private:
  struct mean {
    double value = 0.0;
    std::uint64_t count = 0;
    void add(double one);
  };
  [[nodiscard]] std::size_t largest_that_yields() const;

  std::size_t most_;
  std::size_t bound_;
  std::uint64_t since_change_ = 0;
  std::unordered_map<std::size_t, mean> alone_;  ///< seconds by model
  std::vector<mean> slowdown_;                   ///< by how many at once, less one
};

}  // namespace sluice::scheduler
