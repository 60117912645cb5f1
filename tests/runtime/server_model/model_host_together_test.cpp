/// Models that want more memory than there is, whose idle timeouts are chosen for all together.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "runtime/server/hosting/host_status.hpp"
#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using scheduler::instant;
using scheduler::seconds;

scheduler::model_settings of_slow_loads() {
  return {.goal = {.percentile = 0.9, .latency = seconds{0.1}, .attainment = 0.9},
          .weight_bytes = model_bytes,
          .limits = {.min_idle = seconds{0.0}, .max_idle = seconds{1e6}},
          .service = {.mean = seconds{0.01}, .scv = 1.0},
          .load = {.mean = seconds{1.0}, .scv = 0.0}};
}

/// What is known of a model that is asked for every other second, and loads for one.
scheduler::experience of_many_requests() {
  scheduler::model_controller model{of_slow_loads(), instant{}};
  std::mt19937 random{1};
  std::exponential_distribution<double> gap{0.5};
  double now_s = 100.0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(model.on_arrival(instant{seconds{now_s}}).admitted);
    model.on_service(instant{seconds{now_s + 0.01}}, seconds{0.01}, seconds{0.01});
    model.on_load(instant{seconds{now_s + 0.02}}, seconds{1.0});
    now_s += gap(random);
  }
  return model.learnt(instant{seconds{now_s}});
}

/// Of two models that both want to be there nearly all the time.
class a_crowded_host : public a_host {
 protected:
  a_crowded_host() {
    auto made = (std::filesystem::temp_directory_path() / "together-XXXXXX").string();
    folder_ = ::mkdtemp(made.data());
    options_.tick = 5ms;
    for (auto const* const its : {"five", "seven"}) {
      add(5).set_fingerprint(its);
      models_.back().scheduling = of_slow_loads();
    }
    experience_file{folder_ / "file"}.keep(
        {{"model0/1", "five bytes=8192 on=host", of_many_requests()},
         {"model1/1", "seven bytes=8192 on=host", of_many_requests()}});
    options_.learnt = std::make_shared<experience_file>(folder_ / "file", 1h);
  }
  ~a_crowded_host() override {
    options_ = {};
    std::filesystem::remove_all(folder_);
  }

  [[nodiscard]] bool has_decided() const {
    return eventually([this] {
      auto const models = host_->snapshot().models;
      return std::all_of(models.begin(), models.end(),
                         [](auto const& each) { return !each.report.warm.candidates.empty(); });
    });
  }
  /// By the next ticks.
  [[nodiscard]] bool come_to_choose_together(bool together) const {
    return eventually([&] {
      auto const models = host_->snapshot().models;
      return std::all_of(models.begin(), models.end(),
                         [&](auto const& each) { return each.together.has_value() == together; });
    });
  }
  /// Of both, on average.
  [[nodiscard]] double held_bytes() const {
    double bytes = 0.0;
    for (auto const& each : host_->snapshot().models) {
      auto const& kept = each.together ? *each.together : each.report.warm.chosen;
      bytes += (1.0 - kept.released_fraction) * static_cast<double>(each.bytes);
    }
    return bytes;
  }

  std::filesystem::path folder_;
};

TEST_F(a_crowded_host, leaves_each_its_own_timeout_where_all_have_room) {
  start(8);
  ASSERT_TRUE(has_decided());
  EXPECT_TRUE(come_to_choose_together(false));
  EXPECT_GT(held_bytes(), 3.0 * heap_pool::chunk) << "else the other tests show nothing";
  auto const said = describe(host_->snapshot());
  for (auto const& each : said["models"]) {
    EXPECT_EQ(each["chosen_together"], false);
  }
}

TEST_F(a_crowded_host, shares_out_the_memory_that_there_is) {
  start(3);
  ASSERT_TRUE(come_to_choose_together(true));
  EXPECT_LE(held_bytes(), 3.0 * heap_pool::chunk);
  auto const now = host_->snapshot();
  auto const said = describe(now)["models"];
  ASSERT_EQ(said.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(said[i]["chosen_together"], true);
    EXPECT_EQ(said[i]["idle_timeout_s"], now.models[i].together->idle_timeout.count());
    EXPECT_EQ(said[i]["predicted_attainment"], now.models[i].together->attainment);
    EXPECT_EQ(said[i]["released_fraction"], now.models[i].together->released_fraction);
  }
}

TEST_F(a_crowded_host, leaves_out_memory_that_a_job_never_gives) {
  pool_ = std::make_shared<heap_pool>(8, 5);
  pool_->keep(5);
  host_ = std::make_unique<model_host>(options_, pool_, std::move(models_));
  ASSERT_TRUE(come_to_choose_together(true));
  EXPECT_LE(held_bytes(), 3.0 * heap_pool::chunk);
}

TEST_F(a_crowded_host, leaves_out_models_that_are_always_there) {
  add(11).set_fingerprint("eleven");
  models_.back().always_warm = true;
  start(5);
  ASSERT_TRUE(eventually([this] {
    auto const models = host_->snapshot().models;
    return models[0].together && models[1].together;
  }));
  EXPECT_FALSE(host_->snapshot().models[2].together);
}

TEST_F(a_crowded_host, gives_each_its_own_timeout_again_when_another_has_left) {
  start(3);
  ASSERT_TRUE(come_to_choose_together(true));
  host_->retire(1);
  EXPECT_TRUE(eventually([this] {
    auto const models = host_->snapshot().models;
    return models.size() == 1 && !models[0].together;
  }));
}

TEST_F(a_crowded_host, has_who_misses_its_promise_stay_until_its_memory_is_needed) {
  start(3);
  ASSERT_TRUE(come_to_choose_together(true));
  auto const is_short_of_it = [](model_snapshot const& each) {
    return each.together->attainment < each.report.warm.required_share;
  };
  auto const models = host_->snapshot().models;
  ASSERT_TRUE(std::any_of(models.begin(), models.end(), is_short_of_it));
  for (auto const& each : models) {
    EXPECT_LT(each.report.warm.chosen.idle_timeout, seconds{60.0}) << "by itself";
    if (is_short_of_it(each)) {
      EXPECT_EQ(each.together->idle_timeout, seconds{1e6});
    }
  }
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  EXPECT_EQ(sum_of(ask(1, 1)), 11);
  EXPECT_EQ(sum_of(ask(0, 2)), 12);
  EXPECT_EQ(host_->snapshot().models[0].cold_starts, 2U);
}

}  // namespace
}  // namespace sluice::server::testing
