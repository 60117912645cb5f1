#include "scheduler/placement.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler/attainment.hpp"
#include "scheduler/queueing.hpp"

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;
using devices = std::vector<std::size_t>;
using reason = model_placement::reason;

placeable_model model_of(std::uint64_t bytes, double arrivals_per_s, seconds service = 50ms,
                         seconds latency = 200ms) {
  return {.bytes = bytes,
          .arrivals_per_s = arrivals_per_s,
          .service = distribution::gamma(service, 1.0),
          .latency = latency};
}

/// All from the same seed, on any machine.
class random_cases {
 public:
  double between(double low, double high) {
    return low + (high - low) * static_cast<double>(random_() >> 11U) * 0x1p-53;
  }
  std::size_t number(std::size_t low, std::size_t high) {
    return low + static_cast<std::size_t>(random_() % (high - low + 1));
  }
  std::vector<placement_device> some_devices(std::size_t count) {
    std::vector<placement_device> made(count);
    for (auto& each : made) {
      each.bytes = number(10, 39);
    }
    return made;
  }
  /// With that utilisation over all devices, by parts that differ up to twentyfold.
  std::vector<placeable_model> some_models(std::size_t count, double utilisation) {
    std::vector<double> parts(count);
    double sum = 0.0;
    for (auto& each : parts) {
      sum += each = between(0.05, 1.0);
    }
    std::vector<placeable_model> made;
    for (auto const part : parts) {
      double const service = between(0.01, 0.1);
      made.push_back({.bytes = number(3, 22),
                      .arrivals_per_s = utilisation * part / sum / service,
                      .service = distribution::gamma(seconds{service}, between(0.0, 2.0)),
                      .load = distribution::gamma(300ms, 0.0),
                      .latency = seconds{service * between(2.0, 8.0)},
                      .idle_timeout = number(0, 1) == 0 ? forever : seconds{between(0.0, 1.0)}});
    }
    return made;
  }

 private:
  std::mt19937_64 random_{7};  // the same again. NOLINT(bugprone-random-generator-seed)
};

bool fits(std::vector<placeable_model> const& models, std::vector<placement_device> const& there,
          model_placement const& found) {
  std::vector<std::uint64_t> used(there.size());
  for (std::size_t m = 0; m < models.size(); ++m) {
    for (auto const each : found.devices_of[m]) {
      used[each] += models[m].bytes;
    }
  }
  return std::equal(used.begin(), used.end(), there.begin(),
                    [](auto bytes, auto const& device) { return bytes <= device.bytes; });
}

double share_of(std::vector<placeable_model> const& models,
                std::vector<placement_device> const& there, model_placement const& found,
                placement_settings const& settings = {}) {
  return predict_placement(models, there, found, settings).share_within;
}

/// Of every placement that there is.
double best_share(std::vector<placeable_model> const& models,
                  std::vector<placement_device> const& there) {
  std::size_t const subsets = 1U << there.size();
  std::size_t all = 1;
  for (std::size_t i = 0; i < models.size(); ++i) {
    all *= subsets;
  }
  double best = 0.0;
  model_placement tried;
  for (std::size_t number = 0; number < all; ++number) {
    tried.devices_of.assign(models.size(), {});
    for (std::size_t m = 0, rest = number; m < models.size(); ++m, rest /= subsets) {
      for (std::size_t d = 0; d < there.size(); ++d) {
        if (((rest % subsets) >> d & 1U) != 0) {
          tried.devices_of[m].push_back(d);
        }
      }
    }
    if (fits(models, there, tried)) {
      best = std::max(best, share_of(models, there, tried));
    }
  }
  return best;
}

TEST(placing_by_attainment, spreads_models_over_equal_devices) {
  std::vector<placeable_model> const models{model_of(10, 8.0), model_of(10, 6.0), model_of(10, 4.0),
                                            model_of(10, 2.0)};
  std::vector<placement_device> const two(2, {20});
  auto const found = place_by_attainment(models, two, {});
  EXPECT_EQ(found.devices_of, (std::vector<devices>{{0}, {1}, {1}, {0}}));
  EXPECT_TRUE(found.left_out.empty());
}

