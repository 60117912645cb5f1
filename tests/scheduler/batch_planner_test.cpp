#include "scheduler/batch_planner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <stdexcept>

#include "tests/scheduler/micro_batch_cost.hpp"

namespace sluice::scheduler {
namespace {

constexpr std::uint64_t plenty = 1'000'000'000;

/// A job with these costs.
struct job {
  micro_batch_cost cost{};

  void run(batch_planner& planner, std::uint64_t n) const {
    planner.committed(n, cost.bytes(n), cost.time(n));
  }
  /// One step: every slice that the planner asks for runs, if it fits. Returns the sizes.
  std::vector<std::uint64_t> step(batch_planner& planner, std::uint64_t global,
                                  std::uint64_t arena) const {
    std::vector<std::uint64_t> sizes;
    while (global > 0) {
      auto const next = planner.plan({.remaining_samples = global, .arena_bytes = arena});
      if (next.wait || next.samples == 0 || sizes.size() > 10'000) {
        return sizes;
      }
      if (cost.bytes(next.samples) > arena) {
        planner.out_of_memory(next.samples, arena);
        continue;
      }
      run(planner, next.samples);
      sizes.push_back(next.samples);
      global -= next.samples;
    }
    return sizes;
  }
};

TEST(batch_planner, tries_the_users_size_first) {
  batch_planner const planner{{.largest = 64}};
  auto const next = planner.plan({.remaining_samples = 256, .arena_bytes = plenty});
  EXPECT_EQ(next.samples, 64U);
  EXPECT_EQ(next.slices_left, 4U);
  EXPECT_FALSE(next.wait);
}

TEST(batch_planner, cuts_the_global_batch_evenly_and_exactly) {
  for (std::uint64_t global = 1; global < 300; global += 7) {
    for (std::uint64_t largest : {1U, 3U, 64U, 1000U}) {
      batch_planner planner{{.largest = largest}};
      std::uint64_t remaining = global;
      std::uint64_t smallest_seen = global;
      std::uint64_t largest_seen = 0;
      while (remaining > 0) {
        auto const next = planner.plan({.remaining_samples = remaining, .arena_bytes = plenty});
        ASSERT_GE(next.samples, 1U);
        ASSERT_LE(next.samples, std::min(remaining, largest));
        smallest_seen = std::min(smallest_seen, next.samples);
        largest_seen = std::max(largest_seen, next.samples);
        remaining -= next.samples;
      }
      EXPECT_LE(largest_seen - smallest_seen, 1U);
    }
  }
  EXPECT_EQ(
      batch_planner{{.largest = 4}}.plan({.remaining_samples = 0, .arena_bytes = plenty}).samples,
      0U);
}

TEST(batch_planner, learns_base_and_slope_of_memory_and_time) {
  batch_planner planner{{.largest = 64}};
  job const j;
  for (std::uint64_t const n : {64U, 16U, 40U}) {
    j.run(planner, n);
  }
  EXPECT_NEAR(planner.bytes_per_micro_batch().base, 1000.0, 1e-6);
  EXPECT_NEAR(planner.bytes_per_micro_batch().slope, 100.0, 1e-9);
  EXPECT_NEAR(planner.seconds_per_micro_batch().base, 0.010, 1e-9);
  EXPECT_NEAR(planner.seconds_per_micro_batch().slope, 0.001, 1e-12);
}

TEST(batch_planner, fits_the_micro_batch_into_the_arena) {
  batch_planner planner{{.largest = 64}};
  job const j;
  j.run(planner, 64);
  j.run(planner, 16);
  auto const next = planner.plan({.remaining_samples = 6400, .arena_bytes = 4200});
  EXPECT_EQ(next.samples, 30U);  // 1.05 · (1000 + 100 · 30) = 4200
  EXPECT_EQ(next.needed_bytes, 4200U);
  for (std::uint64_t arena = 1200; arena < 9000; arena += 50) {
    auto const n = planner.plan({.remaining_samples = 6400, .arena_bytes = arena}).samples;
    EXPECT_LE(j.cost.bytes(n), arena) << arena;
  }
}

TEST(batch_planner, never_plans_less_for_more_memory) {
  batch_planner planner{{.largest = 64}};
  job const j;
  j.run(planner, 64);
  j.run(planner, 8);
  std::uint64_t before = 0;
  for (std::uint64_t arena = 1000; arena < 12'000; arena += 10) {
    auto const now = planner.plan({.remaining_samples = 1u << 20U, .arena_bytes = arena}).samples;
    EXPECT_GE(now, before);
    before = now;
  }
  EXPECT_EQ(before, 64U);
}

TEST(batch_planner, while_nothing_is_taken_away_cuts_alike_whatever_time_is_measured) {
  batch_planner planner{{.largest = 16}};
  for (int step = 0; step < 50; ++step) {
    std::vector<std::uint64_t> cut;
    for (std::uint64_t left = 50; left > 0; left -= cut.back()) {
      cut.push_back(planner.plan({.remaining_samples = left, .arena_bytes = plenty}).samples);
      auto const noise = static_cast<double>((7 * static_cast<std::uint64_t>(step) + left) % 5);
      planner.committed(cut.back(), 100, seconds{0.001 * (1.0 + noise)});
    }
    ASSERT_EQ(cut, (std::vector<std::uint64_t>{13, 13, 12, 12})) << "step " << step;
  }
}

TEST(batch_planner, stops_growing_back_where_doubling_gains_less_than_two_percent) {
  batch_planner planner{{.largest = 4096}};
  job const j{{.base_s = 0.0021}};  // gain of doubling: 2.1/(2.1 + 2n) < 2 % from n = 51.45
  j.run(planner, 16);
  j.run(planner, 32);
  EXPECT_EQ(planner.plan({.remaining_samples = 4096, .arena_bytes = plenty}).samples, 4096U);
  planner.discarded(4096);
  EXPECT_EQ(planner.plan({.remaining_samples = 5200, .arena_bytes = plenty}).samples, 52U);
}

TEST(batch_planner, does_not_believe_a_fit_below_what_it_measured) {
  batch_planner planner{{.largest = 128}};
  planner.committed(32, 100, seconds{0.032});
  planner.committed(64, 200, seconds{0.0641});  // noise: no base at all
  planner.discarded(128);
  EXPECT_EQ(planner.plan({.remaining_samples = 640, .arena_bytes = plenty}).samples, 32U);
}

TEST(batch_planner, does_not_believe_a_fit_of_sizes_that_are_nearly_the_same) {
  batch_planner planner{{.largest = 64}};
  planner.committed(12, 100, seconds{0.012});
  planner.committed(13, 100, seconds{0.0131});
  planner.discarded(64);
  EXPECT_EQ(planner.plan({.remaining_samples = 640, .arena_bytes = plenty}).samples, 32U);
}

TEST(batch_planner, looks_again_at_a_size_that_it_has_left) {
  batch_planner planner{{.largest = 128}};
  job const j;
  planner.discarded(128);
  planner.committed(64, j.cost.bytes(64), 3.0 * j.cost.time(64));  // beside a burst of requests
  j.run(planner, 32);
  int left_for = 1;
  while (planner.plan({.remaining_samples = 640, .arena_bytes = plenty}).samples < 64) {
    j.run(planner, 32);
    ASSERT_LT(++left_for, 20);
  }
  j.run(planner, 64);
  EXPECT_GE(planner.plan({.remaining_samples = 640, .arena_bytes = plenty}).samples, 64U);
}

TEST(batch_planner, is_not_misled_by_one_slow_micro_batch) {
  batch_planner planner{{.largest = 64}};
  job const j;
  for (int i = 0; i < 5; ++i) {
    j.run(planner, 64);
    j.run(planner, 32);
    j.run(planner, 16);
  }
  planner.committed(32, j.cost.bytes(32), seconds{10.0});  // a pause that nobody subtracted
  EXPECT_NEAR(planner.seconds_per_micro_batch().slope, 0.001, 1e-6);
}

TEST(batch_planner, halves_after_a_discard_and_grows_back) {
  batch_planner planner{{.largest = 64}};
  job const j{{.base_s = 1.0}};  // so that throughput always gains
  j.run(planner, 64);
  planner.discarded(64);
  std::uint64_t n = planner.plan({.remaining_samples = 1u << 20U, .arena_bytes = plenty}).samples;
  EXPECT_EQ(n, 32U);
  planner.discarded(n);
  EXPECT_EQ(planner.plan({.remaining_samples = 1u << 20U, .arena_bytes = plenty}).samples, 16U);
  std::uint64_t before = 16;
  for (int i = 0; i < 12; ++i) {
    n = planner.plan({.remaining_samples = 1u << 20U, .arena_bytes = plenty}).samples;
    EXPECT_GE(n, before);
    before = n;
    j.run(planner, n);
  }
  EXPECT_EQ(n, 64U);
}

TEST(batch_planner, goes_down_to_one_sample_and_never_to_none) {
  batch_planner planner{{.largest = 64}};
  for (int i = 0; i < 50; ++i) {
    planner.discarded(planner.plan({.remaining_samples = 64, .arena_bytes = plenty}).samples);
  }
  auto const next = planner.plan({.remaining_samples = 64, .arena_bytes = plenty});
  EXPECT_EQ(next.samples, 1U);
  EXPECT_FALSE(next.wait);
}

TEST(batch_planner, finds_a_size_that_fits_after_running_out_of_memory) {
  for (std::uint64_t const arena : {1101U, 1500U, 3000U, 6000U, 7399U, 7400U}) {
    batch_planner planner{{.largest = 64}};
    job const j;
    auto const sizes = j.step(planner, 256, arena);
    std::uint64_t sum = 0;
    for (auto const n : sizes) {
      sum += n;
    }
    EXPECT_EQ(sum, 256U) << arena;
  }
}

TEST(batch_planner, does_not_run_out_of_memory_again_and_again) {
  batch_planner planner{{.largest = 64}};
  job const j{{.base_s = 1.0}};
  for (int step = 0; step < 10; ++step) {
    (void)j.step(planner, 256, 5000);
  }
  int failures = 0;
  for (int step = 0; step < 10; ++step) {
    std::uint64_t remaining = 256;
    while (remaining > 0) {
      auto const n = planner.plan({.remaining_samples = remaining, .arena_bytes = 5000}).samples;
      if (j.cost.bytes(n) > 5000) {
        ++failures;
        planner.out_of_memory(n, 5000);
        continue;
      }
      j.run(planner, n);
      remaining -= n;
    }
  }
  EXPECT_EQ(failures, 0);
}

TEST(batch_planner, waits_when_not_even_one_sample_fits_and_goes_on_when_there_is_more) {
  batch_planner planner{{.largest = 64}};
  planner.out_of_memory(1, 1000);
  auto const next = planner.plan({.remaining_samples = 64, .arena_bytes = 1000});
  EXPECT_TRUE(next.wait);
  EXPECT_EQ(next.samples, 0U);
  EXPECT_GT(next.needed_bytes, 1000U);
  EXPECT_EQ(planner.plan({.remaining_samples = 64, .arena_bytes = next.needed_bytes}).samples, 1U);
  EXPECT_TRUE(batch_planner{{.largest = 8}}.plan({.remaining_samples = 64, .arena_bytes = 0}).wait);
}

TEST(batch_planner, tries_one_sample_where_only_an_extrapolation_forbids_it) {
  batch_planner planner{{.largest = 64}};
  planner.committed(32, 5000, seconds{1.0});
  planner.committed(64, 5100, seconds{2.0});
  auto const next = planner.plan({.remaining_samples = 64, .arena_bytes = 2000});
  EXPECT_FALSE(next.wait);
  EXPECT_EQ(next.samples, 1U);
}

TEST(batch_planner, forgets_that_it_ran_out_of_memory) {
  batch_planner planner{{.largest = 64}};
  planner.out_of_memory(64, 10'000);
  job const j{{.base_s = 1.0}};
  std::uint64_t n = 0;
  for (int i = 0; i < 100; ++i) {
    n = planner.plan({.remaining_samples = 1u << 20U, .arena_bytes = 10'000}).samples;
    j.run(planner, n);
  }
  EXPECT_EQ(n, 64U);
}

TEST(batch_planner, with_a_fixed_size_keeps_it_after_everything) {
  batch_planner planner{{.largest = 48, .fixed = true}};
  job const j;
  j.run(planner, 48);
  planner.discarded(48);
  auto const next = planner.plan({.remaining_samples = 100, .arena_bytes = plenty});
  EXPECT_EQ(next.samples, 48U);
  EXPECT_EQ(next.slices_left, 3U);
  EXPECT_EQ(planner.plan({.remaining_samples = 4, .arena_bytes = plenty}).samples, 4U);
  EXPECT_TRUE(planner.plan({.remaining_samples = 100, .arena_bytes = 5000}).wait);
  EXPECT_EQ(planner.plan({.remaining_samples = 100, .arena_bytes = 5000}).needed_bytes,
            j.cost.bytes(48));
}

TEST(batch_planner, waits_for_no_more_than_its_size_has_run_in) {
  batch_planner planner{{.largest = 48, .fixed = true}};
  job const j;
  j.run(planner, 48);  // in 5 800 bytes
  planner.out_of_memory(48, 5700);
  EXPECT_EQ(planner.plan({.remaining_samples = 48, .arena_bytes = 5800}).samples, 48U);
  auto const short_of_it = planner.plan({.remaining_samples = 48, .arena_bytes = 5799});
  EXPECT_TRUE(short_of_it.wait);
  EXPECT_EQ(short_of_it.needed_bytes, 5800U);
  planner.out_of_memory(48, 5800);  // which is not enough any more
  EXPECT_GT(planner.plan({.remaining_samples = 48, .arena_bytes = 5800}).needed_bytes, 5800U);
}

TEST(batch_planner, does_not_wait_for_what_a_size_has_needed_at_first_alone) {
  batch_planner planner{{.largest = 48, .fixed = true}};
  planner.committed(48, 6200, seconds{1.0}, 6200);
  planner.committed(48, 5800, seconds{1.0}, 6200);
  EXPECT_EQ(planner.plan({.remaining_samples = 48, .arena_bytes = 5800}).samples, 48U);
  EXPECT_GT(planner.bytes_per_micro_batch().at(48), 6199.0);
  for (int i = 0; i < 5; ++i) {
    planner.committed(48, 5800, seconds{1.0}, 6200);
  }
  planner.out_of_memory(48, 5700);
  EXPECT_EQ(planner.plan({.remaining_samples = 48, .arena_bytes = 5800}).samples, 48U);
}

TEST(batch_planner, keeps_a_size_in_as_much_as_it_has_run_in) {
  batch_planner planner{{.largest = 64}};
  job const j{{.base_s = 1.0}};
  j.run(planner, 16);
  j.run(planner, 64);  // in 7 400 bytes
  EXPECT_EQ(planner.plan({.remaining_samples = 256, .arena_bytes = 7400}).samples, 64U);
  EXPECT_LT(planner.plan({.remaining_samples = 256, .arena_bytes = 7399}).samples, 64U);
  planner.out_of_memory(64, 7400);
  for (int i = 0; i < 20; ++i) {
    auto const n = planner.plan({.remaining_samples = 256, .arena_bytes = 7400}).samples;
    EXPECT_LT(n, 64U);
    j.run(planner, n);
  }
}

TEST(batch_planner, remembers_only_the_sizes_used_last) {
  cost_model model;
  for (std::uint64_t n = 1; n <= 100; ++n) {
    for (int i = 0; i < 9; ++i) {
      model.add(n, static_cast<double>(n));
    }
  }
  EXPECT_EQ(model.points().size(), 16U);
  std::set<std::uint64_t> sizes;
  for (auto const& p : model.points()) {
    sizes.insert(p.samples);
    EXPECT_EQ(p.values.size(), 5U);
  }
  EXPECT_EQ(*sizes.begin(), 85U);
}

TEST(batch_planner, refuses_a_largest_size_of_zero) {
  EXPECT_THROW(batch_planner{{.largest = 0}}, std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
