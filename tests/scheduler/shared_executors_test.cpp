#include "scheduler/shared_executors.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <stdexcept>
#include <vector>

#include "scheduler/queueing.hpp"
#include "scheduler/shared_server.hpp"

namespace sluice::scheduler {
namespace {

distribution exponential(double mean_s) {
  return distribution::gamma(seconds{mean_s}, 1.0);
}

double warm_share(shared_model const& of, seconds latency, shared_load const& beside) {
  return attainment_model{of.service, {}, latency, beside}.at(of.arrivals_per_s).share_within(0.0);
}

TEST(predict_together, leaves_a_model_alone_that_has_no_company) {
  std::vector<shared_model> const models{{.arrivals_per_s = 3.0, .service = exponential(0.1)},
                                         {.arrivals_per_s = 0.0, .service = exponential(0.1)}};
  auto const beside = predict_together(models, {.at_once = 1});
  EXPECT_EQ(beside[0].by, predicted_by::alone);
  EXPECT_EQ(beside[1].by, predicted_by::classes_in_turn);
  EXPECT_NEAR(warm_share(models[0], seconds{0.5}, beside[0]),
              warm_share(models[0], seconds{0.5}, {}), 1e-12);
}

TEST(predict_together, takes_classes_in_turn_for_one_queue) {
  // All alike: each is an M/M/1 queue of all arrivals, whose response is exponential.
  std::vector<shared_model> const models(4, {.arrivals_per_s = 2.0, .service = exponential(0.1)});
  for (auto const& beside : predict_together(models, {.at_once = 1})) {
    EXPECT_EQ(beside.by, predicted_by::classes_in_turn);
    double const exact = 1.0 - std::exp(-(10.0 - 8.0) * 0.5);
    EXPECT_NEAR(warm_share(models[0], seconds{0.5}, beside), exact, 0.003);
  }
}

TEST(predict_together, knows_that_a_slow_neighbour_keeps_a_fast_model_waiting) {
  std::vector<shared_model> const models{{.arrivals_per_s = 10.0, .service = exponential(0.002)},
                                         {.arrivals_per_s = 3.0, .service = exponential(0.2)}};
  seconds const latency{0.05};
  auto const in_turn = predict_together(models, {.at_once = 1});
  EXPECT_GT(warm_share(models[0], latency, {}), 0.99);
  EXPECT_LT(warm_share(models[0], latency, in_turn[0]), 0.6);
  auto const at_once = predict_together(models, {.at_once = 2});
  EXPECT_EQ(at_once[0].by, predicted_by::simulation);
  EXPECT_GT(warm_share(models[0], latency, at_once[0]), 0.98);
}

TEST(predict_together, simulates_waits_as_the_birth_and_death_process_has_them) {
  // So many models that one per model binds nobody: M/M/2 with a slow-down.
  std::size_t const count = 60;
  std::vector<double> const slowdown{1.0, 1.4};
  std::vector<shared_model> const models(
      count, {.arrivals_per_s = 9.0 / static_cast<double>(count), .service = exponential(0.1)});
  auto const beside = predict_together(models, {.at_once = 2, .slowdown = slowdown});
  auto const exact =
      waits_of({.arrivals_per_s = 9.0, .service = seconds{0.1}, .slowdown = slowdown});
  double mean = 0.0;
  for (auto const& each : beside) {
    mean += each.waits.mean().count() / static_cast<double>(count);
  }
  EXPECT_NEAR(mean, (exact.mean_response - seconds{0.1}).count(), 0.03);
  EXPECT_NEAR(beside[0].utilisation, 9.0 * 0.1 * 1.4 / 2.0, 1e-12);
}

TEST(predict_together, has_no_hope_where_the_device_is_full) {
  std::vector<shared_model> const models(3, {.arrivals_per_s = 8.0, .service = exponential(0.1)});
  for (std::size_t const at_once : {1U, 2U}) {
    for (auto const& beside : predict_together(models, {.at_once = at_once})) {
      EXPECT_EQ(warm_share(models[0], seconds{1.0}, beside), 0.0);
    }
  }
}

TEST(predict_together, says_the_same_again) {
  std::vector<shared_model> const models(3, {.arrivals_per_s = 4.0, .service = exponential(0.1)});
  shared_executors const two{.at_once = 2, .slowdown = {1.0, 1.2}};
  EXPECT_EQ(warm_share(models[0], seconds{0.2}, predict_together(models, two)[0]),
            warm_share(models[0], seconds{0.2}, predict_together(models, two)[0]));
}

TEST(predict_together, refuses_what_has_no_meaning) {
  std::vector<shared_model> models{{.arrivals_per_s = 1.0, .service = exponential(0.1)}};
  EXPECT_THROW((void)predict_together(models, {.at_once = 0}), std::invalid_argument);
  EXPECT_THROW((void)predict_together(models, {.at_once = 1, .slowdown = {0.0}}),
               std::invalid_argument);
  models[0].arrivals_per_s = std::nan("");
  EXPECT_THROW((void)predict_together(models, {}), std::invalid_argument);
  models[0] = {.arrivals_per_s = 1.0, .service = exponential(0.1), .alone_factor = 0.0};
  EXPECT_THROW((void)predict_together(models, {}), std::invalid_argument);
}

}  // namespace
}  // namespace sluice::scheduler