TEST(placing_by_attainment, gives_a_model_that_is_asked_for_much_several_devices) {
  std::vector<placeable_model> const models{model_of(10, 30.0, 50ms, 400ms),
                                            model_of(10, 1.0, 50ms, 400ms)};
  std::vector<placement_device> const three(3, {20});
  auto const found = place_by_attainment(models, three, {});
  // One device is overloaded with the first (30/s of 50 ms), and two are not.
  EXPECT_GE(found.devices_of[0].size(), 2U);
  EXPECT_TRUE(found.left_out.empty());
  EXPECT_GT(share_of(models, three, found), 0.9);
}

TEST(placing_by_attainment, adds_no_device_that_gains_less_than_the_least) {
  std::vector<placeable_model> const models{model_of(10, 10.0)};
  std::vector<placement_device> const two(2, {20});
  double const one = share_of(models, two, {.devices_of = {{0}}});
  double const both = share_of(models, two, {.devices_of = {{0, 1}}});
  ASSERT_GT(both, one);
  EXPECT_EQ(place_by_attainment(models, two, {.least_gain = 0.9 * (both - one)}).devices_of[0],
            (devices{0, 1}));
  EXPECT_EQ(place_by_attainment(models, two, {.least_gain = 1.1 * (both - one)}).devices_of[0],
            devices{0});
}

TEST(placing_by_attainment, keeps_the_large_device_for_the_large_model) {
  std::vector<placeable_model> const models{model_of(10, 2.0), model_of(40, 1.0)};
  std::vector<placement_device> const unequal{{40}, {10}};
  EXPECT_EQ(place_by_attainment(models, unequal, {}).devices_of, (std::vector<devices>{{1}, {0}}));
}

TEST(placing_by_attainment, prefers_several_small_models_to_a_large_one_with_fewer_answers) {
  std::vector<placeable_model> const models{model_of(10, 3.0), model_of(5, 2.0), model_of(5, 2.0)};
  std::vector<placement_device> const one{{10}};
  auto const found = place_by_attainment(models, one, {});
  EXPECT_EQ(found.devices_of, (std::vector<devices>{{}, {0}, {0}}));
  ASSERT_EQ(found.left_out.size(), 1U);
  EXPECT_EQ(found.left_out[0].model, 0U);
  EXPECT_EQ(found.left_out[0].why, reason::no_room);
  EXPECT_EQ(found.left_out[0].most_bytes, 0U);
}

TEST(placing_by_attainment, says_why_a_model_is_nowhere) {
  std::vector<placeable_model> const models{
      model_of(100, 5.0), model_of(30, 4.0), model_of(25, 1.0),
      model_of(1, 3.0, 300ms)};  // would fill what time the second leaves
  std::vector<placement_device> const two{{10}, {50}};
  auto const found = place_by_attainment({models.data(), 3}, two, {});
  ASSERT_EQ(found.left_out.size(), 2U);
  EXPECT_EQ(found.left_out[0].model, 0U);
  EXPECT_EQ(found.left_out[0].why, reason::too_large);
  EXPECT_EQ(found.left_out[0].most_bytes, 50U);
  EXPECT_EQ(found.left_out[0].device, 1U);
  EXPECT_EQ(found.left_out[1].model, 2U);
  EXPECT_EQ(found.left_out[1].why, reason::no_room);
  EXPECT_EQ(found.left_out[1].most_bytes, 20U);
  EXPECT_EQ(found.left_out[1].device, 1U);
  std::vector<placeable_model> const harmful{models[1], models[3]};
  std::vector<placement_device> const large{{50}};
  auto const alone = place_by_attainment(harmful, large, {});
  ASSERT_EQ(alone.left_out.size(), 1U);
  EXPECT_EQ(alone.left_out[0].model, 1U);
  EXPECT_EQ(alone.left_out[0].why, reason::no_gain);
  EXPECT_EQ(alone.left_out[0].most_bytes, 20U);
}

