#include "memhandover/ledger/demand_order.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "random_runs.hpp"

namespace sluice::memhandover {
namespace {

using trials::below;

constexpr auto jobs_turn = turn_in_handovers::first;
constexpr auto engines_turn = turn_in_handovers::last_if_wanted;

giver giver_of(std::uint32_t slot, priority rank, giveable has) {
  return {.slot = slot, .rank = rank, .most = has.all(), .has = has};
}

/// Who would be asked, one after the other, if each gave what it is asked for.
std::vector<next_asked> all_asked(std::vector<giver> givers, std::uint32_t missing) {
  std::vector<next_asked> asked;
  while (auto const next = next_demand(givers, missing)) {
    asked.push_back(*next);
    auto& who = *std::find_if(givers.begin(), givers.end(),
                              [&](giver const& each) { return each.slot == next->slot; });
    auto const at_once = std::min(next->chunks, who.has.at_once);
    auto const parked = next->may_park ? std::min(next->chunks - at_once, who.has.parked) : 0;
    EXPECT_GT(at_once + parked, 0U) << "it would be asked for ever";
    who.has.at_once -= at_once;
    who.has.parked -= parked;
    who.most -= at_once + parked;
    missing -= at_once + parked;
  }
  return asked;
}

TEST(giveable, is_what_goes_without_parking_and_then_what_can_be_parked) {
  EXPECT_EQ(giveable_of({.held = 10, .kept = 4}), (giveable{6, 0}));
  EXPECT_EQ(giveable_of({.held = 10, .kept = 4, .parkable = 3}), (giveable{6, 3}));
  EXPECT_EQ(giveable_of({.held = 10, .kept = 4, .parkable = 9}), (giveable{6, 4}));
  EXPECT_EQ(giveable_of({}), (giveable{0, 0}));
}

TEST(giveable, leaves_a_minimum_whether_it_would_be_discarded_or_parked) {
  EXPECT_EQ(giveable_of({.held = 10, .kept = 4, .parkable = 4, .least = 2}), (giveable{6, 2}));
  EXPECT_EQ(giveable_of({.held = 10, .kept = 4, .parkable = 4, .least = 5}), (giveable{5, 0}));
  EXPECT_EQ(giveable_of({.held = 10, .kept = 4, .parkable = 4, .least = 10}), (giveable{0, 0}));
  EXPECT_EQ(giveable_of({.held = 10, .kept = 4, .parkable = 4, .least = 99}), (giveable{0, 0}));
}

TEST(giveable, of_a_damaged_mailbox_is_no_more_than_is_held) {
  EXPECT_EQ(giveable_of({.held = 10, .kept = ~0U, .parkable = ~0U}), (giveable{0, 10}));
  EXPECT_EQ(giveable_of({.held = 3, .kept = 1, .parkable = ~0U, .least = ~0U}), (giveable{0, 0}));
}

TEST(next_demand, is_of_nobody_where_nobody_can_give_or_nothing_is_missing) {
  EXPECT_EQ(next_demand({}, 4), std::nullopt);
  std::vector<giver> const one{giver_of(1, priority::normal, {4, 0})};
  EXPECT_EQ(next_demand(one, 0), std::nullopt);
  std::vector<giver> const empty{giver_of(1, priority::normal, {0, 0})};
  EXPECT_EQ(next_demand(empty, 4), std::nullopt);
}

TEST(next_demand, asks_who_is_alone_for_all_that_is_missing_and_no_minimum) {
  std::vector<giver> one{giver_of(1, priority::normal, {4, 0})};
  one.front().most = 9;
  EXPECT_EQ(next_demand(one, 6), (next_asked{1, 6, true}));
  EXPECT_EQ(next_demand(one, 20), (next_asked{1, 9, true}));
}

TEST(next_demand, has_a_job_of_lower_priority_parked_before_another_ones_micro_batch_goes) {
  std::vector<giver> const three{giver_of(1, priority::high, {9, 9}),
                                 giver_of(2, priority::normal, {9, 9}),
                                 giver_of(3, priority::low, {2, 3})};
  EXPECT_THAT(all_asked(three, 4), testing::ElementsAre(next_asked{3, 4, true}));
  EXPECT_THAT(all_asked(three, 7),
              testing::ElementsAre(next_asked{3, 5, true}, next_asked{2, 2, true}));
  EXPECT_THAT(all_asked(three, 30),
              testing::ElementsAre(next_asked{3, 5, true}, next_asked{2, 18, true},
                                   next_asked{1, 7, true}));
}

TEST(next_demand, takes_micro_batches_of_equals_before_any_of_them_is_parked) {
  std::vector<giver> const two{giver_of(1, priority::normal, {3, 10}),
                               giver_of(2, priority::normal, {5, 6})};
  EXPECT_THAT(all_asked(two, 4), testing::ElementsAre(next_asked{2, 4, false}));
  EXPECT_THAT(all_asked(two, 8),
              testing::ElementsAre(next_asked{2, 5, false}, next_asked{1, 3, false}));
  // Then one of them is, and gives what it has at once with the same demand.
  EXPECT_THAT(all_asked(two, 12),
              testing::ElementsAre(next_asked{2, 5, false}, next_asked{1, 7, true}));
  EXPECT_THAT(all_asked(two, 24),
              testing::ElementsAre(next_asked{2, 5, false}, next_asked{1, 13, true},
                                   next_asked{2, 6, true}));
}

TEST(next_demand, asks_engines_after_all_jobs_and_those_that_rest_before_others) {
  auto const engine = [](std::uint32_t slot, bool in_use, bool is_copied) {
    return giver{.slot = slot,
                 .turn = engines_turn,
                 .in_use = in_use,
                 .is_copied = is_copied,
                 .most = 4,
                 .has = {4, 0}};
  };
  std::vector<giver> const all{engine(1, true, false), engine(2, false, true),
                               engine(3, false, false), giver_of(4, priority::high, {1, 0})};
  std::vector<std::uint32_t> order;
  for (auto const& each : all_asked(all, 13)) {
    order.push_back(each.slot);
  }
  EXPECT_THAT(order, testing::ElementsAre(4, 3, 2, 1));
}

/// Random jobs, of which each gives what it is asked for and can.
TEST(next_demand, of_random_jobs_takes_exactly_what_is_missing_from_the_lowest_and_no_minimum) {
  for (auto const seed : trials::seeds()) {
    std::mt19937_64 random{seed};
    for (int turn = 0; turn < 4000; ++turn) {
      std::vector<holdings_of_tenant> tenants(1 + below(random, 6));
      std::vector<giver> givers;
      std::uint64_t all = 0;
      for (std::uint32_t slot = 0; slot < tenants.size(); ++slot) {
        auto& of = tenants[slot];
        of = {.held = below(random, 20),
              .kept = below(random, 20),
              .parkable = below(random, 20),
              .least = random() % 2 == 0 ? 0 : below(random, 24)};
        auto const has = giveable_of(of);
        givers.push_back({.slot = slot,
                          .turn = random() % 4 == 0 ? engines_turn : jobs_turn,
                          .rank = priority{1 + below(random, 3)},
                          .most = of.least == 0 ? 1000 : of.held - std::min(of.held, of.least),
                          .has = has});
        all += has.all();
      }
      auto const wanted = below(random, 60);
      auto missing = wanted;
      std::map<std::uint32_t, std::uint32_t> given;
      auto now = givers;
      for (std::size_t demands = 0; auto const next = next_demand(now, missing); ++demands) {
        ASSERT_LE(demands, 2 * tenants.size()) << "seed " << seed;
        auto& who = now.at(next->slot);
        ASSERT_LE(next->chunks, missing);
        ASSERT_LE(next->chunks, who.most) << "its minimum would go";
        auto const at_once = std::min(next->chunks, who.has.at_once);
        auto const parked = next->may_park ? std::min(next->chunks - at_once, who.has.parked) : 0;
        ASSERT_GT(at_once + parked, 0U) << "seed " << seed;
        for (auto const& other : now) {  // the lower ones have nothing left to give
          if (std::tuple{other.turn, other.rank} < std::tuple{who.turn, who.rank}) {
            ASSERT_EQ(other.has.all(), 0U) << "seed " << seed;
          }
          if (parked > 0 && other.slot != who.slot && other.turn == who.turn &&
              other.rank == who.rank) {  // nor have equals, without parking
            ASSERT_EQ(other.has.at_once, 0U) << "seed " << seed;
          }
        }
        who.has.at_once -= at_once;
        who.has.parked -= parked;
        who.most -= at_once + parked;
        given[next->slot] += at_once + parked;
        missing -= at_once + parked;
      }
      auto const sum =
          std::accumulate(given.begin(), given.end(), std::uint64_t{0},
                          [](auto so_far, auto const& each) { return so_far + each.second; });
      ASSERT_EQ(sum, std::min<std::uint64_t>(wanted, all)) << "seed " << seed;
      for (auto const& [slot, chunks] : given) {
        auto const& of = tenants.at(slot);
        ASSERT_GE(of.held - chunks, std::min(of.held, of.least)) << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace sluice::memhandover
