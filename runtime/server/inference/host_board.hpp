/// What a host shows of itself while it computes, to those who cannot ask it: in memory that two processes share, so that
/// one of them finds what the other was doing when it died or hung.
///
///   host_board* const board = new (shared) host_board;
///   board->begin({activity::computing, model, ticket});
///   // … the model computes …
///   board->end();
///
/// Each thread that does something has a lane of its own, which it writes alone; any thread of any process reads. Times
/// are of CLOCK_MONOTONIC, which all processes of a machine share.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/server/inference/model_executor.hpp"

namespace sluice::server {

enum class activity : std::uint8_t { none, preparing, loading, computing };

class host_board {
 public:
  /// A server offers no more versions of models.
  static constexpr std::size_t max_models = 4096;
  static constexpr std::size_t max_computing_lanes = 64;
  static constexpr std::size_t max_lanes = max_computing_lanes + 4;
  static constexpr std::size_t executor_lane = 0;  ///< of the thread that loads and releases
  static constexpr std::size_t preparing_lane =
      max_lanes - 1;  ///< of the one that reads models' files
  static constexpr std::size_t no_lane = max_lanes;
  /// That of the thread that calls; one without shows nothing.
  static inline thread_local std::size_t this_lane = no_lane;

  struct action {
    activity what = activity::none;
    std::size_t model = 0;
    request_ticket request = 0;  ///< whom it computes for; 0: nobody
    std::size_t requests = 1;    ///< and others whom it does not name, so many in all
    std::chrono::steady_clock::time_point since{};
    std::size_t lane = 0;

    bool operator==(action const&) const = default;
  };

  void begin(action const& now) noexcept {
    if (this_lane == no_lane) {
      return;
    }
    auto& lane = lanes_.at(this_lane);
    lane.since = std::chrono::steady_clock::now().time_since_epoch().count();
    lane.model = now.model;
    lane.request = now.request;
    lane.requests = now.requests;
    lane.what.store(now.what, std::memory_order_release);
  }
  void end() noexcept {
    if (this_lane == no_lane) {
      return;
    }
    lanes_.at(this_lane).what.store(activity::none, std::memory_order_release);
  }
  void set_state(std::size_t model, model_state state) noexcept { states_.at(model) = state; }
  /// That this thread ends the process, if it has a lane: what it did for another thread is not known. Safe in a signal
  /// handler; the first one counts.
  void blame_this_thread() noexcept {
    std::size_t none = 0;
    if (this_lane != no_lane) {
      culprit_.compare_exchange_strong(none, this_lane + 1);
    }
  }

  /// What is done now. One that is written meanwhile may be of two actions; whoever acts on it looks again, or at the
  /// board of a process that has died.
  [[nodiscard]] std::vector<action> actions() const {
    std::vector<action> seen;
    for (std::size_t lane = 0; lane < max_lanes; ++lane) {
      if (auto const what = lanes_[lane].what.load(std::memory_order_acquire);
          what != activity::none) {
        seen.push_back(
            {what, lanes_[lane].model, lanes_[lane].request, lanes_[lane].requests,
             std::chrono::steady_clock::time_point{std::chrono::nanoseconds{lanes_[lane].since}},
             lane});
      }
    }
    return seen;
  }
  [[nodiscard]] bool computes() const noexcept {
    return std::any_of(lanes_.begin(), lanes_.end(), [](lane_state const& lane) {
      return lane.what.load(std::memory_order_acquire) == activity::computing;
    });
  }
  [[nodiscard]] model_state state(std::size_t model) const noexcept { return states_.at(model); }
  /// The lane of the thread that has ended the process, if it could say so.
  [[nodiscard]] std::optional<std::size_t> culprit() const noexcept {
    auto const seen = culprit_.load();
    return seen == 0 ? std::nullopt : std::optional{seen - 1};
  }

 private:
  struct lane_state {
    std::atomic<activity> what{activity::none};
    std::atomic<std::uint64_t> model{0}, request{0}, requests{1};
    std::atomic<std::int64_t> since{0};
  };

  std::array<lane_state, max_lanes> lanes_{};
  std::atomic<std::size_t> culprit_{0};  ///< its lane and one; 0: nobody
  std::array<std::atomic<model_state>, max_models> states_{};
};

}  // namespace sluice::server
