// What must hold whatever the scheduler is told: NaN, zero, what is huge, clocks that go back. At length by
// SLUICE_TEST_OPERATIONS=1000000, a seed of its own by SLUICE_TEST_SEED.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "scheduler/model_controller.hpp"
#include "scheduler/pause_budget.hpp"
#include "scheduler/shared_executors.hpp"

namespace sluice::scheduler {
namespace {

instant at(double s) {
  return instant{seconds{s}};
}

std::uint64_t number_from(char const* name, std::uint64_t otherwise) {
  auto const* const said = std::getenv(name);
  return said != nullptr ? std::stoull(said) : otherwise;
}

/// Numbers as no sane caller would give them, among others.
class wild_numbers {
 public:
  explicit wild_numbers(std::uint64_t seed) : random_(seed) {}

  double any() {
    static constexpr std::array strange{0.0,
                                        -0.0,
                                        -1.0,
                                        1e-300,
                                        1e300,
                                        std::numeric_limits<double>::infinity(),
                                        -std::numeric_limits<double>::infinity(),
                                        std::numeric_limits<double>::quiet_NaN(),
                                        std::numeric_limits<double>::denorm_min(),
                                        std::numeric_limits<double>::max()};
    return below(8) == 0 ? strange.at(below(strange.size())) : sane();
  }
  /// From a microsecond to a hundred seconds.
  double sane() { return std::pow(10.0, -6.0 + 8.0 * share()); }
  double share() { return static_cast<double>(random_() >> 11U) * 0x1p-53; }
  std::size_t below(std::size_t end) { return static_cast<std::size_t>(random_() % end); }

