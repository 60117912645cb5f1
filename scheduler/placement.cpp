#include "scheduler/placement.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "scheduler/detail/device_shares.hpp"

namespace sluice::scheduler {
namespace {

using detail::device_shares;

void check(std::span<placement_device const> devices) {
  if (devices.empty()) {
    throw std::invalid_argument("there must be at least one device");
  }
}

void check(placement_settings const& settings) {
  if (!(settings.least_gain >= 0.0 && settings.least_gain < 1.0)) {
    throw std::invalid_argument("the least gain is a share and must be in [0, 1); got " +
                                std::to_string(settings.least_gain));
  }
}

double rate_of(std::span<placeable_model const> models) {
  return std::accumulate(models.begin(), models.end(), 0.0,
                         [](double sum, auto const& each) { return sum + each.arrivals_per_s; });
}

/// Which models are where, and how much memory is left.
class occupancy {
 public:
  occupancy(std::span<placeable_model const> models, std::span<placement_device const> devices)
      : models_(models), devices_of_(models.size()), models_on_(devices.size()) {
    for (auto const& each : devices) {
      free_.push_back(each.bytes);
      most_ = std::max(most_, each.bytes);
    }
  }

  [[nodiscard]] bool has_room(std::size_t model, std::size_t device) const {
    return models_[model].bytes <= free_[device];
  }
  [[nodiscard]] bool has(std::size_t model, std::size_t device) const {
    auto const& its = devices_of_[model];
    return std::binary_search(its.begin(), its.end(), device);
  }
  [[nodiscard]] std::vector<std::size_t> const& devices_of(std::size_t model) const {
    return devices_of_[model];
  }
  [[nodiscard]] std::vector<std::size_t> const& models_on(std::size_t device) const {
    return models_on_[device];
  }
  [[nodiscard]] std::uint64_t free_bytes(std::size_t device) const { return free_[device]; }
  [[nodiscard]] std::size_t emptiest() const {
    return static_cast<std::size_t>(std::max_element(free_.begin(), free_.end()) - free_.begin());
  }

  void add(std::size_t model, std::size_t device) {
    insert(devices_of_[model], device);
    insert(models_on_[device], model);
    free_[device] -= models_[model].bytes;
  }
  void remove(std::size_t model, std::size_t device) {
    std::erase(devices_of_[model], device);
    std::erase(models_on_[device], model);
    free_[device] += models_[model].bytes;
  }

  [[nodiscard]] model_placement result() const {
    model_placement made{.devices_of = devices_of_};
    auto const device = emptiest();
    for (std::size_t m = 0; m < models_.size(); ++m) {
      if (!devices_of_[m].empty()) {
        continue;
      }
      if (models_[m].bytes > most_) {
        auto const largest = largest_device();
        made.left_out.push_back({m, model_placement::reason::too_large, most_, largest});
      } else {
        made.left_out.push_back({m,
                                 has_room(m, device) ? model_placement::reason::no_gain
                                                     : model_placement::reason::no_room,
                                 free_[device], device});
      }
    }
    return made;
  }

 private:
  static void insert(std::vector<std::size_t>& to, std::size_t value) {
    to.insert(std::lower_bound(to.begin(), to.end(), value), value);
  }
  [[nodiscard]] std::size_t largest_device() const {
    for (std::size_t d = 0; d < free_.size(); ++d) {
      auto const& there = models_on_[d];
      if (std::accumulate(there.begin(), there.end(), free_[d], [&](auto sum, auto each) {
            return sum + models_[each].bytes;
          }) == most_) {
        return d;
      }
    }
    return 0;
  }

