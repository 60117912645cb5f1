#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "runtime/server/repository/config_parts.hpp"
#include "runtime/server/repository/model_config.pb.h"

namespace sluice::server {
namespace {

using pbtxt::InstanceGroup;
using pbtxt::Model;
using pbtxt::Optimization;

/// More would be more threads than a policy can have.
constexpr std::size_t most_instances = 64;

/// Fields that say where an instance runs or when: there is one device here, and the scheduler decides.
constexpr auto placing_fields = std::to_array<int>(
    {InstanceGroup::kKindFieldNumber, InstanceGroup::kGpusFieldNumber,
     InstanceGroup::kRateLimiterFieldNumber, InstanceGroup::kSecondaryDevicesFieldNumber,
     InstanceGroup::kProfileFieldNumber, InstanceGroup::kPassiveFieldNumber,
     InstanceGroup::kHostPolicyFieldNumber});

void pass_over(google::protobuf::Descriptor const& type, field_places const& at, int field,
               std::string_view of, passed_over& without_effect) {
  if (at.mentions(field)) {
    without_effect.emplace_back(at.mention(field),
                                fmt::format("{}.{}", of, type.FindFieldByNumber(field)->name()));
  }
}

}  // namespace

computing_rules read_computing(pbtxt::Model const& model, field_places const& at,
                               passed_over& without_effect) {
  computing_rules rules;
  std::size_t instances = 0;
  for (int i = 0; i < model.instance_group_size(); ++i) {
    auto const& group = model.instance_group(i);
    auto const inside = at.within(Model::kInstanceGroupFieldNumber, i);
    constexpr int count = InstanceGroup::kCountFieldNumber;
    if (group.count() < 0) {
      inside.fail(count, fmt::format("'count' is {}; it must be at least 1", group.count()));
    }
    instances += std::max<std::size_t>(static_cast<std::size_t>(group.count()), 1);
    if (instances > most_instances) {
      inside.fail(
          count, fmt::format("there are {} instances; there may be {}", instances, most_instances));
    }
    for (int const field : placing_fields) {
      pass_over(*InstanceGroup::descriptor(), inside, field, "instance_group", without_effect);
    }
  }
  rules.instances = std::max<std::size_t>(instances, 1);
  auto const& wanted = model.optimization();
  rules.records_launches = wanted.cuda().graphs();
  auto const inside = at.within(Model::kOptimizationFieldNumber);
  auto const& type = *Optimization::descriptor();
  for (int i = 0; model.has_optimization() && i < type.field_count(); ++i) {
    if (int const field = type.field(i)->number(); field != Optimization::kCudaFieldNumber) {
      pass_over(type, inside, field, "optimization", without_effect);
    }
  }
  if (wanted.has_cuda()) {
    auto const of_cuda = inside.within(Optimization::kCudaFieldNumber);
    for (int const field :
         {Optimization::Cuda::kBusyWaitEventsFieldNumber, Optimization::Cuda::kGraphSpecFieldNumber,
          Optimization::Cuda::kOutputCopyStreamFieldNumber}) {
      pass_over(*Optimization::Cuda::descriptor(), of_cuda, field, "optimization.cuda",
                without_effect);
    }
  }
  return rules;
}

}  // namespace sluice::server
