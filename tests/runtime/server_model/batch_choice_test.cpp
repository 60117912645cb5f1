#include "runtime/server/hosting/batch_choice.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <vector>

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

waiting_request::time_point const origin{1h};

/// That came so long after the origin, and has plenty of time.
waiting_request at(std::chrono::microseconds arrival, std::int64_t samples = 1) {
  return {.samples = samples, .shape = "x", .arrival = origin + arrival, .deadline = origin + 1h};
}

batching_rules rules(std::int64_t most, std::chrono::microseconds delay = 0us,
                     std::vector<std::int64_t> preferred = {}) {
  return {.max_batch_size = most,
          .is_dynamic = true,
          .preferred_sizes = std::move(preferred),
          .max_queue_delay = delay};
}

batch_choice choose(std::vector<waiting_request> const& line, batching_rules const& how,
                    std::chrono::microseconds now, std::chrono::nanoseconds computation = 0ns) {
  return choose_batch(line, how, origin + now, computation);
}

TEST(batch_choice, takes_one_after_the_other_where_batches_are_not_wanted) {
  batching_rules const none{.max_batch_size = 8};
  EXPECT_THAT(choose({at(0us), at(1us)}, none, 5us).taken, ElementsAre(0));
}

TEST(batch_choice, takes_all_that_wait_where_nobody_is_to_be_waited_for) {
  EXPECT_THAT(choose({at(0us), at(1us), at(2us)}, rules(8), 5us).taken, ElementsAre(0, 1, 2));
}

TEST(batch_choice, takes_no_more_than_the_limit) {
  EXPECT_THAT(choose({at(0us), at(1us), at(2us)}, rules(2), 5us).taken, ElementsAre(0, 1));
  EXPECT_THAT(choose({at(0us, 3), at(1us, 2), at(2us, 1)}, rules(4), 5us).taken, ElementsAre(0, 2));
}

TEST(batch_choice, waits_for_others_until_the_first_has_waited_for_long_enough) {
  auto const how = rules(8, 100us);
  auto const early = choose({at(10us), at(50us)}, how, 60us);
  EXPECT_THAT(early.taken, IsEmpty());
  EXPECT_EQ(early.again_at, origin + 110us);
  EXPECT_THAT(choose({at(10us), at(50us)}, how, 110us).taken, ElementsAre(0, 1));
}

TEST(batch_choice, does_not_wait_when_nobody_fits_any_more) {
  EXPECT_THAT(choose({at(0us), at(1us)}, rules(2, 1s), 1us).taken, ElementsAre(0, 1));
  EXPECT_THAT(choose({at(0us, 3), at(1us, 2)}, rules(4, 1s), 1us).taken, ElementsAre(0));
}

