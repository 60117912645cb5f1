#include "runtime/server/model_account.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

/// Of what a model says, in bytes; its answers have more of it.
constexpr std::size_t longest_logged = 1024;

constexpr std::size_t longest_id = 128;

std::string shortened(std::string_view text) {
  if (text.size() <= longest_logged) {
    return std::string{text};
  }
  auto end = longest_logged;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) {
    --end;  // not within a character of UTF-8
  }
  return fmt::format("{} … ({} bytes)", text.substr(0, end), text.size());
}

void add(model_statistics::duration& to, std::chrono::nanoseconds took) {
  ++to.count;
  to.total += took;
}

json describe(model_statistics::duration const& of) {
  return {{"count", of.count}, {"ns", of.total.count()}};
}

}  // namespace

failure_reason reason_of(error_kind kind) noexcept {
  switch (kind) {
    case error_kind::unavailable:
    case error_kind::out_of_memory:
    case error_kind::deadline_exceeded:
      return failure_reason::rejected;
    case error_kind::cancelled:
      return failure_reason::canceled;
    case error_kind::model_error:
    case error_kind::aborted:
      return failure_reason::backend;
    default:
      return failure_reason::other;
  }
}

json describe(model_statistics const& seen) {
  model_statistics::duration const not_measured;
  auto const since_epoch =
      std::chrono::duration_cast<std::chrono::milliseconds>(seen.last_inference.time_since_epoch());
  auto batches = json::array();
  for (auto const& [samples, computing] : seen.computations) {
    batches.push_back({{"batch_size", samples},
                       {"compute_input", describe(not_measured)},
                       {"compute_infer", describe(computing)},
                       {"compute_output", describe(not_measured)}});
  }
  return {{"name", seen.model},
          {"version", seen.version},
          {"last_inference", since_epoch.count()},
          {"inference_count", seen.inferences},
          {"execution_count", seen.computed()},
          {"inference_stats",
           {{"success", describe(seen.success)},
            {"fail", describe(seen.fail)},
            {"queue", describe(seen.queue)},
            {"compute_input", describe(not_measured)},
            {"compute_infer", describe(seen.compute)},
            {"compute_output", describe(not_measured)},
            {"cache_hit", describe(not_measured)},
            {"cache_miss", describe(not_measured)}}},
          {"batch_stats", std::move(batches)}};
}

void model_statistics::distribution::add(std::chrono::nanoseconds took) {
  auto const seconds = std::chrono::duration<double>{took}.count();
  auto const place = std::lower_bound(bounds.begin(), bounds.end(), seconds) - bounds.begin();
  ++counts.at(static_cast<std::size_t>(place));
  total += took;
}

std::uint64_t model_statistics::computed() const {
  return std::accumulate(
      computations.begin(), computations.end(), std::uint64_t{0},
      [](std::uint64_t sum, auto const& each) { return sum + each.second.count; });
}

void model_account::on_answer(infer_result const& result, std::chrono::nanoseconds took,
                              std::uint64_t samples, std::string_view id) {
  auto const* const failure = std::get_if<error>(&result);
  {
    std::lock_guard const lock{mutex_};
    add(failure == nullptr ? seen_.success : seen_.fail, took);
    if (failure != nullptr) {
      ++seen_.failures.at(static_cast<std::size_t>(reason_of(failure->kind())));
    } else {
      seen_.inferences += samples;
      seen_.last_inference = std::chrono::system_clock::now();
      if (auto const& times = std::get<infer_response>(result).times) {
        add(seen_.queue, times->queue);
        add(seen_.compute, times->compute);
        (times->found_cold ? seen_.cold : seen_.warm).add(took);
        auto const& batch = times->batch;
        if (batch.is_first) {
          add(seen_.computations[batch.requests == 1 ? samples : batch.samples], times->compute);
        }
      }
    }
  }
  if (failure != nullptr && failure->kind() == error_kind::model_error) {
    log(*failure, id);
  }
}

model_statistics model_account::statistics() const {
  std::lock_guard const lock{mutex_};
  return seen_;
}

void model_account::log(error const& failure, std::string_view id) {
  std::unique_lock lock{mutex_};
  auto const due = failures_.on(failure.what(), telemetry::recurring_lines::clock::now());
  lock.unlock();
  if (due) {
    spdlog::warn(
        "a model has raised an exception model={} version={} reason={} repeated={} others={} id={}",
        seen_.model, seen_.version, telemetry::quoted(shortened(failure.what())), due->repeated,
        due->others, telemetry::quoted(id.substr(0, longest_id)));
  }
}

}  // namespace sluice::server