  std::span<placeable_model const> models_;
  std::vector<std::vector<std::size_t>> devices_of_, models_on_;
  std::vector<std::uint64_t> free_;
  std::uint64_t most_ = 0;
};

std::vector<device_shares::part> parts_of(std::span<placeable_model const> models,
                                          occupancy const& there, std::size_t device) {
  std::vector<device_shares::part> parts;
  for (auto const each : there.models_on(device)) {
    parts.push_back(
        {each, models[each].arrivals_per_s / static_cast<double>(there.devices_of(each).size())});
  }
  return parts;
}

enum class step_order { by_gain, by_gain_of_a_byte };

/// One search. Gains are whole numbers, so that what is equal but for rounding is equal.
class greedy_search {
 public:
  greedy_search(std::span<placeable_model const> models, std::span<placement_device const> devices,
                placement_settings const& settings, device_shares& judge, step_order order)
      : models_(models),
        least_gain_(settings.least_gain),
        judge_(&judge),
        order_(order),
        rate_(rate_of(models)),
        there_(models, devices),
        answers_(devices.size()),
        gains_(models.size(), std::vector<std::optional<gain>>(devices.size())) {}

  model_placement run() {
    fill();
    for (auto const each : most_asked_for()) {
      without_at_first(each);
    }
    add_unasked();
    return there_.result();
  }
  [[nodiscard]] double in_time_per_s() const {
    return std::accumulate(answers_.begin(), answers_.end(), 0.0,
                           [](double sum, auto const& each) { return sum + each.in_time_per_s; });
  }

 private:
  /// In billionths of all requests.
  struct gain {
    std::int64_t in_time = 0;
    std::int64_t answered = 0;
    bool overloads = false;  ///< a device of the model
  };
  struct step {
    std::size_t model = 0;
    std::vector<std::size_t> devices{};  ///< that get it
    gain gained{};
  };
  static constexpr double billion = 1e9;

  [[nodiscard]] std::int64_t whole(double requests_per_s) const {
    return std::llround(requests_per_s / rate_ * billion);
  }

  /// Of what is there now, for those devices of `model` that differ.
  [[nodiscard]] gain gain_so_far(std::size_t model) {
    double in_time = 0.0, answered = 0.0;
    bool overloads = false;
    for (auto const device : there_.devices_of(model)) {
      auto const with = judge_->of(parts_of(models_, there_, device));
      in_time += with.in_time_per_s - answers_[device].in_time_per_s;
      answered += with.per_s - answers_[device].per_s;
      overloads = overloads || with.utilisation >= 1.0;
    }
    return {whole(in_time), whole(answered), overloads};
  }

  [[nodiscard]] gain gain_of(std::size_t model, std::size_t device) {
    there_.add(model, device);
    auto const result = gain_so_far(model);
    there_.remove(model, device);
    return result;
  }

  [[nodiscard]] bool may_add(std::size_t model, std::size_t device) const {
    return there_.has_room(model, device) && !there_.has(model, device);
  }

  [[nodiscard]] std::int64_t least_of(std::size_t model) const {
    return there_.devices_of(model).empty()
               ? std::int64_t{1}
               : std::max<std::int64_t>(1, std::llround(least_gain_ * billion));
  }

  /// Larger is better. What is left of memory counts the other way round.
  using worth = std::tuple<double, double, std::uint64_t>;
  [[nodiscard]] worth worth_of(std::size_t model, gain const& of, std::size_t devices,
                               std::size_t first) const {
    double const bytes = order_ == step_order::by_gain
                             ? 1.0
                             : std::max(1.0, static_cast<double>(models_[model].bytes)) *
                                   static_cast<double>(devices);
    return {static_cast<double>(of.in_time) / bytes, static_cast<double>(of.answered) / bytes,
            ~(there_.free_bytes(first) - models_[model].bytes)};
  }

  /// As many as there is time for.
  [[nodiscard]] std::vector<std::size_t> most_asked_for() const {
    constexpr std::size_t least_tried = 8, pairs_looked_at = 100'000;
    auto const pairs = std::max<std::size_t>(1, models_.size() * answers_.size());
    auto const most = std::max(least_tried, pairs_looked_at / pairs);
    std::vector<std::size_t> order(models_.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
      return models_[a].arrivals_per_s > models_[b].arrivals_per_s;
    });
    order.resize(std::min(order.size(), most));
    return order;
  }

  void fill() {
    while (auto const next = best_step()) {
      take(*next);
    }
  }

