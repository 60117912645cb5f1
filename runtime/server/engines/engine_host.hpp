/// Keeps the engines of a server: starts them, one at a time, watches over them, and gives requests places at them.
///
///   engine_host engines{options};
///   engines.start();                                  // those of `at_boot`
///   auto const ticket = engines.enter(0, admitted);   // starts it if it is cold
///   engines.stop(10s);
///
/// States of an engine:
///
///   cold → queued → starting → ready      one of all starts at a time; ready when its probe says so
///            ▲         │         │
///            │         ▼         ▼
///            └────── failed / cold        after a pause that doubles with each failure in a row (`restart_delay`)
///
///   ready ──idle──► parking ──► parked ──request──► waking ──► ready      its memory in the pool goes to host copies, and back
///     ▲               │  └──────request──────────────┘  │
///     └──cannot be────┘          parking ◄──no memory───┘
///
/// Of at_boot, and where requests wait, it goes on by itself; of on_demand the next request has it started. While a start has
/// failed and its pause has not passed, requests are refused with the reason.
///
/// Threads: one of its own, on which everything happens but `enter`, `leave` and what asks for a state: those may be called from
/// anywhere.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/policy/policy.hpp"
#include "runtime/server/engines/engine_tenancy.hpp"
#include "runtime/server/inference/engine_gateway.hpp"
#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// How long after its end an engine is started again that has failed `in_a_row` times.
[[nodiscard]] std::chrono::milliseconds restart_delay(unsigned in_a_row) noexcept;

class engine_host final : public engine_gateway {
 public:
  struct options {
    std::vector<policy::model_policy> engines;  ///< each with its `engine`
    std::chrono::microseconds request_timeout{};
    std::filesystem::path keeper;          ///< the program that keeps one (engine_process.hpp)
    std::filesystem::path folder;          ///< in which commands run
    std::filesystem::path runtime_folder;  ///< of logs and sockets
    std::vector<std::string> environment;  ///< NAME=value, to which each adds its own
  };

  explicit engine_host(options how);
  ~engine_host() override;
  engine_host(engine_host const&) = delete;
  engine_host& operator=(engine_host const&) = delete;
  engine_host(engine_host&&) = delete;
  engine_host& operator=(engine_host&&) = delete;

  /// From now on engines start as tenants of that pool, unless their policy says otherwise. Once, before `start`.
  void attach(engine_tenancy::access pool);
  void start();
  /// Refuses requests from now on.
  void drain();
  /// Has all engines end, in order until `grace` has passed, and returns when they have.
  void stop(std::chrono::milliseconds grace);

  [[nodiscard]] std::optional<std::size_t> find(std::string_view target) const override;
  [[nodiscard]] std::string const& name_of(std::size_t engine) const override;
  [[nodiscard]] engine_limits limits_of(std::size_t engine) const override;
  engine_ticket enter(std::size_t engine, std::function<void(engine_admission)> admitted) override;
  void send_back(engine_ticket which) override;
  void leave(engine_ticket which, relay_report const& report) override;

  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] std::optional<std::size_t> place_of(std::string_view name) const;
  /// Whether it can be asked now; the reason begins with its state.
  [[nodiscard]] readiness ready(std::size_t engine) const;
  /// What keeps the server from being ready: engines that cannot be started, and those of at_boot that are not yet.
  [[nodiscard]] std::vector<std::string> faults() const;
  /// A list, as docs/operations.md describes it.
  [[nodiscard]] nlohmann::json status() const;

 private:
  class impl;
  std::unique_ptr<impl> impl_;
};

}  // namespace sluice::server
