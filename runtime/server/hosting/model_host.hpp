/// Runs requests on models whose weights are in pool memory only while they are needed.
///
/// States of a model, changed by the executor alone:
///
///            request                weights in place
///   cold ────────────► loading ─────────────► warm ◄──┐ requests
///    ▲                    │                   │  └────┘
///    │ no memory, or      │                   │ idle longer than its timeout, or the memory is
///    │ the load fails     │                   ▼ needed by another model's cold start
///    └────────────────────┴────────────── releasing
///
/// *Queue*: a model computes one request at a time, first come first served, which makes it the single server of the
/// scheduler's formulas; or where its configuration says so, a batch of them (batch_choice.hpp), each of which has then taken
/// its part of that time. If a batch fails each of its requests is computed by itself, so that none fails for another's sake.
/// Models compute beside each other, as many as there are threads for that; or if there is none, one
/// after the other on the executor thread, which otherwise loads and releases. A model has
/// a bound on the requests that wait for it, and each request a deadline, at which it is answered whether
/// it still waits or is being computed; a computation that has begun is never cut short, but what comes out
/// of it then is dropped. So it is where nobody waits for the answer any more (`cancel`).
///
/// *Memory*: a cold start takes free memory, then training's, then what is free in chunks of other
/// models, then that of idle models, those whose absence costs least (scheduler/eviction.hpp). Several models may share a chunk. If
/// there is not enough, the requests that wait for the model fail and it stays cold.
///
/// *Prewarming*: a model whose requests come by a timer is loaded before the next ones are expected, where its scheduling says so
/// (`may_prewarm`). That takes free memory, and training's as far as no job has to be parked, and nothing else; it waits until the
/// executor has nothing to do for requests, is called off when it has, or when a job is owed memory, and is tried once for each time
/// that is expected. Requests of that model that come meanwhile wait for it to be done.
///
/// *Succession*: what is warm is published in the pool, so that it outlives this process. The host of a
/// server that comes after one that was killed begins with the models that were warm there and are the same
/// here (hosted_model::fingerprint), without copying a byte; one that died in the middle of a computation has
/// its weights copied anew, into the same memory. What else was left goes back to the pool.
///
/// *Experience*: what the scheduler has learnt of a model is written down every now and then, at the end, and when a server leaves its
/// models to another one. A host begins with what the last one knew of models that are the same here; nobody has watched in between.
///
/// *Images*: what a cold start copies from is read from the models' files when nothing else is to be done, step by
/// step, before the host is warmed up; but where something was taken over, that answers meanwhile, and the image
/// of such a model waits for its first answer or until it goes cold. A cold start that comes before completes it,
/// and other models' requests go before that one.
///
/// *Compute*: by policy training is paused from the arrival of a request until nothing has waited or
/// run for the hysteresis, or while a model is loaded; but not beyond what leaves training its share
/// of the time (detail/compute_pause.hpp). Requests never wait for a pause.
///
/// *Timers*: a second thread, the timekeeper, refuses late requests, asks the scheduler every tick, and
/// ends compute pauses.
///
///   model_host host{options, std::move(pool), std::move(models)};
///   host.submit(0, std::move(request), [&](infer_result result) { reply(std::move(result)); });
///   // … until it is to end …
///   if (!host.stop(10s)) {
///     // … a computation is still running, and its model keeps its memory …
///   }
///
/// *Changes*: models come, go, and are promised other things while the others compute. One that goes answers what it has.
///
/// All members may be called from any thread. `done` is called exactly once for every request, on
/// one of these threads, and never with a lock held. Nothing but `submit` wakes a model or
/// restarts its idle timer.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/client/serving_pool.hpp"
#include "runtime/server/experience/experience_file.hpp"
#include "runtime/server/hosting/compute_lease.hpp"
#include "runtime/server/hosting/latency_window.hpp"
#include "runtime/server/inference/batching.hpp"
#include "runtime/server/inference/host_board.hpp"
#include "runtime/server/inference/hosted_model.hpp"
#include "runtime/server/inference/inference_service.hpp"
#include "runtime/server/inference/model_executor.hpp"
#include "runtime/server/inference/warmup.hpp"
#include "scheduler/model_controller.hpp"

