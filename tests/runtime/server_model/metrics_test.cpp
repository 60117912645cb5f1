#include "runtime/server/metrics.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <sstream>
#include <string>

#include "memhandover/base/error.hpp"
#include "runtime/server/pool_watch.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

/// By name with labels, without comments.
std::map<std::string, double> samples_in(std::string const& text) {
  std::map<std::string, double> found;
  std::istringstream lines{text};
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with('#')) {
      auto const blank = line.rfind(' ');
      found[line.substr(0, blank)] = std::stod(line.substr(blank));
    }
  }
  return found;
}

model_statistics add_statistics() {
  model_statistics is;
  is.model = "add";
  is.version = "1";
  is.success = {7, 900us};
  is.fail = {3, 50us};
  is.queue = {7, 100us};
  is.compute = {7, 400us};
  is.inferences = 12;
  is.computations = {{1, {2, 100us}}, {3, {1, 60us}}};
  is.failures = {1, 0, 2, 0};
  return is;
}

TEST(metrics_of_a_server, are_tritons_where_triton_has_them) {
  auto const status = json{
      {"models",
       {{{"name", "add"}, {"version", "1"}, {"state", "warm"}, {"queue", 5}, {"computing", 2}}}}};
  auto const seen = samples_in(metrics_of({add_statistics()}, status, std::nullopt));
  std::map<std::string, double> const expected{
      {R"(nv_inference_request_success{model="add",version="1"})", 7},
      {R"(nv_inference_request_failure{model="add",version="1",reason="REJECTED"})", 1},
      {R"(nv_inference_request_failure{model="add",version="1",reason="CANCELED"})", 0},
      {R"(nv_inference_request_failure{model="add",version="1",reason="BACKEND"})", 2},
      {R"(nv_inference_request_failure{model="add",version="1",reason="OTHER"})", 0},
      {R"(nv_inference_count{model="add",version="1"})", 12},
      {R"(nv_inference_exec_count{model="add",version="1"})", 3},
      {R"(nv_inference_request_duration_us{model="add",version="1"})", 900},
      {R"(nv_inference_queue_duration_us{model="add",version="1"})", 100},
      {R"(nv_inference_compute_infer_duration_us{model="add",version="1"})", 400},
      {R"(nv_inference_pending_request_count{model="add",version="1"})", 3}};
  for (auto const& [name, value] : expected) {
    ASSERT_TRUE(seen.contains(name)) << name;
    EXPECT_EQ(seen.at(name), value) << name;
  }
}

TEST(metrics_of_a_server, leave_out_what_is_not_known) {
  auto const text = metrics_of(
      {}, {{"models", {{{"name", "m"}, {"version", "1"}, {"observed_attainment", nullptr}}}}},
      std::nullopt);
  EXPECT_THAT(text, Not(HasSubstr("attainment")));
  EXPECT_THAT(text, Not(HasSubstr("pool_bytes")));
  EXPECT_THAT(text, Not(HasSubstr("pending")));
  EXPECT_EQ(samples_in(metrics_of({}, json::object(), json::object())),
            (std::map<std::string, double>{{"sluice_server_ready", 0}}));
}

TEST(metrics_of_a_server, tell_states_ends_and_refusals_apart) {
  auto const seen = samples_in(metrics_of({},
                                          {{"models",
                                            {{{"name", "m"},
                                              {"version", "2"},
                                              {"state", "cold"},
                                              {"refused", 5},
                                              {"refused_for_time", 3}}}},
                                           {"executor", {{"ended", {{"model", 2}, {"hang", 1}}}}}},
                                          std::nullopt));
  EXPECT_EQ(seen.at(R"(sluice_model_state{model="m",version="2",state="cold"})"), 1);
  EXPECT_EQ(seen.at(R"(sluice_model_state{model="m",version="2",state="warm"})"), 0);
  EXPECT_EQ(seen.at(R"(sluice_model_refused_requests_total{model="m",version="2",cause="time"})"),
            3);
  EXPECT_EQ(
      seen.at(R"(sluice_model_refused_requests_total{model="m",version="2",cause="promise"})"), 2);
  EXPECT_EQ(seen.at(R"(sluice_executor_ends_total{cause="model"})"), 2);
  EXPECT_EQ(seen.at(R"(sluice_executor_ends_total{cause="hang"})"), 1);
}

