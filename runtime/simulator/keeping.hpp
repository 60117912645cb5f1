/// Who decides how long a model stays on its device: the scheduler of the server, or what others do.
///
/// A simulation tells its policy of each request and each tick, and asks how long a model may stay idle, what goes when that
/// has passed, and whether a model is to be loaded before anybody asks for it. Models are numbers from 0 on.
///
///   auto const policy = make_keeping("fixed:60s", of);
///   policy->idle_timeout(0, now_s);   // 60
///
/// | description | policy |
/// |---|---|
/// | `ours` | one `scheduler::model_controller` per model, and `scheduler::reserve` per device, as the server has them |
/// | `ours:W` | the same with a reserve of that size, as `scheduler.reserve` in a policy file |
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
  std::uint64_t memory_bytes = 0;  ///< of a device's pool
  bool refuse = false;             ///< `on_miss_predicted: reject`
};

class keeping {
 public:
  keeping() = default;
  keeping(keeping const&) = delete;
  keeping& operator=(keeping const&) = delete;
  virtual ~keeping() = default;

  /// Whether all models are there when the simulation begins.
  [[nodiscard]] virtual bool begins_warm() const { return false; }
  /// Whether it is taken. Calls come in the order of time.
  [[nodiscard]] virtual bool on_arrival(model_number /*model*/, double /*now_s*/) { return true; }
  virtual void on_load(model_number /*model*/, double /*now_s*/, double /*load_s*/,
                       double /*handover_s*/) {}
  virtual void on_answer(model_number /*model*/, double /*now_s*/, double /*service_s*/,
                         double /*response_s*/) {}
  /// Seconds between ticks; 0: none.
  [[nodiscard]] virtual double tick_s() const { return 0.0; }
  virtual void tick(double /*now_s*/) {}

  /// How long `model`, idle since some time, may stay so. May have changed after a tick.
  [[nodiscard]] virtual double idle_timeout(model_number model, double now_s) = 0;
  /// Its time is over: adds those models that go now, of which it need not be one.
  virtual void on_idle_end(model_number model, std::vector<model_number>& go) {
    go.push_back(model);
  }
  /// It has gone: when it is to be loaded unasked.
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
};

/// Throws `invalid_argument` with what there is.
[[nodiscard]] keeping_kind parse_keeping(std::string const& description);
[[nodiscard]] std::unique_ptr<keeping> make_keeping(std::string const& description,
                                                    keeping_inputs const& of);

}  // namespace sluice::simulator