TEST(placing_by_attainment, gives_a_place_to_who_is_never_asked_for) {
  std::vector<placeable_model> const models{model_of(10, 0.0), model_of(10, 1.0)};
  std::vector<placement_device> const one{{20}};
  EXPECT_TRUE(place_by_attainment(models, one, {}).left_out.empty());
  std::vector<placeable_model> const idle{model_of(10, 0.0), model_of(15, 0.0)};
  auto const found = place_by_attainment(idle, one, {});
  EXPECT_EQ(found.devices_of, (std::vector<devices>{{0}, {}}));
  EXPECT_EQ(share_of(idle, one, found), 1.0);
}

TEST(placing_by_attainment, is_near_the_best_placement_there_is) {
  random_cases random;
  double sum = 0.0;
  std::size_t best = 0, never_worse = 0;
  constexpr std::size_t cases = 150;
  for (std::size_t i = 0; i < cases; ++i) {
    auto const there = random.some_devices(random.number(2, 3));
    auto const count = random.number(2, there.size() == 2 ? 5 : 3);
    auto const utilisation = random.between(0.3, 1.3) * static_cast<double>(there.size());
    auto const models = random.some_models(count, utilisation);
    auto const found = place_by_attainment(models, there, {.least_gain = 0.0});
    ASSERT_TRUE(fits(models, there, found));
    double const share = share_of(models, there, found);
    double const optimum = best_share(models, there);
    ASSERT_LE(share, optimum + 1e-9);
    EXPECT_GE(share, 0.5 * optimum) << "case " << i;
    sum += optimum > 0.0 ? share / optimum : 1.0;
    best += share > optimum - 1e-6 ? 1 : 0;
    never_worse += share > share_of(models, there, place_in_rotation(models, there)) - 1e-9 &&
                           share > share_of(models, there, place_first_fit(models, there)) - 1e-9
                       ? 1
                       : 0;
  }
  EXPECT_GE(sum / static_cast<double>(cases), 0.99);
  EXPECT_GE(best, cases * 9 / 10);
  EXPECT_GE(never_worse, cases * 98 / 100);
}

TEST(placing_by_attainment, is_better_than_simple_rules_for_many_models) {
  random_cases random;
  for (std::size_t i = 0; i < 10; ++i) {
    std::vector<placement_device> const there(4, {60});
    auto const models = random.some_models(24, random.between(1.5, 3.0));
    auto const found = place_by_attainment(models, there, {});
    EXPECT_TRUE(fits(models, there, found));
    double const share = share_of(models, there, found);
    EXPECT_GT(share, share_of(models, there, place_in_rotation(models, there))) << i;
    EXPECT_GT(share, share_of(models, there, place_first_fit(models, there))) << i;
  }
}

TEST(placing_by_attainment, is_the_same_again) {
  random_cases random;
  auto const there = random.some_devices(3);
  auto const models = random.some_models(8, 2.0);
  EXPECT_EQ(place_by_attainment(models, there, {}).devices_of,
            place_by_attainment(models, there, {}).devices_of);
}

TEST(a_placements_prediction, is_that_of_the_server_for_each_device) {
  random_cases random;
  for (std::size_t i = 0; i < 20; ++i) {
    std::vector<placement_device> const one{{1000}};
    auto models = random.some_models(random.number(1, 4), 0.7);
    for (auto& each : models) {  // of samples, which the server's mixtures keep as they are
      std::vector<double> samples;
      for (int k = 0; k < 40; ++k) {
        samples.push_back(each.service.mean().count() * (k % 4 == 0 ? 2.5 : 0.5));
      }
      each.service = distribution::of_samples(samples);
    }
    auto const seen = predict_placement(
        models, one, {.devices_of = std::vector<devices>(models.size(), {0})}, {});
    std::vector<shared_model> asked;
    for (auto const& each : models) {
      asked.push_back({.arrivals_per_s = each.arrivals_per_s, .service = each.service});
    }
    auto const beside = predict_together(asked, {});
    for (std::size_t m = 0; m < models.size(); ++m) {
      auto const& it = models[m];
      attainment_model const its{it.service, it.load, it.latency, beside[m]};
      double const exceed = poisson_exceed(it.arrivals_per_s, it.idle_timeout);
      EXPECT_NEAR(seen.share_within_of[m], its.at(it.arrivals_per_s).share_within(exceed), 2e-3);
    }
    EXPECT_NEAR(seen.devices[0].utilisation, 0.7, 1e-9);
  }
}

