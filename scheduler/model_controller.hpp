/// All that the server needs of the scheduler for one model: it reports events, and asks each tick
/// how long the model may stay idle on the device.
///
/// Life: the server makes one controller per model and tells it of every arrival (also of those it
/// refuses), every answered or failed request and every load; `tick`, about once a second, learns
/// from that and returns the decision.
///
///   model_controller model{{.goal = slo, .weight_bytes = 90_MiB, .load = {.mean = 40ms}}, now};
///   if (auto const answer = model.on_arrival(now); !answer.admitted) {
///     refuse(answer.retry_after);
///   }
///   // … load the model if need be, and answer …
///   model.on_load(now, load_time, handover_time);
///   model.on_service(now, service_time, response_time);
///   idle_timer = model.tick(now).warm.chosen.idle_timeout;
///
/// A request that was refused, and that its client sends again under the same name, has been asked for once, and missed, whatever
/// becomes of it then.
///
/// What it has learnt outlives it: `learnt` is a value, which another one, of a server that comes later, may `recall`:
///
///   model_controller next{settings, now};
///   next.recall(model.learnt(now), 30s, now);   // nobody watched for 30 s
///
/// Queries such as health or metadata are not arrivals. Not thread-safe: one thread at a time (the
/// model's strand or lock). Reads no clock. The constructor throws `std::invalid_argument` for
/// settings that contradict themselves.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "scheduler/calibration.hpp"
#include "scheduler/estimators.hpp"
#include "scheduler/periods.hpp"
#include "scheduler/retries.hpp"
#include "scheduler/shared_executors.hpp"
#include "scheduler/units.hpp"
#include "scheduler/warm_policy.hpp"

namespace sluice::scheduler {

struct model_settings {
  objective goal{};
  std::uint64_t weight_bytes = 0;
  idle_limits limits{};
  duration_prior service{.mean = seconds{0.01}, .scv = 1.0};  ///< of one request, without a load
  duration_prior load{.mean = seconds{1.0}, .scv = 0.25};     ///< demand for memory until ready
  bool reject_on_miss = false;  ///< policy `on_miss_predicted: reject`
  /// Whoever asks loads the model when `prewarm_at` says so, and lets it go by `idle_timeout_since`.
  bool may_prewarm = false;
  /// Whoever asks leaves `resident_share` of the weights where they are when the model goes, and loads the rest: any number below of so many equal
  /// parts.
  unsigned resident_parts = 1;
};

/// The decision of a tick, with what has been observed so far.
struct model_report {
  warm_decision warm;
  std::optional<double> observed_attainment;  ///< share within the latency, in the objective's
                                              ///< window, the refused among the others; none if no
                                              ///< request
  std::uint64_t observed_requests = 0;        ///< in that window
  /// Half of the interval in which the admitted requests' share is expected around `warm.chosen.uncorrected`, by what it
  /// varied by; 1 before 30 answers.
  double half_width = 1.0;
  double fast_rate_per_s = 0.0;
  double slow_rate_per_s = 0.0;
  /// Index of dispersion at the time scale of a load or of a backlog.
  std::optional<double> dispersion;
  bool bursty = false;  ///< dispersion above 2: waits are planned for the rate inside bursts
  std::uint64_t arrivals = 0;
  std::uint64_t refused = 0;
  std::uint64_t services = 0;
  std::uint64_t loads = 0;
  std::optional<seconds> handover_mean;  ///< part of the load that memory took to arrive
};

/// What a controller has learnt, as plain numbers.
struct experience {
  seconds latency{0.0};  ///< what answers were held against
  seconds window{0.0};
  arrival_rates::kept_state rates{};
  gap_histogram::kept_state gaps{};
  std::array<dispersion_index::kept_state, 3> dispersions{};
  period_estimator::kept_state periods{};
  duration_window::kept_state services{}, loads{};
  seconds handover{0.0};  ///< mean of those loads that had to wait for memory
  double handovers = 0.0;
  attainment_window::kept_state attained{};
  calibration::kept_state corrections{};
  std::optional<seconds> idle_timeout{};  ///< in force
};

class model_controller {
 public:
  struct admission {
    bool admitted = true;
    seconds retry_after{0.0};
    bool is_retry = false;  ///< it has been refused before
  };

  model_controller(model_settings const& settings, instant start);

  /// A request came in. `request`: what its client calls it (retries.hpp). `expected`: how long its answer will take from its arrival,
  /// where somebody foretells that of each; one that would be late is refused then, where too many of those that were admitted in the
  /// last window have been. Else the answer follows the last tick: of the refused share, every so-many-th is refused.
  [[nodiscard]] admission on_arrival(instant now, request_mark request = 0,
                                     std::optional<seconds> expected = std::nullopt);
  /// A request came in that somebody before has refused: it counts as asked for, and as not within the latency, unless it has been
  /// refused before.
  void on_refused_elsewhere(instant now, request_mark request = 0,
                            seconds retry_after = seconds{0.0});
  /// One that was admitted is refused for another reason: as if it had failed.
  void on_turned_away(instant now, bool is_retry, request_mark request,
                      seconds retry_after = seconds{0.0});
  /// A request was answered. `service` excludes load and queueing; `response` includes both. `is_retry`: as `on_arrival` said.
  void on_service(instant now, seconds service, seconds response, bool is_retry = false);
  /// A request that has failed already, or that nobody waits for, was computed all the same.
  void on_late_service(seconds service);
  /// An admitted request failed or timed out: it counts as not within the latency.
  void on_failure(instant now, bool is_retry = false);
  /// The model became ready `load` after it was asked for; `handover` of that was spent on getting
  /// memory, and what was not there yet of its weights, `copied_share` in (0, 1], took the rest.
  void on_load(instant now, seconds load, seconds handover = seconds{0.0},
               double copied_share = 1.0);