  /// What comes of it if the others have the place of `model` before it may come back; kept if that is better.
  void without_at_first(std::size_t model) {
    if (there_.devices_of(model).empty()) {
      return;
    }
    auto other = *this;
    other.kept_out_ = model;
    other.take_away(model);
    other.fill();
    other.kept_out_.reset();
    other.fill();
    if (whole(other.in_time_per_s() - in_time_per_s()) > 0) {
      *this = std::move(other);
    }
  }

  void take_away(std::size_t model) {
    auto const were_there = there_.devices_of(model);
    for (auto const each : were_there) {
      there_.remove(model, each);
    }
    note_changes(were_there);
    for (auto& each : gains_[model]) {
      each.reset();
    }
  }

  /// None of its requests are in time.
  [[nodiscard]] bool is_lost(std::size_t model) const {
    auto const& its = there_.devices_of(model);
    return std::all_of(its.begin(), its.end(),
                       [&](auto each) { return answers_[each].in_time_per_s <= 0.0; });
  }

  /// For a model that one more device would not help, since it is overloaded with it still: several at once, one after the other where
  /// most is gained, until that is something.
  [[nodiscard]] std::optional<step> several_at_once(std::size_t model) {
    step made{.model = model};
    while (made.gained.in_time <= 0) {
      std::optional<std::size_t> next;
      worth most;
      for (std::size_t d = 0; d < answers_.size(); ++d) {
        if (may_add(model, d)) {
          auto const its = gain_of(model, d);
          if (auto const worth_it = worth_of(model, its, 1, d); !next || worth_it > most) {
            next = d;
            most = worth_it;
            made.gained = its;
          }
        }
      }
      if (!next) {
        break;
      }
      made.devices.push_back(*next);
      there_.add(model, *next);
    }
    for (auto const each : made.devices) {
      there_.remove(model, each);
    }
    auto const least = least_of(model) * static_cast<std::int64_t>(made.devices.size());
    return made.devices.size() > 1 && made.gained.in_time >= least ? std::optional{made}
                                                                   : std::nullopt;
  }

  [[nodiscard]] std::optional<step> best_step() {
    std::optional<step> best;
    worth most;
    auto const consider = [&](step const& it) {
      auto const its = worth_of(it.model, it.gained, it.devices.size(), it.devices.front());
      if (!best || its > most) {
        best = it;
        most = its;
      }
    };
    for (std::size_t m = 0; m < models_.size() && rate_ > 0.0; ++m) {
      if (models_[m].arrivals_per_s <= 0.0 || kept_out_ == m) {
        continue;
      }
      bool always_overloads = true;
      for (std::size_t d = 0; d < answers_.size(); ++d) {
        if (!may_add(m, d)) {
          continue;
        }
        auto& known = gains_[m][d];
        if (!known) {
          known = gain_of(m, d);
        }
        always_overloads = always_overloads && known->overloads;
        auto const least = least_of(m);
        if (known->in_time >= least || (known->in_time >= 0 && known->answered >= least)) {
          consider({m, {d}, *known});
        }
      }
      if (always_overloads && is_lost(m)) {
        if (auto const several = several_at_once(m)) {
          consider(*several);
        }
      }
    }
    return best;
  }

  void take(step const& it) {
    for (auto const each : it.devices) {
      there_.add(it.model, each);
    }
    note_changes(there_.devices_of(it.model));
  }

  /// What was known of a step holds until a device changes that it would change.
  void note_changes(std::vector<std::size_t> const& those) {
    for (auto const device : those) {
      answers_[device] = judge_->of(parts_of(models_, there_, device));
    }
    for (std::size_t m = 0; m < models_.size(); ++m) {
      bool const is_on_those =
          std::any_of(those.begin(), those.end(), [&](auto each) { return there_.has(m, each); });
      for (std::size_t d = 0; d < answers_.size(); ++d) {
        if (is_on_those || std::binary_search(those.begin(), those.end(), d)) {
          gains_[m][d].reset();
        }
      }
    }
  }

  /// Nobody asks for them: wherever there is room.
  void add_unasked() {
    for (std::size_t m = 0; m < models_.size(); ++m) {
      auto const device = there_.emptiest();
      if (models_[m].arrivals_per_s <= 0.0 && there_.has_room(m, device)) {
        there_.add(m, device);
      }
    }
  }