TEST(a_placements_prediction, counts_models_that_are_nowhere_as_late) {
  std::vector<placeable_model> const models{model_of(1, 1.0), model_of(1, 3.0)};
  std::vector<placement_device> const one{{1}};
  auto const seen = predict_placement(models, one, {.devices_of = {{0}, {}}}, {});
  EXPECT_EQ(seen.share_within_of[1], 0.0);
  EXPECT_NEAR(seen.share_within, 0.25 * seen.share_within_of[0], 1e-12);
  EXPECT_EQ(seen.devices[0].bytes, 1U);
}

TEST(a_placements_prediction, knows_that_several_computations_at_once_take_turns_less) {
  std::vector<placeable_model> const models{model_of(1, 10.0), model_of(1, 12.0)};
  std::vector<placement_device> const one{{2}};
  model_placement const both{.devices_of = {{0}, {0}}};
  EXPECT_EQ(share_of(models, one, both), 0.0) << "22/s of 50 ms is more than one can do";
  EXPECT_GT(share_of(models, one, both, {.executors = {.at_once = 2}}), 0.9);
  double const slower =
      share_of(models, one, both, {.executors = {.at_once = 2, .slowdown = {1.0, 1.5}}});
  EXPECT_GT(slower, 0.3);
  EXPECT_LT(slower, 0.9);
  // One of its own at a time.
  std::vector<placeable_model> const busy{model_of(1, 22.0)};
  model_placement const there{.devices_of = {{0}}};
  EXPECT_EQ(share_of(busy, one, there, {.executors = {.at_once = 2}}), 0.0);
}

TEST(placing_by_simple_rules, takes_models_in_their_order) {
  std::vector<placeable_model> const models{model_of(10, 1.0), model_of(10, 1.0), model_of(30, 1.0),
                                            model_of(10, 1.0), model_of(50, 1.0)};
  std::vector<placement_device> const two{{40}, {40}};
  auto const rotation = place_in_rotation(models, two);
  EXPECT_EQ(rotation.devices_of, (std::vector<devices>{{0}, {1}, {0}, {1}, {}}));
  auto const first = place_first_fit(models, two);
  EXPECT_EQ(first.devices_of, (std::vector<devices>{{0}, {0}, {1}, {0}, {}}));
  ASSERT_EQ(first.left_out.size(), 1U);
  EXPECT_EQ(first.left_out[0].why, reason::too_large);
}

TEST(placing, refuses_what_has_no_meaning_and_says_what_would) {
  auto const said = [](std::vector<placeable_model> const& models, std::size_t count,
                       placement_settings const& settings) -> std::string {
    try {
      (void)place_by_attainment(models, std::vector<placement_device>(count, {10}), settings);
    } catch (std::invalid_argument const& wrong) {
      return wrong.what();
    }
    return "";
  };
  EXPECT_NE(said({model_of(1, 1.0)}, 0, {}).find("at least one device"), std::string::npos);
  EXPECT_NE(said({model_of(1, -1.0)}, 1, {}).find("arrivals_per_s of model 0 must be"),
            std::string::npos);
  EXPECT_NE(said({model_of(1, std::nan(""))}, 1, {}).find("finite number >= 0"), std::string::npos);
  EXPECT_NE(said({model_of(1, 1.0, 50ms, 0s)}, 1, {}).find("the latency of model 0"),
            std::string::npos);
  EXPECT_NE(said({model_of(1, 1.0)}, 1, {.least_gain = 1.0}).find("[0, 1)"), std::string::npos);
  EXPECT_NE(said({model_of(1, 1.0)}, 1, {.executors = {.at_once = 0}}).find("one computation"),
            std::string::npos);
  EXPECT_THROW(
      (void)predict_placement({}, std::vector<placement_device>{{1}}, {.devices_of = {{0}}}, {}),
      std::invalid_argument);
  std::vector<placeable_model> const one{model_of(1, 1.0)};
  EXPECT_THROW(
      (void)predict_placement(one, std::vector<placement_device>{{1}}, {.devices_of = {{1}}}, {}),
      std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
