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
/// Queries such as health or metadata are not arrivals. Not thread-safe: one thread at a time (the
/// model's strand or lock). Reads no clock. The constructor throws `std::invalid_argument` for
/// settings that contradict themselves.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "scheduler/calibration.hpp"
#include "scheduler/estimators.hpp"
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

class model_controller {
 public:
  struct admission {
    bool admitted = true;
    seconds retry_after{0.0};
  };

  model_controller(model_settings const& settings, instant start);

  /// A request came in. The answer follows the last tick: of the refused share, every so-many-th is
  /// refused.
  [[nodiscard]] admission on_arrival(instant now);
  /// A request came in that somebody before has refused: it counts as asked for, and as not within the latency.
  void on_refused_elsewhere(instant now);
  /// A request was answered. `service` excludes load and queueing; `response` includes both.
  void on_service(instant now, seconds service, seconds response);
  /// A request that has failed already, or that nobody waits for, was computed all the same.
  void on_late_service(seconds service);
  /// An admitted request failed or timed out: it counts as not within the latency.
  void on_failure(instant now);
  /// The model became ready `load` after it was asked for; `handover` of that was spent on getting
  /// memory.
  void on_load(instant now, seconds load, seconds handover = seconds{0.0});

  /// `beside`: what other models of its device ask for (shared_executors.hpp).
  [[nodiscard]] model_report tick(instant now, shared_load const& beside = {});
  /// Renews what `report` says has been observed; the decision stays. Costs far less than a tick.
  void observe(instant now, model_report& report);
  /// What it asks of its device, for the predictions of all that share it.
  [[nodiscard]] shared_model demand(instant now) const;
  /// Whether what the last decision rests on has moved by more than its own noise since then. Until it has, and before
  /// `due`, another tick would decide the same but for that noise.
  [[nodiscard]] bool has_news() const noexcept { return has_news_; }
  /// When the silence of a model alone makes another decision worth while.
  [[nodiscard]] instant due() const noexcept { return due_; }

  /// In force since the last tick; before the first, `max_idle`.
  [[nodiscard]] seconds idle_timeout() const noexcept { return idle_timeout_; }

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
  };
  void note_decision(instant now, double planned, warm_decision const& made);
  void note_arrival(instant now);
  void note_answer(bool within);
  [[nodiscard]] seconds admission_step() const noexcept;
  void learn_from_answers(instant now);
  [[nodiscard]] warm_inputs inputs(instant now, shared_load const& beside);
  [[nodiscard]] bool rate_has_moved(instant now) const;

  model_settings settings_;
  arrival_rates rates_;
  gap_histogram gaps_;
  std::array<dispersion_index, 3> dispersions_;
  duration_window services_;
  duration_window loads_;
  attainment_window attained_;
  seconds handover_total_{0.0};
  std::optional<instant> last_arrival_;
  std::uint64_t arrivals_ = 0;
  std::uint64_t refused_ = 0;
  seconds idle_timeout_;
  std::optional<seconds> decided_;
  double admit_share_ = 1.0;
  double admit_credit_ = 0.0;  // in [0, 1): grows by the share per arrival, and one whole admits
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