namespace sluice::server {

/// When training's launches are held.
enum class pause_mode { on_launch, on_request, on_cold_start, never };

struct host_options {
  pause_mode pause = pause_mode::on_launch;
  std::chrono::microseconds pause_hysteresis{5000};  ///< after the last request, with `on_request`
  double min_share = 0.0;  ///< in [0, 1]: share of every second in which training is not paused
  /// With `on_launch`, of somebody who sees launches and tells it of them. None: the host takes the device for used while
  /// requests are in flight. With its own `min_share`.
  std::shared_ptr<compute_lease> lease;
  /// How much predicted work training may have on the device in advance; none: as much as the
  /// tightest promise permits (scheduler/run_ahead.hpp).
  std::optional<std::chrono::microseconds> run_ahead;
  std::chrono::milliseconds tick{1000};
  /// Free memory kept from training; none: as the scheduler predicts cold starts.
  std::optional<std::uint64_t> reserve_bytes;
  /// So many models at most compute at once, each one request at a time; 0: one thread loads and computes for all.
  std::size_t computing_threads = 0;
  /// Whether threads that bring requests may compute them (`compute_here`). On a GPU each thread that computes has a stream of its
  /// own, with memory that its libraries keep.
  bool callers_compute = true;
  /// Called first on each thread that loads or computes.
  std::function<void()> thread_start;
  /// Called by a thread whose computation has left the device unable to compute any more (`hosted_model::device_works`).
  /// It is not to return: no other model could be served. None: the request alone fails.
  std::function<void(error const&)> device_failed;
  /// What is kept for the next computations is to go back to the pool: models have gone, or memory is short, or one that
  /// computed has not for `activations_kept`. May be called from several threads. None: nothing is kept.
  std::function<void()> give_back_activations;
  std::chrono::milliseconds activations_kept{10'000};
  /// What the scheduler has learnt of its models is found here, and kept for the next host; null: it is forgotten.
  std::shared_ptr<experience_file> learnt;
  /// Where it shows what it does; null: nobody looks.
  std::shared_ptr<host_board> board;
};

struct served_model {
  std::string name;
  std::string version;
  std::unique_ptr<hosted_model> model{};  ///< null: nothing is served in its place
  /// `weight_bytes` is filled in by the host. `limits` bound the idle timeout.
  scheduler::model_settings scheduling{};
  /// Loaded by `warm_up`, never released and never evicted.
  bool always_warm = false;
  std::size_t max_queue = 64;
  std::chrono::milliseconds queue_timeout{30'000};
  batching_rules batching{};
  std::vector<warmup_sample> warmup{};  ///< that `warm_up` has it compute
};

/// What `status` shows of one model.
struct model_snapshot {
  std::string name;
  std::string version;
  model_state state = model_state::cold;
  std::uint64_t bytes = 0;
  std::uint64_t requests = 0;
  std::uint64_t failed = 0;
  std::uint64_t cancelled = 0;  ///< of them, because their clients left
  std::uint64_t cold_starts = 0;
  std::uint64_t prewarms = 0;          ///< loads that nobody waited for when they began
  std::uint64_t prewarms_used = 0;     ///< of them, with a request before the model went again
  std::uint64_t prewarms_omitted = 0;  ///< that were due, and came to nothing
  std::size_t queue = 0;               ///< waiting and running
  bool always_warm = false;
  bool outlives_server =
      false;  ///< if this process is killed now, its successor begins with it warm
  std::uint64_t image_bytes = 0;       ///< of `bytes`, what lies ready on the host for a cold start
  std::uint64_t read_bytes = 0;        ///< of its file
  std::uint64_t activation_bytes = 0;  ///< `hosted_model::activation_bytes`
  scheduler::objective goal;
  scheduler::model_report report;  ///< of the last tick
  /// In force instead of `report.warm.chosen`: all models want more memory than there is, and this was chosen for all.
  std::optional<scheduler::prediction> together{};
};

struct host_snapshot {
  struct handover {
    std::string model;
    memhandover::handover_report report;
    std::chrono::nanoseconds load{};  ///< weights copied, after the handover
    std::chrono::system_clock::time_point at;
  };
  std::vector<model_snapshot> models;
  std::uint64_t requests = 0;
  std::uint64_t failed = 0;
  std::size_t in_flight = 0;
  latency_window::quantiles warm, cold;
  pause_counts pauses;
  std::vector<std::string>
      cut_short_models;            ///< that were computing when a pause was last cut short
  std::deque<handover> handovers;  ///< the last ones, oldest first
};

class model_host final : public model_executor {
 public:
  static constexpr std::size_t kept_handovers = 64;

