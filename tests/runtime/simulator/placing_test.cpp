#include "runtime/simulator/placing.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "memhandover/base/error.hpp"
#include "runtime/simulator/generators.hpp"
#include "runtime/simulator/keeping.hpp"
#include "runtime/simulator/placing_text.hpp"
#include "runtime/simulator/replicas.hpp"
#include "runtime/simulator/simulation.hpp"

namespace sluice::simulator {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::StartsWith;

constexpr std::uint64_t gib = 1ULL << 30U;

trace of(std::vector<arriving> requests, std::vector<std::string> models, double length_s) {
  return {.models = std::move(models), .requests = std::move(requests), .length_s = length_s};
}

simulation_outcome run(spread_trace const& there, std::uint64_t bytes, unsigned devices,
                       double latency_s) {
  std::vector<simulated_model> replicas;
  for (auto const device : there.device_of) {
    replicas.push_back(
        {.bytes = bytes, .goal = {.latency = scheduler::seconds{latency_s}}, .device = device});
  }
  auto const policy = make_keeping(
      "always", {.models = &replicas, .requests = &there.requests, .devices = devices});
  return gathered(simulate(there.requests, replicas, *policy, {.devices = devices}), there);
}

TEST(a_placing, is_known_by_its_name) {
  EXPECT_EQ(parse_placing("attainment"), placing_rule::attainment);
  EXPECT_EQ(parse_placing("first-fit"), placing_rule::first_fit);
  try {
    (void)parse_placing("best");
    FAIL();
  } catch (error const& wrong) {
    EXPECT_EQ(wrong.kind(), error_kind::invalid_argument);
    EXPECT_THAT(wrong.what(), HasSubstr("no placing 'best'; there are attainment, work"));
  }
}

TEST(placeable_models, have_the_rates_and_services_of_their_trace) {
  auto const requests =
      of({{0.0, 0.1, 0}, {1.0, 0.3, 0}, {2.0, 0.5, 1}, {3.0, 0.2, 0}}, {"a", "b"}, 10.0);
  auto const models = placeable_models(requests, {.bytes = {1, 2}, .latency = 200ms});
  ASSERT_EQ(models.size(), 2U);
  EXPECT_NEAR(models[0].arrivals_per_s, 0.3, 1e-12);
  EXPECT_NEAR(models[0].service.mean().count(), 0.2, 1e-12);
  EXPECT_NEAR(models[1].service.mean().count(), 0.5, 1e-12);
  EXPECT_EQ(models[1].bytes, 2U);
  EXPECT_EQ(models[1].load.mean().count(), 0.0);
  auto const released =
      placeable_models(requests, {.bytes = {gib}, .latency = 200ms, .idle_timeout = 10s});
  EXPECT_NEAR(released[1].load.mean().count(), 0.05, 1e-6);
  EXPECT_THROW((void)placeable_models(requests, {.bytes = {1, 2, 3}, .latency = 200ms}), error);
}

TEST(a_spread_trace, is_the_trace_itself_where_each_model_is_on_one_device) {
  auto const there =
      spread(of({{0.0, 1.0, 1}, {2.0, 1.0, 0}}, {"a", "b"}, 4.0), {{1}, {0}}, {.seed = 3});
  EXPECT_EQ(there.device_of, (std::vector<unsigned>{1, 0}));
  EXPECT_EQ(there.requests.models, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(there.requests.requests[0].model, 1U);
}

TEST(a_spread_trace, gives_each_replica_its_part_and_counts_what_goes_nowhere) {
  std::vector<arriving> requests;
  for (int i = 0; i < 3000; ++i) {
    requests.push_back({static_cast<double>(i), 0.1, static_cast<std::uint32_t>(i % 3)});
  }
  auto const there = spread(of(requests, {"gone", "two", "one"}, 3000.0), {{}, {0, 1}, {1}},
                            {.count_from_s = 1500.0, .seed = 5});
  EXPECT_EQ(there.model_of, (std::vector<std::uint32_t>{1, 1, 2}));
  EXPECT_EQ(there.requests.models, (std::vector<std::string>{"two", "two", "one"}));
  EXPECT_EQ(there.nowhere, (std::vector<std::uint64_t>{500, 0, 0}));
  std::vector<unsigned> came(3);
  for (auto const& each : there.requests.requests) {
    ++came[each.model];
  }
  EXPECT_EQ(came[0] + came[1], 1000U);
  EXPECT_NEAR(came[0], 500.0, 5.0 * std::sqrt(250.0));
  EXPECT_EQ(came[2], 1000U);
  EXPECT_NEAR(there.share_somewhere, 2.0 / 3.0, 1e-12);
  auto const seen = run(there, 1, 2, 1.0);
  EXPECT_EQ(seen.models.size(), 3U);
  EXPECT_EQ(seen.models[0].refused, 500U);
  EXPECT_EQ(seen.models[0].within, 0U);
  EXPECT_EQ(seen.models[1].within, 1000U);
}

TEST(what_went_nowhere, is_predicted_to_be_late_where_anything_is_predicted) {
  spread_trace from;
  from.model_of = {1, 1};
  from.nowhere = {30, 0};
  simulation_outcome seen;
  seen.models.resize(2);
  seen.models[0] = {.requests = 4, .within = 3, .released_s = 10.0};
  seen.models[1] = {.requests = 6, .within = 6, .released_s = 20.0};
  auto const silent = gathered(seen, from);
  EXPECT_EQ(silent.all().predictions, 0U);
  EXPECT_NEAR(silent.in_time(), 9.0 / 40.0, 1e-12);
  EXPECT_NEAR(silent.models[1].released_s, 15.0, 1e-12);
  seen.models[0].predictions = 4;
  seen.models[0].predicted = 3.5;
  seen.models[1].predictions = 6;
  seen.models[1].predicted = 5.5;
  auto const all = gathered(seen, from).all();
  EXPECT_NEAR(all.predicted / static_cast<double>(all.predictions), 9.0 / 40.0, 1e-12);
}

TEST(a_placement_by_attainment, answers_in_the_simulator_what_was_predicted_and_more_than_others) {
  // Of one model more comes than a device can do.
  auto requests = generate(
      "poisson:rate=60,zipf=1.2",
      {.length_s = 2000.0, .models = 12, .service_s = 0.05, .service_scv = 1.0, .seed = 4});
  auto const models = placeable_models(requests, {.bytes = {4 * gib}, .latency = 300ms});
  std::vector<scheduler::placement_device> const devices(6, {12 * gib});
  auto const share = [&](std::string const& rule) {
    auto const found = place(requests, models, devices, parse_placing(rule), {});
    double const predicted = scheduler::predict_placement(models, devices, found, {}).share_within;
    auto const there = spread(requests, found.devices_of, {});
    double const seen = run(there, gib, 6, 0.3).in_time();
    return std::pair{predicted, seen};
  };
  auto const [predicted, seen] = share("attainment");
  EXPECT_NEAR(predicted, seen, 0.02);
  EXPECT_GT(seen, share("round-robin").second + 0.05);
  EXPECT_GT(seen, share("first-fit").second + 0.05);
  EXPECT_GT(seen, share("work").second + 0.05);
}

TEST(a_placements_text, has_devices_replicas_and_what_was_left_out) {
  std::vector<std::string> const names{"small", "a,b", "huge", "more"};
  auto const model = [](std::uint64_t bytes, double rate) {
    return scheduler::placeable_model{.bytes = bytes,
                                      .arrivals_per_s = rate,
                                      .service = scheduler::distribution::gamma(50ms, 1.0),
                                      .latency = 1s};
  };
  std::vector<scheduler::placeable_model> const models{model(gib, 4.0), model(2 * gib, 1.0),
                                                       model(90 * gib, 1.0), model(4 * gib, 0.5)};
  std::vector<scheduler::placement_device> const devices{{3 * gib}, {gib}};
  scheduler::model_placement const found{
      .devices_of = {{0, 1}, {0}, {}, {}},
      .left_out = {{2, scheduler::model_placement::reason::too_large, 3 * gib, 0},
                   {3, scheduler::model_placement::reason::no_room, 0, 0}}};
  auto const predicted = scheduler::predict_placement(models, devices, found, {});
  placed_models const those{names, models, devices, found, predicted};
  auto const table = table_of(those);
  EXPECT_THAT(table,
              StartsWith("device  models   weights    memory  busy %  predicted %  which\n"));
  EXPECT_THAT(table, HasSubstr("     0       2  3.00 GiB  3.00 GiB    15.0"));
  EXPECT_THAT(table, HasSubstr("  small, a,b\n"));
  EXPECT_THAT(
      table,
      HasSubstr("on no device: huge needs 90.00 GiB, and the largest device (0) has 3.00 GiB\n"));
  EXPECT_THAT(
      table,
      HasSubstr("on no device: more needs 4.00 GiB, and of no device is more free than 0.00 GiB"));
  auto const csv = csv_of(those);
  EXPECT_THAT(csv, StartsWith("model,device,bytes,arrivals_per_s,predicted_in_time,left_out\n"
                              "small,0,1073741824,2,"));
  EXPECT_THAT(csv, HasSubstr("\nsmall,1,1073741824,2,"));
  EXPECT_THAT(csv, HasSubstr("\n\"a,b\",0,2147483648,1,"));
  EXPECT_THAT(csv, HasSubstr("\nhuge,,96636764160,1,0,\"needs 90.00 GiB, and"));
}

}  // namespace
}  // namespace sluice::simulator
