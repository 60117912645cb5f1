#include "scheduler/joint_keeping.hpp"

#include "scheduler/joint_choice.hpp"

namespace sluice::scheduler {

std::vector<std::optional<prediction>> joint_keeping::share(std::span<model const> models,
                                                            double memory_bytes) {
  std::vector<std::optional<prediction>> in_force(models.size());
  std::vector<std::size_t> members;
  wanted_bytes_ = 0.0;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (auto const* const made = models[i].decision; made && !made->candidates.empty()) {
      members.push_back(i);
      wanted_bytes_ += (1.0 - made->chosen.released_fraction) * models[i].weight_bytes;
    }
  }
  if (members != members_) {
    chosen_.clear();
    members_ = std::move(members);
  }
  if (wanted_bytes_ <= memory_bytes) {
    chosen_.clear();
    return in_force;
  }
  std::vector<std::vector<kept_option>> options;
  options.reserve(members_.size());
  for (auto const i : members_) {
    options.push_back(kept_options_of(*models[i].decision, models[i].weight_bytes));
  }
  chosen_ = choose_together(options, memory_bytes, chosen_).options;
  for (std::size_t place = 0; place < members_.size(); ++place) {
    auto const option = chosen_[place];
    auto& its = in_force[members_[place]];
    its = models[members_[place]].decision->candidates[option];
    if (options[place][option].loss_per_s > 0.0) {
      its->idle_timeout = models[members_[place]].max_idle;
    }
  }
  return in_force;
}

}  // namespace sluice::scheduler
