// How model_host puts requests of a model together: what is known of each when it comes, and which go next.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "runtime/server/hosting/batch_choice.hpp"
#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

/// What has to be equal where inputs are put together along their first dimension.
std::string shape_of(std::vector<tensor> const& inputs) {
  std::vector<std::string> parts;
  for (auto const& each : inputs) {
    auto part = fmt::format("{}:{}", each.name, datatype_name(each.type));
    for (std::size_t i = 1; i < each.shape.size(); ++i) {
      fmt::format_to(std::back_inserter(part), ",{}", each.shape[i]);
    }
    parts.push_back(std::move(part));
  }
  std::sort(parts.begin(), parts.end());
  std::string all;
  for (auto const& each : parts) {
    all += each + ';';
  }
  return all;
}

/// Of one request: the first dimension of all its inputs; nothing if they have none in common.
std::optional<std::int64_t> samples_of(std::vector<tensor> const& inputs) {
  std::optional<std::int64_t> samples;
  for (auto const& each : inputs) {
    if (each.shape.empty() || each.shape.front() < 1 ||
        samples.value_or(each.shape.front()) != each.shape.front()) {
      return std::nullopt;
    }
    samples = each.shape.front();
  }
  return samples;
}

queue_policy const& policy_of(batching_rules const& rules, std::uint32_t priority) {
  auto const own = rules.policies.find(priority);
  return own == rules.policies.end() ? rules.default_policy : own->second;
}

}  // namespace

bool model_host::impl::makes_batches(slot const& model) {
  return model.is.batching.is_dynamic;
}

void model_host::impl::classify(detail::job& job, slot const& model) {
  job.late_after = clock::time_point::max();
  if (!makes_batches(model)) {
    return;
  }
  auto const& rules = model.is.batching;
  auto const wanted = job.request.priority;
  job.priority = wanted == 0 || wanted > rules.priority_levels ? rules.default_priority
                                                               : static_cast<std::uint32_t>(wanted);
  auto const& policy = policy_of(rules, job.priority);
  if (auto patience = policy.default_timeout; patience.count() > 0) {
    if (auto const own = job.request.timeout; policy.allow_timeout_override && own) {
      patience = std::min(patience, *own);
    }
    job.late_after = job.arrival + patience;
  }
  if (auto const samples = samples_of(job.request.inputs)) {
    job.samples = *samples;
    job.shape = shape_of(job.request.inputs);
  } else {
    job.request.is_alone = true;  // and says itself what is wrong
  }
}

/// When it is refused if it is not computed before.
detail::clock::time_point model_host::impl::ends_waiting(detail::job const& job) const {
  auto const& policy = policy_of(slots_[job.model].is.batching, job.priority);
  return policy.on_timeout == queue_policy::timeout_action::reject
             ? std::min(job.deadline, job.late_after)
             : job.deadline;
}

std::optional<error> model_host::impl::refuse_of_its_priority(detail::job const& job,
                                                              slot const& model) const {
  auto const bound = policy_of(model.is.batching, job.priority).max_queue_size;
  if (bound == 0) {
    return std::nullopt;
  }
  auto const waiting = std::count_if(queue_.begin(), queue_.end(), [&](detail::job const& each) {
    return each.model == job.model && each.priority == job.priority;
  });
  if (waiting < static_cast<std::ptrdiff_t>(bound)) {
    return std::nullopt;
  }
  return error{error_kind::unavailable,
               fmt::format("{} requests of priority {} wait for model '{}' already, as many as its "
                           "configuration allows; try again later",
                           waiting, job.priority, model.is.name)};
}

/// Of a model that makes batches: those that are computed now; if they wait for others, nobody.
detail::batch model_host::impl::next_of(model_index place) {
  auto const& model = slots_[place];
  bool const one_by_one = !model.is.model->can_batch() || model.vain_batches >= most_vain_batches;
  auto const now = clock::now();
  detail::batch line;
  std::vector<waiting_request> facts;
  for (auto next = queue_.begin(); next != queue_.end(); ++next) {
    if (next->model == place) {
      line.push_back(next);
      facts.push_back({.samples = next->samples,
                       .shape = next->shape,
                       .is_alone = one_by_one || next->request.is_alone,
                       .priority = next->priority,
                       .is_late = next->late_after <= now,
                       .arrival = next->arrival,
                       .deadline = next->deadline});
    }
  }
  std::optional<batching_rules> hurried;
  if (stopping_) {
    hurried = model.is.batching;
    hurried->max_queue_delay = {};
  }
  auto const choice = choose_batch(facts, hurried ? *hurried : model.is.batching, now,
                                   2 * model.longest_computation);
  if (choice.again_at) {
    gathering_until_ = std::min(gathering_until_, *choice.again_at);
  }
  detail::batch chosen;
  for (auto const each : choice.taken) {
    chosen.push_back(line[each]);
  }
  return chosen;
}

}  // namespace sluice::server
