#include "scheduler/joint_choice.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <stdexcept>
#include <string>

namespace sluice::scheduler {

namespace {

using options_of_model = std::vector<kept_option>;

void check(std::span<options_of_model const> models, double memory_bytes) {
  auto const is_amount = [](double value) { return value >= 0.0 && std::isfinite(value); };
  if (!(memory_bytes >= 0.0)) {
    throw std::invalid_argument("memory_bytes must be >= 0; got " + std::to_string(memory_bytes));
  }
  for (auto const& options : models) {
    if (options.empty()) {
      throw std::invalid_argument("each model must have an option at least");
    }
    for (auto const& each : options) {
      if (!is_amount(each.held_bytes) || !is_amount(each.loss_per_s)) {
        throw std::invalid_argument("held_bytes and loss_per_s must be finite numbers >= 0; got " +
                                    std::to_string(each.held_bytes) + " and " +
                                    std::to_string(each.loss_per_s));
      }
    }
  }
}

/// What a byte costs that is saved by going from `one` to `other`, which has less.
double price_of(kept_option const& one, kept_option const& other) {
  return (other.loss_per_s - one.loss_per_s) / (one.held_bytes - other.held_bytes);
}

/// Options from the one that loses least on, each with less memory than the one before, and each step dearer by the byte than the one
/// before.
std::vector<std::size_t> lower_hull(options_of_model const& options) {
  std::vector<std::size_t> order(options.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    auto const& one = options[a];
    auto const& other = options[b];
    return one.loss_per_s != other.loss_per_s ? one.loss_per_s < other.loss_per_s
                                              : one.held_bytes < other.held_bytes;
  });
  std::vector<std::size_t> hull;
  for (auto const next : order) {
    if (!hull.empty() && options[next].held_bytes >= options[hull.back()].held_bytes) {
      continue;  // another loses less with less
    }
    while (hull.size() > 1 && price_of(options[hull[hull.size() - 2]], options[hull.back()]) >=
                                  price_of(options[hull.back()], options[next])) {
      hull.pop_back();
    }
    hull.push_back(next);
  }
  return hull;
}

bool is_choice(std::span<options_of_model const> models, std::span<std::size_t const> options) {
  return models.size() == options.size() &&
         std::equal(models.begin(), models.end(), options.begin(),
                    [](auto const& of, std::size_t option) { return option < of.size(); });
}

kept_option sum_of(std::span<options_of_model const> models, std::span<std::size_t const> options) {
  kept_option sum;
  for (std::size_t m = 0; m < models.size(); ++m) {
    sum.held_bytes += models[m][options[m]].held_bytes;
    sum.loss_per_s += models[m][options[m]].loss_per_s;
  }
  return sum;
}

class chooser {
 public:
  chooser(std::span<options_of_model const> models, double memory_bytes)
      : models_(models), memory_bytes_(memory_bytes), places_(models.size()) {
    for (auto const& options : models) {
      hulls_.push_back(lower_hull(options));
      made_.options.push_back(hulls_.back().front());
    }
    sum();
  }

  joint_choice all() {
    for (std::size_t m = 0; m < models_.size(); ++m) {
      plan_step(m);
    }
    while (made_.held_bytes > memory_bytes_ && !steps_.empty()) {
      auto const [price, model] = steps_.top();
      steps_.pop();
      take(model, hulls_[model][++places_[model]]);
      made_.price = price;
      plan_step(model);
    }
    sum();  // once more, without what many steps have rounded
    made_.fits = made_.held_bytes <= memory_bytes_;
    while (made_.price > 0.0 && made_.fits && use_rest()) {
    }
    return std::move(made_);
  }

 private:
  using priced_step = std::pair<double, std::size_t>;

  void sum() {
    auto const all = sum_of(models_, made_.options);
    made_.held_bytes = all.held_bytes;
    made_.loss_per_s = all.loss_per_s;
  }
  [[nodiscard]] kept_option const& chosen(std::size_t model) const {
    return models_[model][made_.options[model]];
  }
  void plan_step(std::size_t model) {
    auto const& hull = hulls_[model];
    if (auto const place = places_[model]; place + 1 < hull.size()) {
      auto const& options = models_[model];
      steps_.emplace(price_of(options[hull[place]], options[hull[place + 1]]), model);
    }
  }
  void take(std::size_t model, std::size_t option) {
    auto const& to = models_[model][option];
    made_.held_bytes += to.held_bytes - chosen(model).held_bytes;
    made_.loss_per_s += to.loss_per_s - chosen(model).loss_per_s;
    made_.options[model] = option;
  }

  /// The one option that saves most of what there is room for.
  bool use_rest() {
    double const room = memory_bytes_ - made_.held_bytes;
    double best = 0.0;
    std::size_t model = 0, option = 0;
    for (std::size_t m = 0; m < models_.size(); ++m) {
      for (std::size_t o = 0; o < models_[m].size(); ++o) {
        auto const& other = models_[m][o];
        double const saved = chosen(m).loss_per_s - other.loss_per_s;
        if (saved > best && other.held_bytes - chosen(m).held_bytes <= room) {
          best = saved;
          model = m;
          option = o;
        }
      }
    }
    if (best <= 0.0) {
      return false;
    }
    take(model, option);
    return true;
  }

  std::span<options_of_model const> models_;
  double memory_bytes_;
  std::vector<std::vector<std::size_t>> hulls_;
  std::vector<std::size_t> places_;  ///< of each model, on its hull
  std::priority_queue<priced_step, std::vector<priced_step>, std::greater<>> steps_;
  joint_choice made_;
};

}  // namespace

std::vector<kept_option> kept_options_of(warm_decision const& made, double weight_bytes) {
  auto const option_of = [&](prediction const& it) {
    double const late = std::max(0.0, made.required_share - it.attainment);
    return kept_option{.held_bytes = (1.0 - it.released_fraction) * weight_bytes,
                       .loss_per_s = made.long_run_rate_per_s * late / made.permitted_share()};
  };
  std::vector<kept_option> options(made.candidates.size());
  std::transform(made.candidates.begin(), made.candidates.end(), options.begin(), option_of);
  return options;
}

joint_choice choose_together(std::span<std::vector<kept_option> const> models, double memory_bytes,
                             std::span<std::size_t const> current) {
  constexpr double staying = 0.1;
  check(models, memory_bytes);
  auto made = chooser{models, memory_bytes}.all();
  if (made.price > 0.0 && is_choice(models, current)) {
    auto const [held_bytes, loss_per_s] = sum_of(models, current);
    if (held_bytes <= memory_bytes && loss_per_s <= made.loss_per_s * (1.0 + staying)) {
      made.options.assign(current.begin(), current.end());
      made.held_bytes = held_bytes;
      made.loss_per_s = loss_per_s;
    }
  }
  return made;
}

}  // namespace sluice::scheduler
