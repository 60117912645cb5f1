#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "runtime/server/repository/config_parts.hpp"
#include "runtime/server/repository/model_config.pb.h"

namespace sluice::server {
namespace {

using pbtxt::DynamicBatching;
using pbtxt::QueuePolicy;
using std::chrono::microseconds;

/// Beyond it a time is a mistake, and its sum with others might not fit 64 bits.
constexpr std::uint64_t longest_time = 365ULL * 24 * 3600 * 1'000'000;

microseconds time_of(std::uint64_t value, int field, field_places const& at,
                     std::string_view name) {
  if (value > longest_time) {
    at.fail(field,
            fmt::format("'{}' is {}; it must be at most {} (a year)", name, value, longest_time));
  }
  return microseconds{value};
}

queue_policy policy_of(QueuePolicy const& from, field_places const& at, bool ordered) {
  queue_policy result;
  if (from.timeout_action() != QueuePolicy::REJECT && from.timeout_action() != QueuePolicy::DELAY) {
    at.fail(QueuePolicy::kTimeoutActionFieldNumber,
            fmt::format("'timeout_action' cannot be {}; take one of REJECT, DELAY",
                        static_cast<int>(from.timeout_action())));
  }
  bool const delays = from.timeout_action() == QueuePolicy::DELAY;
  result.on_timeout =
      delays ? queue_policy::timeout_action::delay : queue_policy::timeout_action::reject;
  result.default_timeout = time_of(from.default_timeout_microseconds(),
                                   QueuePolicy::kDefaultTimeoutMicrosecondsFieldNumber, at,
                                   "default_timeout_microseconds");
  result.allow_timeout_override = from.allow_timeout_override();
  result.max_queue_size = from.max_queue_size();
  if (ordered && delays && result.default_timeout > microseconds{0}) {
    at.fail(QueuePolicy::kTimeoutActionFieldNumber,
            "'timeout_action' cannot be DELAY with 'preserve_ordering', since what is delayed "
            "loses its place; take REJECT, or leave preserve_ordering out");
  }
  return result;
}

void read_sizes(DynamicBatching const& from, field_places const& at, batching_rules& rules) {
  constexpr int field = DynamicBatching::kPreferredBatchSizeFieldNumber;
  for (int i = 0; i < from.preferred_batch_size_size(); ++i) {
    auto const size = from.preferred_batch_size(i);
    if (size < 1 || size > rules.max_batch_size) {
      at.fail_at(at.of(field, i),
                 rules.max_batch_size == 0
                     ? "'preferred_batch_size' needs a max_batch_size of at least as much; it is 0"
                     : fmt::format("'preferred_batch_size' is {}; it must be within 1 and {}, "
                                   "max_batch_size",
                                   size, rules.max_batch_size));
    }
    rules.preferred_sizes.push_back(size);
  }
  auto& sizes = rules.preferred_sizes;
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
}

void read_priorities(DynamicBatching const& from, field_places const& at, batching_rules& rules,
                     passed_over& without_effect) {
  constexpr int policies = DynamicBatching::kPriorityQueuePolicyFieldNumber;
  constexpr int fallback = DynamicBatching::kDefaultPriorityLevelFieldNumber;
  auto const levels = from.priority_levels();
  if (levels == 0) {  // as in Triton
    if (at.mentions(policies)) {
      without_effect.emplace_back(at.mention(policies),
                                  "priority_queue_policy, without priority_levels");
    }
    if (from.default_priority_level() != 0) {
      without_effect.emplace_back(at.mention(fallback),
                                  "default_priority_level, without priority_levels");
    }
    return;
  }
  if (levels > std::numeric_limits<std::uint32_t>::max()) {
    at.fail(DynamicBatching::kPriorityLevelsFieldNumber,
            fmt::format("'priority_levels' is {}; it must be a 32-bit number", levels));
  }
  if (from.default_priority_level() < 1 || from.default_priority_level() > levels) {
    at.fail(at.mentions(fallback) ? fallback : DynamicBatching::kPriorityLevelsFieldNumber,
            fmt::format("'default_priority_level' is {}; with priority_levels: {} it must be "
                        "within 1 and {}",
                        from.default_priority_level(), levels, levels));
  }
  if (rules.preserve_ordering && levels > 1) {
    at.fail(DynamicBatching::kPreserveOrderingFieldNumber,
            "'preserve_ordering' allows one priority alone, since answers of more urgent requests "
            "leave earlier; take priority_levels: 1, or leave preserve_ordering out");
  }
  rules.priority_levels = static_cast<std::uint32_t>(levels);
  rules.default_priority = static_cast<std::uint32_t>(from.default_priority_level());
  for (auto const& [level, policy] : from.priority_queue_policy()) {
    auto const there = at.within_key(policies, std::to_string(level));
    if (level < 1 || level > levels) {
      there.fail(
          fmt::format("'priority_queue_policy' has priority {}; with priority_levels: {} "
                      "it must be within 1 and {}",
                      level, levels, levels));
    }
    rules.policies[static_cast<std::uint32_t>(level)] =
        policy_of(policy, there, rules.preserve_ordering);
  }
}

}  // namespace

batching_rules read_batching(pbtxt::Model const& model, field_places const& at,
                             passed_over& without_effect) {
  constexpr int field = pbtxt::Model::kDynamicBatchingFieldNumber;
  batching_rules rules;
  rules.max_batch_size = model.max_batch_size();
  if (!model.has_dynamic_batching()) {
    return rules;
  }
  auto const& from = model.dynamic_batching();
  auto const inside = at.within(field);
  rules.is_dynamic = rules.max_batch_size > 0;
  if (!rules.is_dynamic) {  // Triton takes it, too, and computes each request by itself
    without_effect.emplace_back(at.mention(field), "dynamic_batching, as max_batch_size is 0");
  }
  read_sizes(from, inside, rules);
  rules.max_queue_delay = time_of(from.max_queue_delay_microseconds(),
                                  DynamicBatching::kMaxQueueDelayMicrosecondsFieldNumber, inside,
                                  "max_queue_delay_microseconds");
  rules.preserve_ordering = from.preserve_ordering();
  if (from.has_default_queue_policy()) {
    rules.default_policy = policy_of(from.default_queue_policy(),
                                     inside.within(DynamicBatching::kDefaultQueuePolicyFieldNumber),
                                     rules.preserve_ordering);
  }
  read_priorities(from, inside, rules, without_effect);
  return rules;
}

}  // namespace sluice::server
