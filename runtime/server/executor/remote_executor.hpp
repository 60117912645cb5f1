/// An executor in a process of its own, which is started, watched, and replaced when it ends.
///
///   starting ──ready──► serving ──the process ends, hangs or does not answer──► starting …
///
/// Who waits for an answer when the process ends is given to the next one, in the order in which they came, but for the
/// request that it was computing: that one is answered `aborted`, or `deadline_exceeded`, and is an offence of its
/// model's (model_health.hpp), unless somebody has killed the process. A computation that takes longer than
/// `compute_limit` is a hang, and ended.
/// Requests of a model that has failed are refused as `unavailable` for a time, and so is one that could not be answered
/// in time, by what is before it and by how long computations have taken (scheduler/admission.hpp).
///
/// If wanted, a spare process has its libraries loaded by then (detail/spare_process.hpp). It is started once another serves
/// and has answered what had waited for it.
///
/// Every request has a deadline, at which it is answered whatever the process does.
///
/// Models come and go while it serves (`change`), without disturbing each other: the process prepares what comes beside what it
/// computes. One that ends it meanwhile is left out from then on, until it is changed again.
///
///   remote_executor executor{options};
///   if (!executor.wait_until_ready(given_up)) return;   // throws why the first one has failed
///   executor.submit(0, std::move(request), [&](infer_result got) { reply(std::move(got)); });
///   if (!executor.stop(1s)) {
///     // … a computation was cut short …
///   }
///
/// The process is told what to serve, and says when it can (executor_session.hpp). A thread of this object, the
/// supervisor, reads from it and calls `done`, or a second one where the answer is large. While it serves, `options::reader`
/// may read instead.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/server/inference/model_executor.hpp"
#include "runtime/server/inference/socket_watcher.hpp"

namespace sluice::server {

class remote_executor final : public model_executor {
 public:
  struct served {
    std::string name;
    std::string version;
    std::size_t max_queue = 64;
    std::chrono::milliseconds queue_timeout{30'000};
    bool is_retired = false;  ///< it takes no more requests
    bool foretells = false;   ///< of each request it is said when its answer is expected
  };
  /// What is served, by place.
  struct orders {
    nlohmann::json settings;  ///< executor_orders::settings
    std::string policy;       ///< executor_orders::policy
    std::vector<served> models;
  };
  struct options {
    std::filesystem::path program;
    orders first;
    std::chrono::milliseconds compute_limit{30'000};
    /// Whether models are computed one after the other, and not beside each other.
    bool one_by_one = false;
    /// How long one that has said nothing is waited for once it has been asked to.
    std::chrono::milliseconds answer_limit{30'000};
    /// Whether another process is kept that has its libraries loaded, and takes the place of one that ends.
    bool spare = false;
    /// How long that may take to load them.
    std::chrono::milliseconds spare_limit{120'000};
    /// How long one that computes nothing may take to end in order, which is a matter of how busy the machine is.
    std::chrono::milliseconds end_limit{10'000};
    /// Who reads results where the process serves, so that its threads go on with them at once. It outlives the executor, or has
    /// been stopped. Null: the supervisor does.
    socket_watcher* reader = nullptr;
  };

  /// Throws `unsupported` if the program cannot be started or there are more models than a board holds.
  explicit remote_executor(options how);
  ~remote_executor() override;
  remote_executor(remote_executor const&) = delete;
  remote_executor& operator=(remote_executor const&) = delete;
  remote_executor(remote_executor&&) = delete;
  remote_executor& operator=(remote_executor&&) = delete;

  /// False if `given_up`, which is asked now and then, says so. Throws what the first process has failed with.
  [[nodiscard]] bool wait_until_ready(std::function<bool()> const& given_up = [] { return false; });

  /// Serves something else from now on: models behind those that there were, others in the places of retired ones that
  /// are free, or the same with other promises. Returns when a process has carried that out; false if it is stopped before. What
  /// cannot be served then says `unservable`. Throws `unsupported` if there are more models than a board holds.
  [[nodiscard]] bool change(orders to);
  /// From now on `change` waits for nothing: the server ends.
  void end_changes();
  /// It is retired, and nobody waits for it.
  [[nodiscard]] bool is_free(model_index place) const;

  [[nodiscard]] readiness ready() const override;
  [[nodiscard]] model_state state(model_index model) const override;
  [[nodiscard]] readiness model_ready(model_index model) const override;
  [[nodiscard]] std::optional<error> unservable(model_index model) const override;
  request_ticket submit(model_index model, infer_request request, completion done) override;
  void cancel(request_ticket which) override;
  void keep_warm() override;
  void announce_engine() override;
  [[nodiscard]] nlohmann::json status() const override;

  /// Ends the process as if this one had been killed: what it has published waits for a successor. As `stop` otherwise.
  void leave();

  /// Ends the process, which gives all memory back. One that still computes after `grace` is killed, as is one that has not ended
  /// within `end_limit` or has ended badly: then false is returned. One that only starts has nothing to give back, and is killed at
  /// once. Requests that are not answered by then are `unavailable`. Calling it again does nothing.
  [[nodiscard]] bool stop(std::chrono::milliseconds grace);

 private:
  class impl;
  std::unique_ptr<impl> impl_;
};

}  // namespace sluice::server
