/// Who decides how long a model stays on its device: the scheduler of the server, or what others do.
///
/// A simulation tells its policy of each request and each tick, and asks how long a model may stay idle, what goes when that
/// has passed, and whether a model is to be loaded before anybody asks for it. Models are numbers from 0 on.
///
///   auto const policy = make_keeping("fixed:60s", of);
///   policy->idle_timeout(0, idle_since_s, now_s);   // 60
///
/// | description | policy |
/// |---|---|
/// | `ours` | one `scheduler::model_controller` per model, and `scheduler::reserve` per device, as the server has them |
/// | `ours:W` | the same with a reserve of that size, as `scheduler.reserve` in a policy file |
/// | `partial`, `partial:W` | the same for a loader that can leave parts of a model's weights where they are, which no server has yet |
/// | `fixed:T` | released after T without a request |
/// | `always`, `cold` | never released; released at once |
/// | `sirius`, `sirius:T/W` | idle for T (5 s): kept as reserve while that has at most 2W (1 GB); then the least asked for go until it has W |
/// | `wild` | Serverless in the Wild: by a histogram of each model's idle times loaded before the next request, and kept beyond |
/// | `clairvoyant` | knows when the next request comes: released if a load fits the gap, and loaded just in time |
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/simulator/load_costs.hpp"
#include "runtime/simulator/trace.hpp"
#include "scheduler/attainment.hpp"
#include "scheduler/warm_policy.hpp"

namespace sluice::simulator {

using model_number = std::uint32_t;

struct simulated_model {
  std::uint64_t bytes = 0;
  scheduler::objective goal{};
  scheduler::idle_limits limits{};
  unsigned device = 0;
  unsigned instances = 1;  ///< so many of its requests at once
};

/// What a policy knows beforehand.
struct keeping_inputs {
  std::vector<simulated_model> const* models = nullptr;
  trace const* requests = nullptr;  ///< looked at by the clairvoyant alone
  load_costs costs{};
  unsigned devices = 1;
  std::vector<std::uint64_t> memory_bytes{};  ///< of each device's pool; the last holds for more
  bool refuse = false;                        ///< `on_miss_predicted: reject`
  unsigned parallel = 1;                      ///< as the device computes (simulation.hpp)
  std::vector<double> slowdown{};
};

class keeping {
 public:
  keeping() = default;
  keeping(keeping const&) = delete;
  keeping& operator=(keeping const&) = delete;
  virtual ~keeping() = default;

  /// Whether all models are there when the simulation begins.
  [[nodiscard]] virtual bool begins_warm() const { return false; }
  struct admission {
    bool admitted = true;
    bool is_retry = false;       ///< it has been refused before
    double retry_after_s = 0.0;  ///< for who is refused
  };
  /// Whether it is taken. Calls come in the order of time. `number`: of the request, the same when it comes again.
  [[nodiscard]] virtual admission on_arrival(model_number /*model*/, double /*now_s*/,
                                             std::uint64_t /*number*/) {
    return {};
  }
  /// `copied_share`: of its weights, what had not stayed.
  virtual void on_load(model_number /*model*/, double /*now_s*/, double /*load_s*/,
                       double /*handover_s*/, double /*copied_share*/) {}
  /// `response_s`: since it was admitted.
  virtual void on_answer(model_number /*model*/, double /*now_s*/, double /*service_s*/,
                         double /*response_s*/, bool /*is_retry*/) {}
  /// Seconds between ticks; 0: none.
  [[nodiscard]] virtual double tick_s() const { return 0.0; }
  virtual void tick(double /*now_s*/) {}

  /// How long `model`, idle since then, may stay so. May have changed after a tick.
  [[nodiscard]] virtual double idle_timeout(model_number model, double idle_since_s,
                                            double now_s) = 0;
  /// Its time is over: adds those models that go now, of which it need not be one.
  virtual void on_idle_end(model_number model, std::vector<model_number>& go) {
    go.push_back(model);
  }
  /// What of its weights stays when it goes. May have changed after a tick: where it is less, what is more goes as well.
  [[nodiscard]] virtual double resident_share(model_number /*model*/) const { return 0.0; }
  /// What it costs a second if the model is not there: the one with least goes first where another one needs its memory, and of those that
  /// cost alike the longest idle one.
  [[nodiscard]] virtual double absence_loss(model_number /*model*/, double /*now_s*/) const {
    return 0.0;
  }
  /// It has gone for another one's sake, and nothing of it stays.
  virtual void on_evicted(model_number /*model*/) {}
  /// It has gone: when it is to be loaded unasked. May have changed after a tick.
  [[nodiscard]] virtual std::optional<double> load_at(model_number /*model*/, double /*now_s*/) {
    return std::nullopt;
  }
  /// Free bytes of a device that training must not take.
  [[nodiscard]] virtual std::uint64_t kept_free(unsigned /*device*/) const { return 0; }
  /// `bytes` were needed for a load: how many of them were free.
  [[nodiscard]] virtual std::uint64_t take_free(unsigned /*device*/, std::uint64_t /*bytes*/) {
    return 0;
  }
  virtual void give_free(unsigned /*device*/, std::uint64_t /*bytes*/) {}
  /// What it predicts now of the share in time.
  [[nodiscard]] virtual std::optional<double> predicted(model_number /*model*/) const {
    return std::nullopt;
  }
};

/// How a description is understood.
struct keeping_kind {
  enum class what { ours, fixed, sirius, wild, clairvoyant };
  what is = what::ours;
  double timeout_s = 0.0;                        ///< of `fixed` and `sirius`
  std::optional<std::uint64_t> reserve_bytes{};  ///< of `sirius`, and of `ours` if it is given
  unsigned resident_parts = 1;  ///< of `ours`: what stays of a model is a number of them
};

/// Throws `invalid_argument` with what there is.
[[nodiscard]] keeping_kind parse_keeping(std::string const& description);
[[nodiscard]] std::unique_ptr<keeping> make_keeping(std::string const& description,
                                                    keeping_inputs const& of);

}  // namespace sluice::simulator
