/// What a host shows of itself while it computes, to those who cannot ask it: in memory that two processes share, so that
/// one of them finds what the other was doing when it died or hung.
///
///   host_board* const board = new (shared) host_board;
///   board->begin(activity::computing, model, ticket);
///   // … the model computes …
///   board->end();
///
/// One thread writes; any thread of any process reads. Times are of CLOCK_MONOTONIC, which all processes of a
/// machine share.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "runtime/server/inference/model_executor.hpp"

namespace sluice::server {

enum class activity : std::uint8_t { none, preparing, loading, computing };

class host_board {
 public:
  /// A server offers no more versions of models.
  static constexpr std::size_t max_models = 4096;

  struct action {
    activity what = activity::none;
    std::size_t model = 0;
    request_ticket request = 0;  ///< whom it computes for; 0: nobody
    std::chrono::steady_clock::time_point since;
  };

  void begin(activity what, std::size_t model, request_ticket request = 0) noexcept {
    since_ = std::chrono::steady_clock::now().time_since_epoch().count();
    model_ = model;
    request_ = request;
    what_.store(what, std::memory_order_release);
  }
  void end() noexcept { what_.store(activity::none, std::memory_order_release); }
  void set_state(std::size_t model, model_state state) noexcept { states_.at(model) = state; }

  /// Of a board that is written meanwhile it may be of two actions; whoever acts on it looks again, or at one whose
  /// writer has died.
  [[nodiscard]] std::optional<action> current() const noexcept {
    action seen;
    seen.what = what_.load(std::memory_order_acquire);
    seen.model = model_;
    seen.request = request_;
    seen.since = std::chrono::steady_clock::time_point{std::chrono::nanoseconds{since_}};
    return seen.what == activity::none ? std::nullopt : std::optional{seen};
  }
  [[nodiscard]] model_state state(std::size_t model) const noexcept { return states_.at(model); }

 private:
  std::atomic<activity> what_{activity::none};
  std::atomic<std::uint64_t> model_{0}, request_{0};
  std::atomic<std::int64_t> since_{0};
  std::array<std::atomic<model_state>, max_models> states_{};
};

}  // namespace sluice::server
