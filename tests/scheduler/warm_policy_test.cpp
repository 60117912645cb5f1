#include "scheduler/warm_policy.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <stdexcept>

#include "scheduler/queueing.hpp"

namespace sluice::scheduler {
namespace {

/// Half a request per second, 100 ms of service, two seconds of load; 95 % within half a second.
warm_inputs rare_requests() {
  return {.goal = {.percentile = 0.9,
                   .latency = seconds{0.5},
                   .attainment = 0.9,
                   .window = seconds{300.0}},
          .weight_bytes = 1000,
          .arrivals_per_s = 0.5,
          .service = distribution::gamma(seconds{0.1}, 0.0),
          .load = distribution::gamma(seconds{2.0}, 0.0)};
}

bool contains(std::vector<seconds> const& all, seconds t) {
  return std::find(all.begin(), all.end(), t) != all.end();
}

TEST(decide, takes_the_shortest_timeout_that_keeps_the_promise) {
  warm_decision const d = decide(rare_requests());
  ASSERT_TRUE(d.feasible());
  EXPECT_GE(d.chosen.attainment, d.required_share);
  EXPECT_GT(d.chosen.idle_timeout.count(), 0.0);
  EXPECT_LT(d.chosen.idle_timeout, forever);
  for (auto const& other : d.candidates) {
    if (other.idle_timeout < d.chosen.idle_timeout) {
      // Would release more, but keeps the promise with too little to spare or not at all.
      EXPECT_LT(other.attainment, d.required_share + 0.1 * (1.0 - d.required_share));
    } else {
      EXPECT_LE(other.released_bytes, d.chosen.released_bytes);
    }
  }
}

TEST(decide, predicts_what_the_formulas_say_for_poisson_gaps) {
  warm_inputs const in = rare_requests();
  warm_decision const d = decide(in);
  queue_load const demand{.arrivals_per_s = 0.5, .service = in.service, .load = in.load};
  double const p = poisson_exceed(0.5, d.chosen.idle_timeout);
  EXPECT_NEAR(d.chosen.exceed, p, 1e-12);
  EXPECT_NEAR(d.chosen.released_fraction, cycle_of(demand, p).released_fraction, 1e-12);
  EXPECT_NEAR(d.chosen.released_bytes, 1000.0 * d.chosen.released_fraction, 1e-9);
  EXPECT_NEAR(d.chosen.loads_per_s, cycle_of(demand, p).loads_per_s, 1e-12);
  EXPECT_EQ(d.chosen.mean_wait, mean_wait(demand, p));
  EXPECT_NEAR(d.utilisation, 0.05, 1e-12);
  EXPECT_EQ(d.cold_attainment, 0.0);
}

TEST(decide, predicts_monotonously_in_the_timeout) {
  for (bool const bursty : {false, true}) {
    warm_inputs in = rare_requests();
    for (int i = 0; bursty && i < 300; ++i) {
      in.gaps.add(seconds{i % 7 == 0 ? 11.0 : 0.3});
    }
    for (double const rate : {0.001, 0.5, 9.0}) {
      in.arrivals_per_s = rate;
      warm_decision const d = decide(in);
      for (std::size_t i = 1; i < d.candidates.size(); ++i) {
        auto const& shorter = d.candidates[i - 1];
        auto const& longer = d.candidates[i];
        EXPECT_LT(shorter.idle_timeout, longer.idle_timeout);
        EXPECT_LE(shorter.attainment, longer.attainment + 1e-12);
        EXPECT_GE(shorter.loads_per_s, longer.loads_per_s - 1e-12);
        EXPECT_GE(shorter.mean_wait, longer.mean_wait - seconds{1e-12});
        // In bursts a shorter timeout may release less: it loads in gaps that end before the load
        // does.
        if (!bursty) {
          EXPECT_GE(shorter.released_fraction, longer.released_fraction - 1e-12);
        }
      }
    }
  }
}

TEST(decide, never_releases_more_for_a_stricter_promise) {
  double before = 2.0;
  for (double const percentile : {0.5, 0.7, 0.9, 0.95, 0.99, 0.999}) {
    warm_inputs in = rare_requests();
    in.goal.percentile = percentile;
    double const now = decide(in).chosen.released_fraction;
    EXPECT_LE(now, before);
    before = now;
  }
}

TEST(decide, releases_at_once_when_a_cold_start_is_quick_enough) {
  warm_inputs in = rare_requests();
  in.load = distribution::gamma(seconds{0.03}, 0.1);
  warm_decision const d = decide(in);
  EXPECT_TRUE(d.feasible());
  EXPECT_EQ(d.chosen.idle_timeout.count(), 0.0);
}

TEST(decide, leaves_as_many_parts_as_make_a_cold_start_quick_enough) {
  warm_inputs in = rare_requests();
  in.load = distribution::gamma(seconds{0.5}, 0.0);  // 100 ms too long
  in.arrivals_per_s = 0.02;
  auto const whole = decide(in);
  in.resident_parts = 10;
  auto const parts = decide(in);
  ASSERT_TRUE(parts.feasible());
  EXPECT_EQ(parts.chosen.parts, 3U) << "a fifth would leave nothing for waiting";
  EXPECT_GE(parts.chosen.attainment, parts.required_share);
  EXPECT_GT(parts.chosen.released_fraction, 0.6);
  EXPECT_LT(whole.chosen.released_fraction, 0.3);
  EXPECT_NEAR(parts.chosen.released_bytes, 1000.0 * parts.chosen.released_fraction, 1e-9);
  EXPECT_NEAR(parts.load_mean.count(), 0.35, 1e-9);
  EXPECT_EQ(parts.candidates.size(), 10 * whole.candidates.size());
  for (std::size_t i = 0; i < whole.candidates.size(); ++i) {
    EXPECT_EQ(parts.candidates[i].attainment, whole.candidates[i].attainment);
    EXPECT_EQ(parts.candidates[i].parts, 0U);
  }
}

TEST(decide, expects_parts_to_save_copies_and_no_handover) {
  warm_inputs in = rare_requests();
  in.load = distribution::gamma(seconds{0.5}, 0.0);
  in.handover = seconds{0.3};
  in.resident_parts = 2;
  auto const d = decide(in);
  auto const half_and_at_once = d.candidates[d.candidates.size() / 2];
  EXPECT_EQ(half_and_at_once.parts, 1U);
  queue_load const demand{.arrivals_per_s = 0.5,
                          .service = in.service,
                          .load = distribution::gamma(seconds{0.3 + 0.5 * 0.2}, 0.0)};
  EXPECT_NEAR(half_and_at_once.mean_wait.count(),
              mean_wait(demand, half_and_at_once.exceed).count(), 1e-9);
}

TEST(decide, leaves_no_parts_where_they_save_nothing) {
  warm_inputs in = rare_requests();
  in.load = distribution::gamma(seconds{0.5}, 0.0);
  in.arrivals_per_s = 0.02;
  in.resident_parts = 8;
  in.copies = seconds{0.0};
  EXPECT_EQ(decide(in).chosen.parts, 0U);
  in.copies = seconds{0.4};
  EXPECT_GT(decide(in).chosen.parts, 0U);
}

TEST(decide, leaves_parts_that_are_in_force_only_for_a_noticeable_gain) {
  warm_inputs in = rare_requests();
  in.load = distribution::gamma(seconds{0.5}, 0.0);
  in.arrivals_per_s = 0.02;
  in.resident_parts = 40;
  auto const best = decide(in).chosen;
  in.current = best.idle_timeout;
  in.current_parts = best.parts + 1;
  EXPECT_FALSE(decide(in).changed);
  in.current_parts = best.parts + 20;
  EXPECT_TRUE(decide(in).changed);
  EXPECT_EQ(decide(in).chosen.parts, best.parts);
  in.resident_parts = 0;
  EXPECT_THROW((void)decide(in), std::invalid_argument);
}

TEST(decide, keeps_within_the_operators_limits) {
  warm_inputs in = rare_requests();
  in.load = distribution::gamma(seconds{0.03}, 0.1);
  in.limits = {.min_idle = seconds{5.0}, .max_idle = seconds{60.0}};
  EXPECT_EQ(decide(in).chosen.idle_timeout.count(), 5.0);
  in.current = seconds{0.1};  // from before the limits changed
  EXPECT_GE(decide(in).chosen.idle_timeout.count(), 5.0);
  in.limits = {.min_idle = seconds{7.0}, .max_idle = seconds{7.0}};
  EXPECT_EQ(decide(in).chosen.idle_timeout.count(), 7.0);
  EXPECT_EQ(decide(in).candidates.size(), 1U);
}

TEST(decide, holds_to_the_limit_and_says_so_when_max_idle_is_too_short) {
  warm_inputs in = rare_requests();
  in.arrivals_per_s = 0.01;
  in.limits.max_idle = seconds{10.0};
  in.reject_on_miss = true;
  in.service_measured = true;
  warm_decision const d = decide(in);
  EXPECT_EQ(d.reason, shortfall::max_idle);
  EXPECT_EQ(d.chosen.idle_timeout.count(), 10.0);
  EXPECT_EQ(d.admit_share, 1.0);  // the operator wants the memory back: no reason to refuse anybody
}

TEST(decide, holds_warm_and_refuses_only_the_excess_when_requests_queue_too_long) {
  warm_inputs in = rare_requests();
  in.arrivals_per_s = 9.5;
  in.reject_on_miss = true;
  in.service_measured = true;
  warm_decision const d = decide(in);
  EXPECT_EQ(d.reason, shortfall::queueing);
  EXPECT_EQ(d.chosen.idle_timeout, forever);
  ASSERT_LT(d.admit_share, 1.0);
  EXPECT_GE(d.retry_after.count(), 1.0);
  EXPECT_LE(d.retry_after.count(), 60.0);

  warm_inputs admitted = in;
  admitted.long_run_rate_per_s = in.arrivals_per_s;
  admitted.arrivals_per_s = in.arrivals_per_s * d.admit_share;
  EXPECT_NEAR(decide(admitted).warm_attainment, d.required_share, 0.01);
}

TEST(decide, refuses_the_excess_of_an_overload) {
  warm_inputs in = rare_requests();
  in.arrivals_per_s = 50.0;
  in.reject_on_miss = true;
  in.service_measured = true;
  warm_decision const d = decide(in);
  EXPECT_EQ(d.reason, shortfall::overloaded);
  EXPECT_GE(d.chosen.uncorrected, d.required_share) << "of those that are admitted";
  EXPECT_NEAR(d.chosen.attainment, d.admit_share * d.chosen.uncorrected, 1e-12) << "of all";
  EXPECT_LT(d.chosen.mean_wait, forever);
  EXPECT_GT(d.admit_share, 0.05);
  EXPECT_LT(d.admit_share, 10.0 / 50.0);
}

TEST(decide, refuses_nobody_without_measurements_or_without_being_told) {
  warm_inputs in = rare_requests();
  in.arrivals_per_s = 50.0;
  in.service_measured = true;
  EXPECT_EQ(decide(in).admit_share, 1.0);
  in.reject_on_miss = true;
  in.service_measured = false;
  EXPECT_EQ(decide(in).admit_share, 1.0);
}

TEST(decide, refuses_nobody_when_the_service_itself_is_too_slow) {
  warm_inputs in = rare_requests();
  in.service = distribution::gamma(seconds{0.6}, 0.0);
  in.reject_on_miss = true;
  in.service_measured = true;
  warm_decision d = decide(in);
  EXPECT_EQ(d.reason, shortfall::service_too_slow);
  EXPECT_EQ(d.admit_share, 1.0);
  in.arrivals_per_s =
      5.0;  // more than can be done: then the excess must go, or the queue grows without bound
  d = decide(in);
  EXPECT_EQ(d.reason, shortfall::overloaded);
  EXPECT_NEAR(d.admit_share * 5.0 * 0.6, 0.9, 1e-12);
}

TEST(decide, stays_with_its_timeout_while_nothing_much_is_gained) {
  warm_inputs in = rare_requests();
  warm_decision const first = decide(in);
  // A timeout between two candidates, a little longer than the best: it releases less, but not by
  // much.
  in.current = first.chosen.idle_timeout * 1.02;
  warm_decision const second = decide(in);
  EXPECT_FALSE(second.changed);
  EXPECT_EQ(second.chosen.idle_timeout, *in.current);
  EXPECT_LT(second.chosen.released_fraction, first.chosen.released_fraction);
}

TEST(decide, leaves_some_of_the_permitted_misses_unused_when_it_can) {
  for (double rate = 0.1; rate < 2.0; rate += 0.05) {
    warm_inputs in = rare_requests();
    in.arrivals_per_s = rate;
    warm_decision const d = decide(in);
    double const with_spare = d.required_share + 0.1 * (1.0 - d.required_share);
    ASSERT_GE(d.candidates.back().attainment, with_spare) << rate;  // always warm would have it
    EXPECT_GE(d.chosen.attainment, with_spare) << rate;
  }
}

TEST(decide, leaves_a_timeout_that_breaks_the_promise_at_once) {
  warm_inputs in = rare_requests();
  in.current = seconds{0.01};
  warm_decision const d = decide(in);
  EXPECT_TRUE(d.changed);
  EXPECT_GT(d.chosen.idle_timeout.count(), 0.01);
  EXPECT_GE(d.chosen.attainment, d.required_share);
}

TEST(decide, leaves_a_timeout_for_a_clearly_better_one) {
  warm_inputs in = rare_requests();
  in.current = forever;
  warm_decision const d = decide(in);
  EXPECT_TRUE(d.changed);
  EXPECT_GT(d.chosen.released_fraction, 0.001);
}

TEST(decide, does_not_flap_around_the_edge) {
  warm_inputs in = rare_requests();
  in.current = decide(in).chosen.idle_timeout;
  int changes = 0;
  for (int i = 0; i < 200; ++i) {
    in.arrivals_per_s = 0.5 * (1.0 + 0.02 * std::sin(i));
    warm_decision const d = decide(in);
    changes += d.changed ? 1 : 0;
    in.current = d.chosen.idle_timeout;
  }
  EXPECT_LE(changes, 2);
}

TEST(decide, follows_the_observed_gaps_where_they_differ_from_poisson) {
  // 100 requests in quick succession, then 40 s of silence. Poisson at the same rate has next to no
  // gap above 5 s.
  warm_inputs in = rare_requests();
  for (int i = 1; i <= 2000; ++i) {
    in.gaps.add(i % 100 == 0 ? seconds{40.0} : seconds{0.2});
  }
  in.arrivals_per_s = 5.0;
  in.long_run_rate_per_s = 100.0 / (99 * 0.2 + 40.0);
  warm_inputs poisson = in;
  poisson.gaps = gap_histogram{};
  auto const at_five = [](warm_decision const& d) {
    return *std::find_if(d.candidates.begin(), d.candidates.end(),
                         [](prediction const& p) { return p.idle_timeout.count() > 5.0; });
  };
  EXPECT_LT(at_five(decide(poisson)).released_fraction, 0.01);
  EXPECT_GT(at_five(decide(in)).released_fraction, 0.3);
  EXPECT_LT(at_five(decide(in)).attainment, at_five(decide(poisson)).attainment);
}

TEST(decide, for_a_model_that_nobody_asks_for_releases_when_the_limit_says) {
  warm_inputs in = rare_requests();
  in.arrivals_per_s = 0.0;
  in.limits.max_idle = seconds{60.0};
  warm_decision const d = decide(in);
  EXPECT_EQ(d.chosen.idle_timeout.count(), 60.0);
  EXPECT_EQ(d.chosen.released_fraction, 1.0);
  EXPECT_EQ(d.chosen.loads_per_s, 0.0);
}

TEST(candidate_timeouts, lie_within_the_limits_and_include_them) {
  auto const open = candidate_timeouts({});
  EXPECT_EQ(open.front().count(), 0.0);
  EXPECT_EQ(open.back(), forever);
  auto const narrow = candidate_timeouts({.min_idle = seconds{5.0}, .max_idle = seconds{600.0}});
  EXPECT_EQ(narrow.front().count(), 5.0);
  EXPECT_EQ(narrow.back().count(), 600.0);
  EXPECT_TRUE(std::is_sorted(narrow.begin(), narrow.end()));
  for (auto const t : narrow) {
    EXPECT_TRUE(t == narrow.front() || t == narrow.back() || contains(open, t)) << t.count();
  }
}

TEST(idle_limits, refuse_what_contradicts_itself) {
  EXPECT_THROW((idle_limits{.min_idle = seconds{5.0}, .max_idle = seconds{1.0}}.check()),
               std::invalid_argument);
  EXPECT_THROW((idle_limits{.min_idle = seconds{-1.0}}.check()), std::invalid_argument);
  EXPECT_THROW((idle_limits{.min_idle = forever}.check()), std::invalid_argument);
  EXPECT_THROW((idle_limits{.max_idle = seconds{std::nan("")}}.check()), std::invalid_argument);
  warm_inputs in = rare_requests();
  in.goal.percentile = 99.0;
  EXPECT_THROW((void)decide(in), std::invalid_argument);
}

TEST(shortfall, has_a_name_for_each_reason) {
  EXPECT_EQ(to_string(shortfall::none), "none");
  EXPECT_EQ(to_string(shortfall::overloaded), "overloaded");
  EXPECT_EQ(to_string(shortfall::queueing), "queueing");
  EXPECT_EQ(to_string(shortfall::service_too_slow), "service_too_slow");
  EXPECT_EQ(to_string(shortfall::max_idle), "max_idle");
}

TEST(decide, names_neighbours_as_the_reason_and_what_would_do) {
  warm_inputs in = rare_requests();
  in.arrivals_per_s = 1.0;
  in.beside = {.by = predicted_by::classes_in_turn,
               .arrivals_per_s = 3.0,
               .service = std::make_shared<distribution const>(distribution::mixture(
                   {{.weight = 1.0, .mean = seconds{0.1}}, {.weight = 2.0, .mean = seconds{0.4}}})),
               .own_per_s = 1.0};
  in.explains = true;
  warm_decision const d = decide(in);
  EXPECT_EQ(d.reason, shortfall::neighbours);
  EXPECT_EQ(d.by, predicted_by::classes_in_turn);
  ASSERT_TRUE(d.would_do.has_value());
  EXPECT_EQ(d.would_do->rate_per_s, 0.0) << "fewer of its own requests would not help it";
  ASSERT_GT(d.would_do->latency, in.goal.latency);
  ASSERT_LT(d.would_do->latency, forever);
  in.goal.latency = d.would_do->latency;
  EXPECT_TRUE(decide(in).feasible());
}

TEST(decide, says_at_what_rate_a_queue_would_do) {
  warm_inputs in = rare_requests();
  in.arrivals_per_s = 9.7;
  in.explains = true;
  warm_decision const d = decide(in);
  EXPECT_EQ(d.reason, shortfall::queueing);
  ASSERT_TRUE(d.would_do.has_value());
  ASSERT_GT(d.would_do->rate_per_s, 1.0);
  in.long_run_rate_per_s = in.arrivals_per_s;  // the same promise
  in.arrivals_per_s = 0.999 * d.would_do->rate_per_s;
  EXPECT_TRUE(decide(in).feasible());
  in.arrivals_per_s = 1.02 * d.would_do->rate_per_s;
  EXPECT_FALSE(decide(in).feasible());
}

TEST(decide, holds_a_model_only_for_what_that_mends) {
  warm_inputs in = rare_requests();
  in.log_odds = -6.0;  // whatever is done, most requests are late
  double released = 0.0;
  for (double const missed : {0.15, 0.3, 0.6}) {
    in.missed_share = missed;
    warm_decision const d = decide(in);
    EXPECT_FALSE(d.feasible());
    EXPECT_GE(d.chosen.released_fraction, released) << missed;
    released = d.chosen.released_fraction;
    double const warm = d.candidates.back().uncorrected;
    EXPECT_GE(d.chosen.uncorrected, warm - 0.1 * missed) << missed;
    EXPECT_LT(d.chosen.uncorrected, warm) << missed;
  }
  in.missed_share = 0.02;  // less than is permitted
  EXPECT_EQ(decide(in).chosen.idle_timeout, in.limits.max_idle);
}

TEST(decide, knows_what_free_memory_would_bring) {
  warm_inputs in = rare_requests();
  in.service = distribution::gamma(seconds{0.1}, 0.0);
  in.load = distribution::gamma(seconds{0.6}, 0.0);
  EXPECT_EQ(decide(in).free_gain, 0.0) << "a load has no handover";
  in.handover = seconds{0.3};
  EXPECT_NEAR(decide(in).free_gain, 1.0, 1e-9) << "0.7 s are too late, 0.4 s are not";
  in.handover = seconds{0.05};
  EXPECT_EQ(decide(in).free_gain, 0.0) << "0.65 s are too late as well";
  in.handover = in.load.mean();
  EXPECT_NEAR(decide(in).free_gain, 1.0, 1e-9);
}

TEST(decide, believes_what_was_observed) {
  warm_inputs in = rare_requests();
  ASSERT_TRUE(decide(in).feasible());
  in.log_odds = -6.0;
  warm_decision const d = decide(in);
  EXPECT_EQ(d.reason, shortfall::observed);
  EXPECT_LT(d.chosen.attainment, d.required_share);
  EXPECT_GT(d.chosen.uncorrected, d.required_share);
  EXPECT_EQ(d.admit_share, 1.0);
  in.reject_on_miss = true;
  in.service_measured = true;
  in.least_admitted = 0.8;
  EXPECT_EQ(decide(in).admit_share, 0.8);
}

}  // namespace
}  // namespace sluice::scheduler
