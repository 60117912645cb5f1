/// Who computes for the models that a server offers, in this process or in another. Models are named by their place in
/// the list that it was made with.
///
/// All members may be called from any thread, and none of them waits for a computation.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

enum class model_state { cold, loading, warm, releasing };
[[nodiscard]] constexpr std::string_view to_string(model_state state) noexcept {
  switch (state) {
    case model_state::cold:
      return "cold";
    case model_state::loading:
      return "loading";
    case model_state::warm:
      return "warm";
    case model_state::releasing:
      return "releasing";
  }
  return "cold";
}

/// Of a model that nothing else keeps from being used: its reason is its state.
[[nodiscard]] inline readiness readiness_of(model_state state) {
  return state == model_state::warm ? readiness{} : readiness{false, std::string{to_string(state)}};
}

/// To whom asks for a model that is served no more.
[[nodiscard]] inline error not_served(std::string const& model) {
  return {error_kind::unavailable, "model '" + model + "' is not served any more"};
}

class model_executor {
 public:
  using model_index = std::size_t;
  using completion = std::function<void(infer_result)>;

  virtual ~model_executor() = default;

  /// Whether requests would be computed now, and not wait for it to come back.
  [[nodiscard]] virtual readiness ready() const { return {}; }
  [[nodiscard]] virtual model_state state(model_index model) const = 0;
  /// See inference_service.hpp.
  [[nodiscard]] virtual readiness model_ready(model_index model) const {
    return readiness_of(state(model));
  }
  /// Why it cannot be served at all, if it cannot.
  [[nodiscard]] virtual std::optional<error> unservable(model_index /*model*/) const {
    return std::nullopt;
  }
  /// Runs a request; `done` is called exactly once, before this returns or on a thread of its own. Returns what
  /// `cancel` takes.
  virtual request_ticket submit(model_index model, infer_request request, completion done) = 0;
  /// The same, by a thread that asks for `compute_here` next: nobody is woken who would compute it instead.
  virtual request_ticket bring(model_index model, infer_request request, completion done) {
    return submit(model, std::move(request), std::move(done));
  }
  /// Computes one of those who wait on the calling thread, if that is known to take little time. False if there is none;
  /// what waits is somebody else's to compute. After `prepare_to_compute` of that thread.
  virtual bool compute_here() { return false; }
  virtual void prepare_to_compute() {}
  /// See inference_service.hpp.
  virtual void cancel(request_ticket which) = 0;
  /// From now on no model is released for being idle: its server ends, and leaves them.
  virtual void keep_warm() {}
  /// An engine whose memory is the pool's has been given a request: it will have the device compute soon.
  virtual void announce_engine() {}
  /// Somebody in front has refused a request of the model, which would have come too late: it was asked for, and missed.
  /// `mark` stands for what its client calls it, as in infer_request.
  virtual void note_refused(model_index /*model*/, std::uint64_t /*mark*/,
                            std::chrono::milliseconds /*retry_after*/) {}
  /// What the status says of models, requests, latencies, pauses and handovers (docs/operations.md). May take a
  /// second where it is another process that does not answer.
  [[nodiscard]] virtual nlohmann::json status() const = 0;
};

}  // namespace sluice::server