 private:
  std::mt19937_64 random_;
};

model_settings settings_of(wild_numbers& draw) {
  model_settings s;
  s.goal = {.percentile = 0.5 + 0.499 * draw.share(),
            .latency = seconds{draw.sane()},
            .attainment = 0.5 + 0.499 * draw.share(),
            .window = seconds{10.0 + draw.sane()}};
  s.limits.min_idle = seconds{draw.below(2) == 0 ? 0.0 : draw.sane()};
  s.limits.max_idle = draw.below(2) == 0 ? forever : s.limits.min_idle + seconds{draw.sane()};
  s.weight_bytes = draw.below(4) == 0 ? std::numeric_limits<std::uint64_t>::max() : 1U << 30U;
  s.load.mean = seconds{draw.sane()};
  s.reject_on_miss = draw.below(2) == 0;
  s.resident_parts = draw.below(4) == 0 ? 4 : 1;
  return s;
}

template <typename Call>
void refused_or_taken(Call const& call) {
  try {
    call();
  } catch (std::invalid_argument const&) {  // the only way to say no
  }
}

void expect_sound(model_report const& report, model_settings const& settings) {
  auto const& made = report.warm;
  auto const is_share = [](double value) { return value >= 0.0 && value <= 1.0; };
  ASSERT_LT(made.chosen.parts, settings.resident_parts);
  ASSERT_GE(made.chosen.idle_timeout, settings.limits.min_idle);
  ASSERT_LE(made.chosen.idle_timeout, settings.limits.max_idle);
  ASSERT_TRUE(is_share(made.chosen.attainment)) << made.chosen.attainment;
  ASSERT_TRUE(is_share(made.chosen.released_fraction)) << made.chosen.released_fraction;
  ASSERT_TRUE(is_share(made.required_share)) << made.required_share;
  ASSERT_GE(made.admit_share, 0.05);
  ASSERT_LE(made.admit_share, 1.0);
  ASSERT_GE(made.retry_after.count(), 0.0);
  ASSERT_TRUE(std::isfinite(made.chosen.loads_per_s));
  if (!settings.reject_on_miss) {
    ASSERT_EQ(made.admit_share, 1.0);
  }
}

/// What still keeps the promise is left only for what releases a tenth and a thousandth more.
void expect_no_oscillation(warm_decision const& made, seconds before, unsigned parts) {
  auto const was = std::find_if(
      made.candidates.begin(), made.candidates.end(),
      [&](auto const& each) { return each.idle_timeout == before && each.parts == parts; });
  if (!made.changed || was == made.candidates.end() || !made.feasible() ||
      was->attainment < made.required_share) {
    return;
  }
  ASSERT_GE(made.chosen.released_fraction, 1.1 * was->released_fraction + 0.001 - 1e-9);
}

TEST(ticks, stay_sound_whatever_they_are_told) {
  auto const seed = number_from("SLUICE_TEST_SEED", 1);
  auto const ticks = number_from("SLUICE_TEST_OPERATIONS", 20'000);
  SCOPED_TRACE("SLUICE_TEST_SEED=" + std::to_string(seed));
  wild_numbers draw{seed};
  constexpr std::uint64_t ticks_of_one = 200;
  for (std::uint64_t done = 0; done < ticks;) {
    auto const settings = settings_of(draw);
    bool const is_wild = draw.below(2) == 0;
    auto const number = [&] { return is_wild ? draw.any() : draw.sane(); };
    model_controller model{settings, at(0.0)};
    double now_s = 0.0;
    seconds before = model.idle_timeout();
    unsigned parts = 0;
    for (std::uint64_t i = 0; i < ticks_of_one && done < ticks; ++i, ++done) {
      for (auto events = draw.below(6); events > 0; --events) {
        now_s += 0.1 * draw.share();
        instant const when = at(draw.below(50) == 0 && is_wild ? draw.any() : now_s);
        switch (draw.below(6)) {
          case 0:
          case 1:
            (void)model.on_arrival(when, draw.below(4));
            break;
          case 2:
            refused_or_taken([&] { model.on_service(when, seconds{number()}, seconds{number()}); });
            break;
          case 3:
            model.on_failure(when, draw.below(2) == 0);
            break;
          case 4:
            model.on_refused_elsewhere(when, draw.below(4), seconds{number()});
            break;
          default:
            refused_or_taken(
                [&] { model.on_load(when, seconds{number()}, seconds{number()}, number()); });
        }
      }
      auto const beside = predict_together(
          std::vector<shared_model>{model.demand(at(now_s)),
                                    {.arrivals_per_s = draw.below(3) == 0 ? draw.sane() : 0.0,
                                     .service = distribution::gamma(seconds{draw.sane()}, 1.0)}},
          {.at_once = 1});
      model_report report;
      ASSERT_NO_THROW(report = model.tick(at(now_s), beside[0]));
      ASSERT_NO_FATAL_FAILURE(expect_sound(report, settings));
      if (i > 0) {
        ASSERT_NO_FATAL_FAILURE(expect_no_oscillation(report.warm, before, parts));
      }
      before = model.idle_timeout();
      parts = report.warm.unaided_parts;
      ASSERT_EQ(model.resident_share(), static_cast<double>(parts) / settings.resident_parts);
      if (draw.below(100) == 0) {  // a successor goes on
        model_controller next{settings, at(now_s)};
        ASSERT_NO_THROW(next.recall(model.learnt(at(now_s)), seconds{draw.sane()}, at(now_s)));
        ASSERT_EQ(next.idle_timeout(), before);
        model = next;
        parts = 0;
      }
      ASSERT_GE(model.absence_loss(at(now_s)), 0.0);
    }
  }
}

TEST(ticks, settle_where_nothing_changes) {
  wild_numbers draw{number_from("SLUICE_TEST_SEED", 1)};
  for (int i = 0; i < 300; ++i) {
    warm_inputs in{.goal = settings_of(draw).goal,
                   .arrivals_per_s = draw.sane(),
                   .service = distribution::gamma(seconds{draw.sane()}, 2.0 * draw.share()),
                   .load = distribution::gamma(seconds{draw.sane()}, draw.share()),
                   .resident_parts = draw.below(2) == 0 ? 1U : 8U,
                   .log_odds = draw.below(2) == 0 ? 0.0 : 4.0 * draw.share() - 2.0};
    auto const first = decide(in);
    in.current = first.chosen.idle_timeout;
    in.current_parts = first.chosen.parts;
    for (int again = 0; again < 3; ++again) {
      auto const made = decide(in);
      ASSERT_FALSE(made.changed);
      in.current = made.chosen.idle_timeout;
    }
  }
}

}  // namespace
}  // namespace sluice::scheduler