TEST(metrics_of_a_server, tell_what_is_parked_of_each_job) {
  json const parking{{"parked_bytes", 60},  {"dirty_bytes", 30},   {"clean_bytes", 20},
                     {"zero_bytes", 10},    {"parks", 3},          {"away_us", 2.5e6},
                     {"missed_us", 4e6},    {"away_ms", 15e3},     {"resident_ms", 45e3},
                     {"waits_ms", nullptr}, {"owed_in_ms", 1500.0}};
  auto const seen = samples_in(metrics_of(
      {}, json::object(),
      json{{"clients",
            {{{"kind", "training"}, {"name", "a job"}, {"slot", 4}, {"parking", parking}},
             {{"kind", "server"}, {"name", ""}, {"slot", 5}}}}}));
  EXPECT_EQ(seen.at(R"(sluice_parked_bytes{job="a job",slot="4",state="dirty"})"), 30);
  EXPECT_EQ(seen.at(R"(sluice_parked_bytes{job="a job",slot="4",state="clean"})"), 20);
  EXPECT_EQ(seen.at(R"(sluice_parked_bytes{job="a job",slot="4",state="zero"})"), 10);
  EXPECT_EQ(seen.at(R"(sluice_parks_total{job="a job",slot="4"})"), 3);
  EXPECT_EQ(seen.at(R"(sluice_parked_seconds_total{job="a job",slot="4"})"), 2.5);
  EXPECT_EQ(seen.at(R"(sluice_parking_missed_seconds_total{job="a job",slot="4"})"), 4.0);
  EXPECT_EQ(seen.at(R"(sluice_parking_window_away_seconds{job="a job",slot="4"})"), 15.0);
  EXPECT_EQ(seen.at(R"(sluice_parking_window_resident_seconds{job="a job",slot="4"})"), 45.0);
  EXPECT_EQ(seen.at(R"(sluice_parking_owed_in_seconds{job="a job",slot="4"})"), 1.5);
  EXPECT_EQ(seen.count(R"(sluice_parking_waits_seconds{job="a job",slot="4"})"), 0U)
      << "it does not";
  EXPECT_FALSE(seen.contains(R"(sluice_parks_total{job="",slot="5"})"));
}

TEST(metrics_of_a_server, tell_all_of_the_host_copies_by_their_state) {
  auto const of = [](json const& copies) {
    auto seen =
        samples_in(metrics_of({}, json::object(), json{{"pool", {{"host_copies", copies}}}}));
    std::map<std::string, double> states;
    for (std::string const state : {"free", "absent", "held", "kept", "damaged"}) {
      auto const name = R"(sluice_host_copy_bytes{state=")" + state + R"("})";
      if (seen.contains(name)) {
        states[state] = seen.at(name);
      }
    }
    return states;
  };
  json copies{
      {"bytes", 100},       {"free_bytes", 60},
      {"held_bytes", 24},   {"kept_bytes", 10},
      {"damaged_bytes", 6}, {"populated_bytes", 80},
      {"warning", nullptr}, {"disk", {{"bytes", 50}, {"free_bytes", 20}, {"held_bytes", 30}}}};
  auto const all =
      samples_in(metrics_of({}, json::object(), json{{"pool", {{"host_copies", copies}}}}));
  EXPECT_EQ(all.at(R"(sluice_host_copy_disk_bytes{state="free"})"), 20);
  EXPECT_EQ(all.at(R"(sluice_host_copy_disk_bytes{state="held"})"), 30);
  using states = std::map<std::string, double>;
  EXPECT_EQ(of(copies),
            (states{{"free", 40}, {"absent", 20}, {"held", 24}, {"kept", 10}, {"damaged", 6}}));
  copies["populated_bytes"] = 0;
  EXPECT_EQ(of(copies),
            (states{{"free", 0}, {"absent", 60}, {"held", 24}, {"kept", 10}, {"damaged", 6}}));
  copies["populated_bytes"] = 100;
  EXPECT_EQ(of(copies),
            (states{{"free", 60}, {"absent", 0}, {"held", 24}, {"kept", 10}, {"damaged", 6}}));
  EXPECT_EQ(of(nullptr), states{});
}

json pool_of(std::string const& id, std::string const& endpoint) {
  return {{"pool", {{"id", id}}}, {"clients", {{{"kind", "server"}, {"endpoint", endpoint}}}}};
}

TEST(a_watch_of_a_pool, finds_the_one_of_its_server_and_keeps_to_it) {
  json answer = pool_of("a", "here:1");
  pool_watch watch{[&] { return answer; }, "here:2"};
  EXPECT_FALSE(watch.look(1min)) << "it is another server's";
  answer["pools"] = {pool_of("a", "here:1"), pool_of("b", "here:2")};
  EXPECT_EQ((*watch.look(1min))["pool"]["id"], "b");
  answer["pools"] = {pool_of("a", "here:1"), {{"pool", {{"id", "b"}}}}};
  EXPECT_EQ((*watch.look(1min))["pool"]["id"], "b") << "its executor is being replaced";
}

TEST(a_watch_of_a_pool, waits_for_nobody_longer_than_it_may) {
  std::promise<json> answer;
  auto const coming = answer.get_future().share();
  pool_watch watch{[coming] { return coming.get(); }, "here:1"};
  EXPECT_FALSE(watch.look(10ms));
  EXPECT_FALSE(watch.look(10ms)) << "one question is enough";
  answer.set_value(pool_of("a", "here:1"));
  EXPECT_TRUE(watch.look(1min));
}

TEST(a_watch_of_a_pool, knows_nothing_without_a_broker) {
  pool_watch watch{[]() -> json { throw error{error_kind::unavailable, "no broker runs"}; }, "a:1"};
  EXPECT_FALSE(watch.look(1min));
}

}  // namespace
}  // namespace sluice::server::testing
