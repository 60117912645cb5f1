#include "scheduler/device_demands.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace sluice::scheduler {
namespace {

instant at(double now_s) {
  return instant{seconds{now_s}};
}

shared_model model(double arrivals_per_s, double mean_s) {
  return {.arrivals_per_s = arrivals_per_s, .service = distribution::gamma(seconds{mean_s}, 1.0)};
}

std::vector<shared_model> two() {
  return {model(2.0, 0.1), model(1.0, 0.2)};
}

/// So many requests a second for a while; returns when it ends.
double play(device_demands& asked, double from_s, double rate_per_s, double service_s) {
  constexpr double length_s = 1000.0;
  for (double now_s = from_s; now_s < from_s + length_s; now_s += 1.0 / rate_per_s) {
    asked.add(at(now_s), seconds{service_s});
  }
  return from_s + length_s;
}

TEST(device_demands, have_moved_when_the_line_of_all_has) {
  device_demands asked{at(0.0)};
  asked.predict(at(0.0), two(), {.at_once = 1});
  EXPECT_FALSE(asked.has_moved(at(0.0), 2)) << "nobody asks for anything";
  double now_s = play(asked, 0.0, 3.0, 0.1);
  EXPECT_TRUE(asked.has_moved(at(now_s), 2));
  asked.predict(at(now_s), two(), {.at_once = 1});
  EXPECT_FALSE(asked.has_moved(at(now_s), 2));
  now_s = play(asked, now_s, 3.05, 0.1);
  EXPECT_FALSE(asked.has_moved(at(now_s), 2)) << "by less than waits are known to";
  double const before_s = now_s;
  now_s = play(asked, now_s, 5.0, 0.1);
  EXPECT_TRUE(asked.has_moved(at(now_s), 2));
  now_s = play(asked, now_s, 3.0, 0.1);
  EXPECT_FALSE(asked.has_moved(at(now_s), 2)) << "it is as it was at " << before_s << " again";
  now_s = play(asked, now_s, 3.0, 0.13);
  EXPECT_TRUE(asked.has_moved(at(now_s), 2)) << "services have become longer";
}

TEST(device_demands, have_moved_when_there_is_more_work_than_can_be_done) {
  device_demands asked{at(0.0)};
  double now_s = play(asked, 0.0, 3.0, 0.1);
  asked.predict(at(now_s), two(), {.at_once = 1});
  now_s = play(asked, now_s, 20.0, 0.1);
  EXPECT_TRUE(asked.has_moved(at(now_s), 2));
  asked.predict(at(now_s), two(), {.at_once = 1});
  EXPECT_FALSE(asked.has_moved(at(now_s), 2)) << "waits have no end, before and after";
  asked.predict(at(now_s), two(), {.at_once = 4, .slowdown = {1.0}});
  now_s = play(asked, now_s, 3.0, 0.1);
  EXPECT_TRUE(asked.has_moved(at(now_s), 2));
}

TEST(device_demands, have_moved_when_there_are_other_models) {
  device_demands asked{at(0.0)};
  EXPECT_TRUE(asked.has_moved(at(0.0), 2));
  asked.predict(at(0.0), two(), {.at_once = 1});
  EXPECT_FALSE(asked.has_moved(at(0.0), 2));
  EXPECT_TRUE(asked.has_moved(at(0.0), 3));
}

TEST(device_demands, know_what_others_asked_for_when_all_were_predicted) {
  device_demands asked{at(0.0)};
  EXPECT_EQ(asked.beside(1).by, predicted_by::alone);
  asked.predict(at(0.0), two(), {.at_once = 1});
  EXPECT_EQ(asked.beside(1).by, predicted_by::classes_in_turn);
  EXPECT_DOUBLE_EQ(asked.beside(1).arrivals_per_s, 3.0);
  EXPECT_DOUBLE_EQ(asked.beside(1).own_per_s, 1.0);
  EXPECT_EQ(asked.beside(4).by, predicted_by::alone) << "it came later";
  EXPECT_THROW(asked.predict(at(0.0), std::vector{model(-1.0, 0.1)}, {.at_once = 1}),
               std::invalid_argument);
  EXPECT_DOUBLE_EQ(asked.beside(1).own_per_s, 1.0) << "as it was";
}

}  // namespace
}  // namespace sluice::scheduler
