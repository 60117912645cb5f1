/// A process that is started before it is needed, with its libraries loaded and without orders.
///
///   none ──start──► starting ──"prepared"──► ready ──take──► it is no spare any more
///    ▲                  │ ends, fails, or takes too long │
///    └──── back-off ────┴──────── ends ──────────────────┘
///
///   spare.want({{"device", 0}});
///   if (spare.is_due(now)) {
///     spare.start(now);
///   }
///   // … once `awaited()` can be read …
///   spare.hear(now);
///   if (auto process = spare.take()) {
///     // … it is given orders …
///   }
///
/// Whatever it does harms nobody: each reason for which there is none is logged once. Nothing here waits. Not thread-safe.
#pragma once

#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "memhandover/base/unique_fd.hpp"
#include "runtime/server/executor/child_process.hpp"

namespace sluice::server::detail {

/// A process and the socket to it.
struct connected_process {
  child_process child;
  memhandover::unique_fd socket;
};

/// Throws `unsupported` if the program cannot be started, else what keeps a socket from being made.
[[nodiscard]] connected_process start_connected(std::filesystem::path const& program);

class spare_process {
 public:
  using clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds first_back_off{100}, longest_back_off{60'000};
  /// One that has been ready for so long does not end at once, again and again.
  static constexpr std::chrono::minutes proven{1};

  spare_process(std::filesystem::path program, std::chrono::milliseconds start_limit)
      : program_(std::move(program)), start_limit_(start_limit) {}

  /// From now on there is to be one, which prepares for that.
  void want(nlohmann::json preparation);
  /// Whether it is time to start one.
  [[nodiscard]] bool is_due(clock::time_point now) const;
  void start(clock::time_point now);
  /// Takes what it says, and notes that it ends.
  void hear(clock::time_point now);
  /// When `hear` or `is_due` have something to do that no descriptor tells; far away if nothing.
  [[nodiscard]] clock::time_point next_look() const;
  /// What can be read once it says something or has ended; −1: nothing.
  [[nodiscard]] int awaited() const noexcept;

  struct taken_process {
    connected_process process;
    bool was_ready = false;
  };
  /// Nothing if there is none that lives.
  [[nodiscard]] std::optional<taken_process> take();
  /// Ends it, and wants no other.
  void end();

  /// "ready", "starting" or "none".
  [[nodiscard]] std::string_view state() const noexcept;
  /// 0: none.
  [[nodiscard]] pid_t pid() const noexcept;

 private:
  enum class phase { none, starting, ready, ending };
  void take_in(nlohmann::json const& said, clock::time_point now);
  void fail(std::string why, clock::time_point now);
  void on_end(clock::time_point now);

  std::filesystem::path const program_;
  std::chrono::milliseconds const start_limit_;
  std::optional<nlohmann::json> preparation_;
  phase phase_ = phase::none;
  connected_process process_;
  memhandover::unique_fd end_;  ///< its pidfd
  clock::time_point since_;     ///< of the phase
  clock::time_point next_start_;
  std::chrono::milliseconds back_off_{0};
  std::string reason_;       ///< why this one ends, if that is known before
  std::string last_reason_;  ///< which has been logged
};

}  // namespace sluice::server::detail
