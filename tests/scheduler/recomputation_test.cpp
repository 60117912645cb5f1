#include "scheduler/recomputation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>

#include "tests/scheduler/micro_batch_cost.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint64_t plenty = 1'000'000'000;

/// A job that can compute its activations again: a third more time for a sample, and a fifth of the memory.
struct job {
  micro_batch_cost kept{};
  micro_batch_cost again{.bytes_per_sample = 20, .s_per_sample = 0.00133};

  micro_batch_cost const& of(bool recompute) const { return recompute ? again : kept; }

  /// Samples a second of the best micro-batch that fits with the margin of plans, which is a twentieth.
  double best(bool recompute, std::uint64_t arena, std::uint64_t largest) const {
    auto const& c = of(recompute);
    double found = 0.0;
    for (std::uint64_t n = 1; n <= largest && 21 * c.bytes(n) <= 20 * arena; ++n) {
      found = std::max(found, static_cast<double>(n) / c.time(n).count());
    }
    return found;
  }
};

/// What has been trained with a planner, and in how long.
class training {
 public:
  training(job const& of, recomputing_planner& planner, double noise = 0.0)
      : job_(of), planner_(planner), noise_(noise) {}

  /// False: it waits.
  bool step(std::uint64_t global, std::uint64_t arena) {
    while (global > 0) {
      auto const [next, recompute] =
          planner_.plan({.remaining_samples = global, .arena_bytes = arena});
      if (next.wait) {
        waits_for = next.needed_bytes;
        return false;
      }
      EXPECT_GE(next.samples, 1U);
      EXPECT_LE(next.samples, global);
      auto const& c = job_.of(recompute);
      if (c.bytes(next.samples) > arena) {
        seconds_ += c.time(next.samples).count();
        planner_.out_of_memory(recompute, next.samples, arena);
        continue;
      }
      auto const took = c.time(next.samples).count() * (1.0 + slowed(random_));
      seconds_ += took;
      ++(recompute ? recomputed : kept);
      planner_.committed(recompute, next.samples, c.bytes(next.samples), seconds{took});
      global -= next.samples;
      samples_ += next.samples;
    }
    return true;
  }

  double rate() const { return static_cast<double>(samples_) / seconds_; }
  void forget() { samples_ = kept = recomputed = 0, seconds_ = 0.0; }

  std::uint64_t kept = 0, recomputed = 0, waits_for = 0;

 private:
  double slowed(std::mt19937_64& random) const {
    return noise_ * std::exponential_distribution<double>{}(random);
  }

  job job_;
  recomputing_planner& planner_;
  double noise_;
  std::mt19937_64 random_{7};
  std::uint64_t samples_ = 0;
  double seconds_ = 0.0;
};

TEST(recomputation, never_happens_where_the_users_micro_batch_fits) {
  recomputing_planner planner{{.largest = 64}, true};
  training run{{}, planner, 0.2};
  for (int step = 0; step < 2000; ++step) {
    ASSERT_TRUE(run.step(256, plenty));
  }
  EXPECT_EQ(run.recomputed, 0U);
}

TEST(recomputation, that_is_not_offered_never_happens) {
  recomputing_planner planner{{.largest = 64}, false};
  batch_planner alone{{.largest = 64}};
  job const all;
  for (int slice = 0; slice < 500; ++slice) {
    batch_planner::input const now{.remaining_samples = 64,
                                   .arena_bytes = slice % 100 < 50 ? 2000U : 5000U};
    auto const [next, recompute] = planner.plan(now);
    auto const wanted = alone.plan(now);
    ASSERT_FALSE(recompute);
    ASSERT_EQ(next.samples, wanted.samples);
    if (all.kept.bytes(next.samples) > now.arena_bytes) {
      planner.out_of_memory(false, next.samples, now.arena_bytes);
      alone.out_of_memory(next.samples, now.arena_bytes);
    } else {
      planner.committed(false, next.samples, all.kept.bytes(next.samples),
                        all.kept.time(next.samples));
      alone.committed(next.samples, all.kept.bytes(next.samples), all.kept.time(next.samples));
    }
  }
}

TEST(recomputation, finds_the_better_way_for_every_amount_of_memory) {
  job const all;
  std::uint64_t better_again = 0, better_kept = 0;
  for (std::uint64_t arena = 1150; arena < 8000; arena += 150) {
    for (double const noise : {0.0, 0.1}) {
      recomputing_planner planner{{.largest = 64}, true};
      training run{all, planner, noise};
      for (int step = 0; step < 40; ++step) {
        ASSERT_TRUE(run.step(256, arena));
      }
      run.forget();
      for (int step = 0; step < 400; ++step) {
        ASSERT_TRUE(run.step(256, arena));
      }
      auto const kept = all.best(false, arena, 64), again = all.best(true, arena, 64);
      // Even cuts cost as much with either way alone.
      EXPECT_GE(run.rate() * (1.0 + noise), 0.93 * std::max(kept, again)) << arena;
      if (again > 1.1 * kept) {
        EXPECT_GT(run.recomputed, 20 * run.kept) << arena;
        ++better_again;
      } else if (kept > 1.1 * again) {
        EXPECT_GT(run.kept, 20 * run.recomputed) << arena;
        ++better_kept;
      }
    }
  }
  EXPECT_GT(better_again, 5U);
  EXPECT_GT(better_kept, 5U);
}

