/// What the server itself keeps of one version of a model, whichever process computes it: how many requests, how long they
/// took, and what of its failures has been logged.
///
///   model_account account{"add", "1"};
///   account.on_answer(result, 3ms, 1);
///   account.statistics().success.count;   // 1
///
/// Thread-safe.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/server/inference/inference_service.hpp"
#include "runtime/telemetry/recurring_lines.hpp"

namespace sluice::server {

/// Why a request failed, in Triton's words.
enum class failure_reason { rejected, canceled, backend, other };
inline constexpr std::array<std::string_view, 4> failure_reason_names{"REJECTED", "CANCELED",
                                                                      "BACKEND", "OTHER"};
[[nodiscard]] failure_reason reason_of(error_kind kind) noexcept;

/// Of one version of a model, since the server started.
struct model_statistics {
  struct duration {
    std::uint64_t count = 0;
    std::chrono::nanoseconds total{};
  };
  /// How many were answered within how long.
  struct distribution {
    /// In seconds.
    static constexpr std::array bounds{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                       0.25,   0.5,   1.0,    2.5,   5.0,  10.0,  30.0};
    std::array<std::uint64_t, bounds.size() + 1> counts{};  ///< the last one: beyond
    std::chrono::nanoseconds total{};

    void add(std::chrono::nanoseconds took);
  };
  std::string model, version;
  duration success, fail;        ///< from its arrival until its answer
  duration queue, compute;       ///< of those that succeeded
  distribution warm, cold;       ///< of these, by whether they found their model warm
  std::uint64_t inferences = 0;  ///< of those, samples
  std::map<std::uint64_t, duration> computations;                     ///< by their samples
  std::array<std::uint64_t, failure_reason_names.size()> failures{};  ///< by `failure_reason`
  std::chrono::system_clock::time_point last_inference;               ///< the epoch: none yet

  /// How many computations there were, of one or more requests each.
  [[nodiscard]] std::uint64_t computed() const;
};

/// As Triton's statistics extension has it (docs/protocol.md).
[[nodiscard]] nlohmann::json describe(model_statistics const& seen);

class model_account {
 public:
  model_account(std::string name, std::string version) {
    seen_.model = std::move(name);
    seen_.version = std::move(version);
  }

  /// To a request of so many `samples`, after it `took` so long in all.
  /// `id` is what the request calls itself.
  void on_answer(infer_result const& result, std::chrono::nanoseconds took, std::uint64_t samples,
                 std::string_view id = {});
  [[nodiscard]] model_statistics statistics() const;

 private:
  void log(error const& failure, std::string_view id);

  mutable std::mutex mutex_;  ///< guards what follows
  model_statistics seen_;
  telemetry::recurring_lines failures_;
};

}  // namespace sluice::server