  [[nodiscard]] experience learnt(instant now);
  /// Begins with what another one had learnt `age` ago; what was promised in other words then is not held against this promise.
  /// Totals of the report are of what this one is told. Throws `std::invalid_argument` for what cannot have been learnt; then nothing
  /// has changed.
  void recall(experience const& from, seconds age, instant now);

  /// `beside`: what other models of its device ask for (shared_executors.hpp).
  [[nodiscard]] model_report tick(instant now, shared_load const& beside = {});
  /// Renews what `report` says has been observed; the decision stays. Costs far less than a tick.
  void observe(instant now, model_report& report);
  /// What it asks of its device, for the predictions of all that share it.
  [[nodiscard]] shared_model demand(instant now) const;
  /// What it costs a second if the model is not on the device (eviction.hpp): the rate of its requests times what a cold start costs, in
  /// misses that the objective permits; by the last decision, and by how long nobody has asked. Grows with what a load takes where cold starts
  /// are in time.
  [[nodiscard]] double absence_loss(instant now) const noexcept;
  /// Whether what the last decision rests on has moved by more than its own noise since then. Until it has, and before
  /// `due`, another tick would decide the same but for that noise.
  [[nodiscard]] bool has_news() const noexcept { return has_news_; }
  /// When the silence of a model alone makes another decision worth while.
  [[nodiscard]] instant due() const noexcept { return due_; }

  /// From now on; what has been decided is brought within them.
  void set_limits(idle_limits const& limits);
  /// In force since the last tick; before the first, `max_idle`. Without prewarming.
  [[nodiscard]] seconds idle_timeout() const noexcept { return idle_timeout_; }
  /// What of its weights stays when it goes, by the last tick.
  [[nodiscard]] double resident_share() const noexcept;
  /// How long it may stay when it has been idle since then: the same, but where it is prewarmed only until a bunch is over, and
  /// before the next one until that has come or is late; `is_prewarmed`: it was loaded for that, and nobody has asked yet, so that it
  /// stays however soon it was there.
  [[nodiscard]] seconds idle_timeout_since(instant idle_since, instant now,
                                           bool is_prewarmed = false) const noexcept;
  /// When to load it if it is not there and nobody asks until then, which may be now.
  [[nodiscard]] std::optional<instant> prewarm_at(instant now) const noexcept;

 private:
  struct burst {
    std::optional<double> dispersion;
    double rate_per_s = 0.0;
  };
  [[nodiscard]] burst burst_around(instant now, distribution const& service,
                                   distribution const& load);

  /// What a decision rests on, as far as it is looked at again.
  struct basis {
    double rate_per_s = 0.0;
    double rate_tolerance = 0.0;  // of its logarithm
    double service_s = 0.0;
    std::uint64_t arrivals = 0, services = 0, loads = 0;
    std::uint64_t period_changes = 0;
  };
  void note_decision(instant now, double planned, warm_decision const& made);
  void note_arrival(instant now);
  void note_answer(bool within);
  void note_outcome(instant now, bool within, bool is_retry);
  [[nodiscard]] bool breaks_promise(instant now, seconds expected);
  [[nodiscard]] bool takes_turn();
  [[nodiscard]] std::optional<double> missed_share(instant now);
  [[nodiscard]] seconds admission_step() const noexcept;
  void learn_from_answers(instant now);
  [[nodiscard]] warm_inputs inputs(instant now, shared_load const& beside);
  [[nodiscard]] bool rate_has_moved(instant now) const;

  model_settings settings_;
  arrival_rates rates_;
  decayed_rate attempts_;  // as the fast rate, of requests that come again as well
  retries retries_;
  gap_histogram gaps_;
  period_estimator periods_;
  copy_time copies_{};
  unsigned parts_ = 0;  ///< that stay, without prewarming
  std::optional<prewarming> prewarm_;
  std::array<dispersion_index, 3> dispersions_;
  duration_window services_;
  duration_window loads_;
  attainment_window attained_;
  attainment_window kept_;      // of those that were admitted
  attainment_window foretold_;  // the same, when they came
  attainment_window admitted_;  // of all tries
  double admitted_share_ = 1.0, required_share_ = 1.0;
  bool is_foretold_ = false;   // when each answer will come
  bool helps_others_ = false;  // to refuse one: by itself a request is in time
  decayed_rate asked_;         // over many windows
  decayed_rate missed_;        // of those
  seconds handover_total_{0.0};
  seconds handover_{0.0};  // of loads whose memory was not free
  double handovers_ = 0.0;
  std::optional<instant> last_arrival_;
  std::uint64_t arrivals_ = 0;
  std::uint64_t refused_ = 0;
  seconds idle_timeout_;
  std::optional<seconds> decided_;
  double cold_start_cost_ = 1.0;
  double admit_share_ = 1.0;
  double new_share_ = 1.0;     // of what comes in: what has not been refused before
  double admit_credit_ = 0.0;  // in [0, 1): grows by both shares per arrival, and one whole admits
  seconds retry_after_{0.0};
  calibration calibration_;
  double predicted_ = 1.0;  // of the admitted, since the last tick, before it is corrected
  double believed_ = 1.0;   // and after
  std::uint64_t answers_ = 0, answers_within_ = 0;  // since then
  instant learned_;
  instant admission_changed_;
  shortfall explained_ = shortfall::none;
  std::optional<warm_decision::remedy> would_do_;
  basis basis_;
  bool has_news_ = true;
  instant due_ = instant::min();
};

}  // namespace sluice::scheduler
