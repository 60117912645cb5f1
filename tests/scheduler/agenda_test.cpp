#include "scheduler/agenda.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace sluice::scheduler {
namespace {

instant at(double s) {
  return instant{seconds{s}};
}

std::vector<std::size_t> taken(agenda& from, double now_s) {
  std::vector<std::size_t> result;
  auto const count = from.take(at(now_s), [&](std::size_t model) { result.push_back(model); });
  EXPECT_EQ(count, result.size());
  return result;
}

TEST(agenda, names_each_model_that_is_wanted_once) {
  agenda due{4};
  due.want(2);
  due.want(0);
  due.want(2);
  EXPECT_EQ(taken(due, 0.0), (std::vector<std::size_t>{2, 0}));
  EXPECT_TRUE(taken(due, 0.0).empty());
}

TEST(agenda, names_a_model_when_its_time_has_come) {
  agenda due{3};
  due.want_at(1, at(5.0));
  due.want_at(2, at(3.0));
  EXPECT_TRUE(taken(due, 2.9).empty());
  EXPECT_EQ(taken(due, 3.0), (std::vector<std::size_t>{2}));
  EXPECT_EQ(taken(due, 9.0), (std::vector<std::size_t>{1}));
  EXPECT_TRUE(taken(due, 1e9).empty());
}

TEST(agenda, takes_the_last_time_that_was_said) {
  agenda due{1};
  due.want_at(0, at(5.0));
  due.want_at(0, at(8.0));
  EXPECT_TRUE(taken(due, 7.0).empty());
  due.want_at(0, instant::max());
  EXPECT_TRUE(taken(due, 100.0).empty());
}

TEST(agenda, does_not_name_a_model_twice_that_is_wanted_and_due) {
  agenda due{2};
  due.want_at(0, at(1.0));
  due.want(0);
  EXPECT_EQ(taken(due, 2.0), (std::vector<std::size_t>{0}));
  EXPECT_TRUE(taken(due, 3.0).empty());
}

TEST(agenda, keeps_for_the_next_time_what_a_decision_wants) {
  agenda due{2};
  due.want(0);
  std::size_t calls = 0;
  due.take(at(0.0), [&](std::size_t model) {
    ++calls;
    due.want(model);
    due.want_at(1, at(0.0));
  });
  EXPECT_EQ(calls, 1U);
  EXPECT_EQ(taken(due, 0.0), (std::vector<std::size_t>{0, 1}));
}

TEST(agenda, agrees_with_a_list_that_is_searched) {
  std::mt19937_64 random{5};
  agenda due{50};
  std::map<std::size_t, double> times;
  std::set<std::size_t> wanted;
  for (int step = 0; step < 20'000; ++step) {
    auto const model = static_cast<std::size_t>(random() % 50);
    double const now = step * 0.01;
    if (random() % 4 == 0) {
      due.want(model);
      wanted.insert(model);
    } else {
      times[model] = now + static_cast<double>(random() % 1000) * 0.002;
      due.want_at(model, at(times[model]));
    }
    if (random() % 8 == 0) {
      std::set<std::size_t> expected = wanted;
      for (auto const& [each, when] : times) {
        if (when <= now) {
          expected.insert(each);
        }
      }
      for (auto const each : expected) {
        times.erase(each);
      }
      wanted.clear();
      auto const seen = taken(due, now);
      ASSERT_EQ((std::set<std::size_t>{seen.begin(), seen.end()}), expected);
      ASSERT_EQ(seen.size(), expected.size());
    }
  }
}

TEST(agenda, refuses_a_model_that_it_does_not_have) {
  agenda due{1};
  EXPECT_THROW(due.want(1), std::out_of_range);
  EXPECT_THROW(due.want_at(1, at(0.0)), std::out_of_range);
}

}  // namespace
}  // namespace sluice::scheduler
