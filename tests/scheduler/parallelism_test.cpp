#include "scheduler/parallelism.hpp"

#include <gtest/gtest.h>

#include <stdexcept>

namespace sluice::scheduler {
namespace {

using namespace std::chrono_literals;

/// Many computations of one model that take so many times as long as alone.
void add_many(parallelism& to, double at_once, double slowdown, int times = 100) {
  for (int i = 0; i < times; ++i) {
    to.add(0, at_once, seconds{0.01 * slowdown});
  }
}

TEST(parallelism, lets_all_compute_while_nothing_is_known) {
  EXPECT_EQ(parallelism{4}.bound(), 4U);
  EXPECT_THROW(parallelism{0}, std::invalid_argument);
}

TEST(parallelism, lets_all_compute_that_share_a_device_fairly) {
  parallelism models{4};
  add_many(models, 1.0, 1.0);
  add_many(models, 2.0, 2.0);
  add_many(models, 3.0, 3.1);
  add_many(models, 4.0, 4.4);
  EXPECT_EQ(models.bound(), 4U);
}

TEST(parallelism, lets_fewer_compute_that_hinder_each_other) {
  parallelism models{4};
  add_many(models, 1.0, 1.0);
  add_many(models, 2.0, 2.2);
  add_many(models, 3.0, 5.0);
  EXPECT_EQ(models.bound(), 2U);
  add_many(models, 2.0, 4.0);
  EXPECT_EQ(models.bound(), 1U);
}

TEST(parallelism, learns_nothing_from_models_that_never_were_alone) {
  parallelism models{2};
  add_many(models, 2.0, 10.0);
  EXPECT_EQ(models.bound(), 2U);
}

TEST(parallelism, takes_company_for_a_part_of_the_time_for_that_part) {
  parallelism models{2};
  add_many(models, 1.0, 1.0);
  add_many(models, 1.5, 1.5);  // beside another for half of its time, and twice as long in that
  EXPECT_EQ(models.bound(), 2U);
  add_many(models, 1.5, 2.5);  // four times as long
  EXPECT_EQ(models.bound(), 1U);
}

TEST(parallelism, tries_a_number_again_that_was_too_large) {
  parallelism models{2};
  add_many(models, 1.0, 1.0);
  add_many(models, 2.0, 4.0);
  ASSERT_EQ(models.bound(), 1U);
  add_many(models, 1.0, 1.0, parallelism::tried_again);
  EXPECT_EQ(models.bound(), 2U);
  add_many(models, 2.0, 4.0);
  EXPECT_EQ(models.bound(), 1U) << "and finds the same";
}

TEST(parallelism, ignores_clocks_that_stand_still) {
  parallelism models{2};
  models.add(0, 1.0, 0s);
  models.add(0, 0.0, 1s);
  EXPECT_EQ(models.bound(), 2U);
}

}  // namespace
}  // namespace sluice::scheduler