TEST(recomputation, is_at_most_a_percent_below_the_better_of_both_settings) {
  job const all;
  for (std::uint64_t const arena : {1400U, 2200U, 4000U}) {
    auto const run_with = [&](job const& how, bool offered) {
      recomputing_planner planner{{.largest = 64}, offered};
      training run{how, planner, 0.05};
      for (int step = 0; step < 2000; ++step) {
        EXPECT_TRUE(run.step(256, arena));
      }
      return run.rate();
    };
    auto const kept = run_with(all, false);
    auto const again = run_with({.kept = all.again, .again = all.again}, false);
    EXPECT_GE(run_with(all, true), 0.99 * std::max(kept, again)) << arena;
  }
}

TEST(recomputation, follows_the_memory_and_remembers_what_it_found) {
  job const all;
  recomputing_planner planner{{.largest = 64}, true};
  training run{all, planner};
  for (int round = 0; round < 6; ++round) {
    for (auto const& [arena, again] :
         {std::pair{std::uint64_t{1500}, true}, {std::uint64_t{6500}, false}, {plenty, false}}) {
      for (int step = 0; step < 20; ++step) {
        ASSERT_TRUE(run.step(256, arena));
      }
      run.forget();
      for (int step = 0; step < 20; ++step) {
        ASSERT_TRUE(run.step(256, arena));
      }
      EXPECT_GT(again ? run.recomputed : run.kept, 4 * (again ? run.kept : run.recomputed))
          << round << ' ' << arena;
    }
  }
}

TEST(recomputation, is_what_is_left_where_not_even_one_sample_fits_otherwise) {
  job const all{.kept = {.bytes_per_sample = 5000}, .again = {.bytes_per_sample = 500}};
  recomputing_planner planner{{.largest = 16}, true};
  training run{all, planner};
  EXPECT_TRUE(run.step(32, 2000));
  EXPECT_GT(run.recomputed, 0U);
  EXPECT_EQ(run.kept, 0U);
  EXPECT_FALSE(run.step(32, 1200));
  EXPECT_LE(run.waits_for, all.again.bytes(1));
}

TEST(recomputation, of_a_fixed_size_happens_where_that_does_not_fit_otherwise) {
  job const all;
  recomputing_planner planner{{.largest = 32, .fixed = true}, true};
  training run{all, planner};
  ASSERT_TRUE(run.step(64, plenty));
  EXPECT_EQ(run.recomputed, 0U);
  ASSERT_TRUE(run.step(64, 3000));
  EXPECT_EQ(run.recomputed, 2U);
  run.forget();
  ASSERT_TRUE(run.step(64, plenty));
  EXPECT_EQ(run.recomputed, 0U);
  EXPECT_FALSE(run.step(64, 1500)) << "that fits neither way";
  EXPECT_LE(run.waits_for, all.again.bytes(32));
}

TEST(recomputation, goes_on_after_discards_of_either_way) {
  job const all;
  std::mt19937_64 random{11};
  recomputing_planner planner{{.largest = 64}, true};
  std::uint64_t done = 0, recomputed = 0;
  for (int slice = 0; slice < 20'000; ++slice) {
    std::uint64_t const arena = 1200 + random() % 6000;
    auto const [next, recompute] = planner.plan({.remaining_samples = 128, .arena_bytes = arena});
    ASSERT_FALSE(next.wait);
    ASSERT_GE(next.samples, 1U);
    ASSERT_LE(next.samples, 64U);
    auto const bytes = all.of(recompute).bytes(next.samples);
    if (bytes > arena) {
      planner.out_of_memory(recompute, next.samples, arena);
    } else if (random() % 5 == 0) {
      planner.discarded(next.samples);
    } else {
      planner.committed(recompute, next.samples, bytes, all.of(recompute).time(next.samples));
      done += next.samples;
      recomputed += recompute ? 1 : 0;
    }
  }
  EXPECT_GT(done, 20'000U);
  EXPECT_GT(recomputed, 0U);
}

TEST(recomputation, does_not_mind_times_that_are_none) {
  constexpr std::array no_times{0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                                std::numeric_limits<double>::infinity()};
  recomputing_planner planner{{.largest = 8}, true};
  for (int slice = 0; slice < 200; ++slice) {
    auto const [next, recompute] = planner.plan({.remaining_samples = 8, .arena_bytes = 1500});
    ASSERT_FALSE(next.wait);
    auto const bytes = job{}.of(recompute).bytes(next.samples);
    if (bytes > 1500) {
      planner.out_of_memory(recompute, next.samples, 1500);
    } else {
      planner.committed(recompute, next.samples, bytes,
                        seconds{no_times.at(static_cast<std::size_t>(slice) % no_times.size())});
    }
  }
  EXPECT_THROW((recomputing_planner{{.largest = 0}, true}), std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