TEST(batch_choice, takes_the_largest_preferred_size_at_once) {
  auto const how = rules(8, 1s, {2, 4});
  EXPECT_THAT(choose({at(0us)}, how, 1us).taken, IsEmpty());
  EXPECT_THAT(choose({at(0us), at(0us), at(0us)}, how, 1us).taken, ElementsAre(0, 1));
  EXPECT_THAT(choose({at(0us), at(0us), at(0us), at(0us), at(0us)}, how, 1us).taken,
              ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(choose({at(0us)}, how, 1s).taken, ElementsAre(0));
}

TEST(batch_choice, does_not_wait_beyond_what_the_tightest_deadline_allows) {
  std::vector<waiting_request> line{at(0us), at(1us)};
  line[1].deadline = origin + 501us;
  auto const how = rules(8, 1s);
  EXPECT_EQ(choose(line, how, 2us, 400us).again_at, origin + 101us);
  EXPECT_THAT(choose(line, how, 101us, 400us).taken, ElementsAre(0, 1));
  EXPECT_EQ(choose(line, how, 2us).again_at, origin + 251us) << "half of its time";
}

TEST(batch_choice, puts_together_only_what_has_the_shape_of_the_first) {
  std::vector<waiting_request> line{at(0us), at(1us), at(2us)};
  line[1].shape = "y";
  EXPECT_THAT(choose(line, rules(8), 5us).taken, ElementsAre(0, 2));
}

TEST(batch_choice, lets_nobody_overtake_where_the_order_is_to_be_kept) {
  std::vector<waiting_request> line{at(0us), at(1us), at(2us)};
  line[1].shape = "y";
  auto how = rules(8, 1s);
  how.preserve_ordering = true;
  EXPECT_THAT(choose(line, how, 5us).taken, ElementsAre(0));
}

TEST(batch_choice, leaves_alone_what_is_to_be_alone) {
  std::vector<waiting_request> line{at(0us), at(1us), at(2us)};
  line[1].is_alone = true;
  EXPECT_THAT(choose(line, rules(8), 5us).taken, ElementsAre(0, 2));
  line[0].is_alone = true;
  EXPECT_THAT(choose(line, rules(8, 1s), 5us).taken, ElementsAre(0));
}

TEST(batch_choice, goes_by_priority_and_then_by_order) {
  std::vector<waiting_request> line{at(0us), at(1us), at(2us), at(3us)};
  line[0].priority = 2;
  line[1].priority = 1;
  line[2].priority = 2;
  line[3].priority = 1;
  EXPECT_THAT(choose(line, rules(3), 5us).taken, ElementsAre(1, 3, 0));
}

TEST(batch_choice, puts_what_is_late_behind_the_others) {
  std::vector<waiting_request> line{at(0us), at(1us)};
  line[0].is_late = true;
  line[0].priority = 0;
  line[1].priority = 3;
  EXPECT_THAT(choose(line, rules(1), 5us).taken, ElementsAre(1));
}

/// Whatever waits: a batch is within its limit, of one shape, has the first of the line, and nobody waits for ever.
TEST(batch_choice, keeps_its_promises_for_any_line) {
  std::mt19937 random{20};
  auto const upto = [&](int most) {
    return static_cast<int>(random() % static_cast<unsigned>(most + 1));
  };
  for (int round = 0; round < 20'000; ++round) {
    auto how = rules(1 + upto(7), std::chrono::microseconds{upto(100)});
    how.preserve_ordering = upto(1) == 1;
    for (int size = 1; size <= how.max_batch_size; ++size) {
      if (upto(3) == 0) {
        how.preferred_sizes.push_back(size);
      }
    }
    std::vector<waiting_request> line;
    for (int i = upto(9); i >= 0; --i) {
      line.push_back(at(std::chrono::microseconds{upto(50)},
                        1 + upto(static_cast<int>(how.max_batch_size) - 1)));
      line.back().shape = upto(4) == 0 ? "y" : "x";
      line.back().priority = static_cast<std::uint32_t>(upto(2));
      line.back().is_alone = upto(9) == 0;
      line.back().deadline = origin + std::chrono::microseconds{50 + upto(100)};
    }
    auto const now = origin + std::chrono::microseconds{50 + upto(200)};
    auto const next = choose_batch(line, how, now, 10us);
    ASSERT_NE(next.taken.empty(), !next.again_at);
    if (next.again_at) {
      ASSERT_GT(*next.again_at, now);
      ASSERT_THAT(choose_batch(line, how, *next.again_at, 10us).taken, ::testing::Not(IsEmpty()));
      continue;
    }
    std::int64_t samples = 0;
    for (auto const place : next.taken) {
      samples += line[place].samples;
      ASSERT_EQ(line[place].shape, line[next.taken.front()].shape);
      ASSERT_TRUE(!line[place].is_alone || next.taken.size() == 1);
    }
    ASSERT_LE(samples, how.max_batch_size);
    for (auto const& each : line) {
      ASSERT_GE(each.priority, line[next.taken.front()].priority);
    }
  }
}

}  // namespace
}  // namespace sluice::server::testing