  std::span<placeable_model const> models_;
  double least_gain_;
  device_shares* judge_;
  step_order order_;
  double rate_;
  occupancy there_;
  std::vector<device_shares::answers> answers_;  // by device
  std::vector<std::vector<std::optional<gain>>> gains_;
  std::optional<std::size_t> kept_out_;
};

}  // namespace

model_placement place_by_attainment(std::span<placeable_model const> models,
                                    std::span<placement_device const> devices,
                                    placement_settings const& settings) {
  check(devices);
  check(settings);
  device_shares judge{models, settings.executors};
  greedy_search by_gain{models, devices, settings, judge, step_order::by_gain};
  greedy_search by_byte{models, devices, settings, judge, step_order::by_gain_of_a_byte};
  auto first = by_gain.run();
  auto second = by_byte.run();
  return by_byte.in_time_per_s() > by_gain.in_time_per_s() ? second : first;
}

model_placement place_in_rotation(std::span<placeable_model const> models,
                                  std::span<placement_device const> devices) {
  check(devices);
  occupancy there{models, devices};
  std::size_t next = 0;
  for (std::size_t m = 0; m < models.size(); ++m) {
    for (std::size_t i = 0; i < devices.size(); ++i) {
      auto const device = (next + i) % devices.size();
      if (there.has_room(m, device)) {
        there.add(m, device);
        next = device + 1;
        break;
      }
    }
  }
  return there.result();
}

model_placement place_first_fit(std::span<placeable_model const> models,
                                std::span<placement_device const> devices) {
  check(devices);
  occupancy there{models, devices};
  for (std::size_t m = 0; m < models.size(); ++m) {
    for (std::size_t device = 0; device < devices.size(); ++device) {
      if (there.has_room(m, device)) {
        there.add(m, device);
        break;
      }
    }
  }
  return there.result();
}

placement_prediction predict_placement(std::span<placeable_model const> models,
                                       std::span<placement_device const> devices,
                                       model_placement const& of,
                                       placement_settings const& settings) {
  check(devices);
  if (of.devices_of.size() != models.size()) {
    throw std::invalid_argument("a placement of " + std::to_string(of.devices_of.size()) +
                                " models cannot be predicted for " + std::to_string(models.size()));
  }
  device_shares judge{models, settings.executors};
  placement_prediction result{
      .share_within_of = std::vector<double>(models.size()),
      .devices = std::vector<placement_prediction::of_device>(devices.size())};
  std::vector<std::vector<device_shares::part>> parts(devices.size());
  for (std::size_t m = 0; m < models.size(); ++m) {
    auto const count = static_cast<double>(of.devices_of[m].size());
    for (auto const device : of.devices_of[m]) {
      if (device >= devices.size()) {
        throw std::invalid_argument("model " + std::to_string(m) + " is on device " +
                                    std::to_string(device) + ", and there are " +
                                    std::to_string(devices.size()));
      }
      parts[device].push_back({m, models[m].arrivals_per_s / count});
      result.devices[device].bytes += models[m].bytes;
    }
  }
  double in_time = 0.0;
  for (std::size_t d = 0; d < devices.size(); ++d) {
    std::vector<double> shares;
    auto const answers = judge.of(parts[d], &shares);
    double arrivals = 0.0;
    for (std::size_t i = 0; i < parts[d].size(); ++i) {
      auto const model = parts[d][i].model;
      arrivals += parts[d][i].arrivals_per_s;
      result.share_within_of[model] += shares[i] / static_cast<double>(of.devices_of[model].size());
    }
    result.devices[d].utilisation = answers.utilisation;
    result.devices[d].share_within = arrivals > 0.0 ? answers.in_time_per_s / arrivals : 1.0;
    in_time += answers.in_time_per_s;
  }
  double const rate = rate_of(models);
  result.share_within = rate > 0.0 ? in_time / rate : 1.0;
  return result;
}

}  // namespace sluice::scheduler
