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
/// A host may leave its engines to that of the next server, which finds them (`meet`, `adopt`): one that is as wanted goes on as it is
/// there, ready or parked, once this one has left it; another is ended when nobody uses it any more, and what is wanted instead waits for
/// that.
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
    int device = 0;  ///< of the server's pool: its engines are met by no other
    std::chrono::milliseconds patience{
        std::chrono::minutes{1}};  ///< of what is left, for a successor
  };

  explicit engine_host(options how);
  ~engine_host() override;
  engine_host(engine_host const&) = delete;
  engine_host& operator=(engine_host const&) = delete;
  engine_host(engine_host&&) = delete;
  engine_host& operator=(engine_host&&) = delete;

  /// From now on engines start as tenants of that pool, unless their policy says otherwise. Once, before `start`.
  void attach(engine_tenancy::access pool);
  /// Looks for engines that another server has started, or has left. How many there are.
  std::size_t meet();
  /// Asks for those that have been met. Once, after `attach` if that is called at all, and before `start`.
  void adopt();
  /// How many have become this host's.
  [[nodiscard]] std::size_t adopted() const;
  void start();
  /// From now on it is called when an engine of the pool's that has rested is given a request; from any thread, and it must not wait.
  void set_announcer(std::function<void()> announce);
  /// From now on they are kept warm as these policies of the same engines say; all else of them stays.
  void change(std::vector<policy::model_policy> const& wanted);
  /// Refuses requests from now on.
  void drain();
  /// Leaves them to a successor: starts none any more, and uses those that there are for requests that come still.
  void leave();
  /// Refuses requests from now on; each engine is given away with the last that it has.
  void release();
  /// Requests that it has, or keeps waiting.
  [[nodiscard]] std::size_t in_flight() const;
  /// Has all engines that have not been left end, in order until `grace` has passed, and returns when they have.
  void stop(std::chrono::milliseconds grace);

  [[nodiscard]] std::optional<engine_route> find(std::string_view target) const override;
  [[nodiscard]] std::optional<std::size_t> find_model(std::string_view name) const override;
  [[nodiscard]] std::vector<std::string> model_names() const override;
  [[nodiscard]] nlohmann::json models() const override;
  [[nodiscard]] std::string const& name_of(std::size_t engine) const override;
  [[nodiscard]] engine_limits limits_of(std::size_t engine) const override;
  engine_ticket enter(std::size_t engine, std::function<void(engine_admission)> admitted) override;
  engine_connection reuse(engine_ticket which) override;
  void keep(engine_ticket which, engine_connection connection) override;
  void note_tokens(engine_ticket which, token_times const& came) override;
  void send_back(engine_ticket which) override;
  void leave(engine_ticket which, relay_report const& report) override;

  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] std::optional<std::size_t> place_of(std::string_view name) const;
  /// What an engine said of its model when it could be asked. Throws `unavailable` where it has said nothing yet; of one that is not
  /// asked there is no more than its name, and no configuration (`unsupported`).
  [[nodiscard]] model_metadata metadata(std::string const& model, std::string const& version) const;
  [[nodiscard]] nlohmann::json config(std::string const& model, std::string const& version) const;
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