  /// Starts its threads. `models` are told apart by name and version. Throws `invalid_argument` for
  /// settings that the scheduler refuses.
  model_host(host_options options, std::shared_ptr<memhandover::serving_pool> pool,
             std::vector<served_model> models);
  ~model_host() override;
  model_host(model_host const&) = delete;
  model_host& operator=(model_host const&) = delete;
  model_host(model_host&&) = delete;
  model_host& operator=(model_host&&) = delete;

  /// Takes over what an earlier server has left, loads the models that are always warm, and returns when
  /// that is done; unless something was taken over, also the images of all models, whose failure it throws, and the samples of
  /// their warm-ups, for which they are loaded. One that cannot be loaded, or computed, is logged; its first request tries again. False if `given_up`, which is asked between
  /// two steps, says so.
  bool warm_up(std::function<bool()> const& given_up = [] { return false; });

  [[nodiscard]] model_state state(model_index model) const override;

  /// Serves one more from now on: in the place behind the last one, or in that of one that has been retired, as soon as that one
  /// has left; the samples of its warm-up are computed first. Throws `invalid_argument` for settings that the scheduler refuses, `unavailable` while shutting down.
  void put(model_index place, served_model model);
  /// The model stays; the scheduler knows nothing of its past. Of `to` its scheduling, `always_warm` and the bounds of its queue
  /// count. Throws as `put`.
  void revise(model_index place, served_model to);
  /// Takes no more requests for it. It leaves, and gives its memory back, when those that it has are answered.
  void retire(model_index place);

  /// Queues a request for the model of that index in the constructor's list. The failures that
  /// `done` may get: `unavailable` (queue full, shutting down, or the scheduler refuses),
  /// `deadline_exceeded`, `cancelled`, `out_of_memory`, and what the model throws. Returns what `cancel`
  /// takes.
  request_ticket submit(model_index model, infer_request request, completion done) override;
  void cancel(request_ticket which) override;
  void prepare_to_compute() override;
  request_ticket bring(model_index model, infer_request request, completion done) override;
  bool compute_here() override;
  void keep_warm() override;
  void announce_engine() override;
  void note_refused(model_index model, std::uint64_t mark,
                    std::chrono::milliseconds retry_after) override;

  [[nodiscard]] host_snapshot snapshot() const;
  /// The same, as the status has it.
  [[nodiscard]] nlohmann::json status() const override;

  /// Takes no more requests, finishes those it has within `grace` and fails the rest, then gives
  /// all memory back. Returns whether that has happened: if false, a computation was still running,
  /// the models keep their memory, and destroying the host would wait for it. Calling it again
  /// waits again.
  [[nodiscard]] bool stop(std::chrono::milliseconds grace);

 private:
  class impl;
  std::unique_ptr<impl> impl_;
};

}  // namespace sluice::server
