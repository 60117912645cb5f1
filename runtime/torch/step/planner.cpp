#include "runtime/torch/step/detail/planner.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <string>

#include "runtime/torch/step/sluice/step.hpp"

namespace sluice::detail {
namespace {

using namespace std::chrono_literals;

/// After so long it is asked whether what is waited for can ever come.
constexpr auto wait_slice = 100ms;

/// The runtime has one plan for the process; the last that was started.
std::atomic<std::uint64_t> plans{0};

}  // namespace

std::int64_t planner::next(std::int64_t remaining, std::int64_t largest) {
  auto const slices = (remaining + largest - 1) / largest;
  auto const evenly = (remaining + slices - 1) / slices;
  if (runtime_ == nullptr) {
    return evenly;
  }
  start(largest);
  while (true) {
    std::uint64_t needed = 0;
    int recompute = 0;  // which is not offered
    auto const count = static_cast<std::int64_t>(
        runtime_->plan_next(static_cast<std::uint32_t>(remaining), &needed, &recompute));
    if (count > 0) {
      return adapt_ ? count
                    : std::min(count, evenly);  // what does not adapt is cut as without a pool
    }
    wait(needed, adapt_ ? 1 : largest);
  }
}

void planner::start(std::int64_t largest) {
  if (started_ == 0 || started_ != plans.load() || largest_ != largest) {
    runtime_->plan_start(static_cast<std::uint32_t>(largest), adapt_ ? 0 : 1, 0);
    started_ = ++plans;
    largest_ = largest;
  }
}

void planner::wait(std::uint64_t bytes, std::int64_t samples) {
  auto const begun = std::chrono::steady_clock::now();
  auto reports_after = first_notice_;
  while (runtime_->wait_memory(bytes, static_cast<std::uint32_t>(wait_slice.count())) == 0) {
    // Not the sum of what each holds now: a chunk on its way from one to another would be missing.
    auto const within_reach = runtime_->reachable_bytes();
    if (bytes > within_reach) {
      throw out_of_memory_error{
          "a micro-batch of " + std::to_string(samples) + " samples needs more than the " +
          std::to_string(within_reach) + " bytes that this job could have of the pool's " +
          std::to_string(runtime_->pool_bytes()) +
          "; lower micro_batch, or give the pool more memory\n" + runtime_->shortage_text()};
    }
    if (std::chrono::steady_clock::now() - begun >= reports_after) {
      reports_after += reports_after;
      report(bytes, samples);
    }
  }
  waited_ += std::chrono::steady_clock::now() - begun;
}

void planner::report(std::uint64_t bytes, std::int64_t samples) const {
  auto const sentence = "sluice: a micro-batch of " + std::to_string(samples) +
                        " samples waits for " + std::to_string(bytes) + " bytes\n" +
                        runtime_->shortage_text() + "\n";
  static_cast<void>(std::fputs(sentence.c_str(), stderr));
}

}  // namespace sluice::detail
