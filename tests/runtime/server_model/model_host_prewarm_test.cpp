/// Models that a host loads before anybody asks, since their requests come by a timer.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "tests/runtime/server_model/a_host.hpp"

namespace sluice::server::testing {
namespace {

using namespace std::chrono_literals;
using scheduler::instant;
using scheduler::seconds;

scheduler::model_settings of_a_timer() {
  return {.goal = {.percentile = 0.95, .latency = seconds{0.1}, .attainment = 0.95},
          .weight_bytes = model_bytes,
          .limits = {.min_idle = seconds{0.0}, .max_idle = seconds{1e6}},
          .service = {.mean = seconds{0.01}, .scv = 1.0},
          .load = {.mean = seconds{1.0}, .scv = 0.0},
          .may_prewarm = true};
}

/// What is known of a model that has been asked for once a period, and is to be loaded so soon.
scheduler::experience of_requests_each(seconds period, seconds before_its_load) {
  scheduler::model_controller model{of_a_timer(), instant{}};
  double last_s = 0.0;
  for (int i = 0; i < 40; ++i) {
    last_s = 100.0 + period.count() * i;
    EXPECT_TRUE(model.on_arrival(instant{seconds{last_s}}).admitted);
    model.on_service(instant{seconds{last_s + 0.01}}, seconds{0.01}, seconds{0.01});
    (void)model.tick(instant{seconds{last_s + 1.0}});
  }
  auto const load = model.prewarm_at(instant{seconds{last_s + 1.0}});
  EXPECT_TRUE(load);
  return model.learnt(load.value_or(instant{}) - before_its_load);
}

/// Its first model's next request is expected soon after it has begun.
class a_host_that_prewarms : public a_host {
 protected:
  a_host_that_prewarms() {
    auto made = (std::filesystem::temp_directory_path() / "prewarm-XXXXXX").string();
    folder_ = ::mkdtemp(made.data());
    options_.tick = 5ms;
    timed_ = &add(5);
    timed_->set_fingerprint("five");
    models_[0].scheduling = of_a_timer();
  }
  ~a_host_that_prewarms() override {
    options_ = {};
    std::filesystem::remove_all(folder_);
  }

  /// Another one, which is to be loaded half a second later.
  model_control& add_witness() {
    auto& control = add(7);
    control.set_fingerprint("seven");
    models_.back().scheduling = of_a_timer();
    return control;
  }
  void start_before(
      std::chrono::milliseconds its_load, std::uint32_t pool_chunks,
      std::uint32_t training_chunks = 0,
      std::function<void(heap_pool&)> const& prepare = [](heap_pool&) {}) {
    {
      experience_file file{folder_ / "file"};
      file.keep(
          {{"model0/1", "five bytes=8192 on=host", of_requests_each(period_, its_load)},
           {"model1/1", "seven bytes=8192 on=host", of_requests_each(period_, its_load + 500ms)}});
    }
    options_.learnt = std::make_shared<experience_file>(folder_ / "file", 1h);
    pool_ = std::make_shared<heap_pool>(pool_chunks, training_chunks);
    prepare(*pool_);
    host_ = std::make_unique<model_host>(options_, pool_, std::move(models_));
  }

  [[nodiscard]] model_snapshot seen(std::size_t model = 0) const {
    return host_->snapshot().models.at(model);
  }
  [[nodiscard]] bool is_prewarmed() const {
    return eventually([this] { return seen().prewarms == 1; });
  }
  [[nodiscard]] bool is_omitted() const {
    return eventually([this] { return seen().prewarms_omitted == 1; });
  }
  /// Nothing but its own request has had it loaded, and that has.
  void expect_a_cold_start() {
    EXPECT_EQ(timed_->loads(), 0);
    EXPECT_EQ(seen().prewarms, 0U);
    EXPECT_EQ(sum_of(ask(0, 1)), 11);
    EXPECT_EQ(seen().cold_starts, 1U);
  }

  seconds period_{60.0};
  std::filesystem::path folder_;
  model_control* timed_ = nullptr;
};

TEST_F(a_host_that_prewarms, has_a_model_warm_before_its_request_comes) {
  start_before(100ms, 8);
  ASSERT_TRUE(is_prewarmed());
  EXPECT_EQ(seen().prewarms_used, 0U);
  ASSERT_TRUE(eventually([this] { return seen().report.loads == 1; }))
      << "how long that took is learnt, and that it was sooner than expected";
  EXPECT_EQ(sum_of(ask(0, 1)), 11);
  auto const now = host_->snapshot();
  EXPECT_EQ(now.models[0].cold_starts, 0U);
  EXPECT_EQ(now.models[0].prewarms_used, 1U);
  EXPECT_EQ(now.cold.n, 0U);
  EXPECT_EQ(now.handovers.size(), 1U);
  EXPECT_EQ(timed_->loads(), 1);
}

TEST_F(a_host_that_prewarms, lets_a_model_go_that_nobody_asked_for) {
  period_ = seconds{10.0};
  start_before(100ms, 8);
  ASSERT_TRUE(is_prewarmed());
  ASSERT_TRUE(timed_->wait_for_unloads(1));
  EXPECT_TRUE(pool_->wait_for_serving(0));
  auto const now = seen();
  EXPECT_EQ(now.prewarms, 1U);
  EXPECT_EQ(now.prewarms_used, 0U);
  EXPECT_EQ(now.prewarms_omitted, 0U);
  EXPECT_EQ(now.cold_starts, 0U);
  EXPECT_EQ(timed_->loads(), 1);
}

TEST_F(a_host_that_prewarms, does_not_where_that_is_not_wanted) {
  models_[0].scheduling.may_prewarm = false;
  add_witness();
  start_before(0ms, 8);
  ASSERT_TRUE(eventually([this] { return seen(1).prewarms == 1; }));
  expect_a_cold_start();
}

TEST_F(a_host_that_prewarms, takes_what_training_gives_and_parks_nobody) {
  start_before(0ms, 4, 4, [](auto& pool) { pool.park_for(2); });
  ASSERT_TRUE(is_prewarmed());
  EXPECT_EQ(pool_->usage().training_bytes, 2 * heap_pool::chunk);
}

TEST_F(a_host_that_prewarms, does_without_memory_for_which_a_job_would_have_to_be_parked) {
  add_witness();
  start_before(0ms, 4, 4, [](auto& pool) { pool.park_for(3); });
  ASSERT_TRUE(is_omitted());
  ASSERT_TRUE(eventually([this] { return seen(1).prewarms_omitted == 1; }));
  EXPECT_EQ(seen().prewarms_omitted, 1U) << "it is not tried again";
  EXPECT_EQ(pool_->usage().training_bytes, 4 * heap_pool::chunk);
  EXPECT_EQ(seen().failed, 0U);
  expect_a_cold_start();
}

TEST_F(a_host_that_prewarms, does_without_memory_that_is_owed_to_a_job) {
  start_before(0ms, 4, 0,
               [](auto& pool) { pool.set_owed(5, std::chrono::steady_clock::now() + 1h, 10ms); });
  ASSERT_TRUE(is_omitted());
  expect_a_cold_start();
}

TEST_F(a_host_that_prewarms, evicts_no_other_model) {
  auto& other = add(7);
  start_before(5s, 3);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  ASSERT_TRUE(is_omitted());
  EXPECT_EQ(host_->state(1), model_state::warm);
  EXPECT_EQ(other.unloads(), 0);
  expect_a_cold_start();
  EXPECT_EQ(other.unloads(), 1) << "for a request it goes";
}

TEST_F(a_host_that_prewarms, serves_a_request_that_comes_meanwhile_out_of_the_same_load) {
  timed_->close_loads();
  start_before(100ms, 8);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  EXPECT_EQ(host_->state(0), model_state::loading);
  send(0, 1, 0);
  send(0, 2, 1);
  timed_->open_loads();
  auto const got = answers_.wait_for(2);
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(sum_of(got[0].second), 11);
  EXPECT_EQ(sum_of(got[1].second), 12);
  EXPECT_EQ(timed_->loads(), 1);
  EXPECT_EQ(seen().prewarms, 1U);
  EXPECT_EQ(seen().prewarms_used, 1U);
  EXPECT_EQ(seen().cold_starts, 0U);
}

TEST_F(a_host_that_prewarms, loads_anew_for_a_request_that_came_to_a_load_that_failed) {
  timed_->close_loads();
  timed_->fail_load(error_kind::internal);
  start_before(100ms, 8);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  send(0, 1, 0);
  timed_->open_loads();
  EXPECT_EQ(sum_of(answers_.wait_for(1).at(0).second), 11);
  EXPECT_EQ(seen().prewarms_omitted, 1U);
  EXPECT_EQ(seen().cold_starts, 1U);
  EXPECT_EQ(seen().failed, 0U) << "nobody hears of it";
}

TEST_F(a_host_that_prewarms, makes_no_other_model_wait_to_be_loaded) {
  add(7);
  options_.computing_threads = 2;
  timed_->close_loads();  // for good
  start_before(100ms, 8);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  ASSERT_TRUE(is_omitted());
  EXPECT_TRUE(pool_->wait_for_serving(model_bytes)) << "what it had taken has gone back";
  expect_a_cold_start();
}

TEST_F(a_host_that_prewarms, makes_no_other_model_wait_while_training_does_not_answer) {
  add(7);
  options_.computing_threads = 2;
  start_before(0ms, 8, 8, [](auto& pool) { pool.ignore_spare(); });
  ASSERT_TRUE(pool_->wait_for_spare(1));
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  ASSERT_TRUE(is_omitted());
  expect_a_cold_start();
}

TEST_F(a_host_that_prewarms, goes_on_while_others_compute_a_model_that_is_warm) {
  add(7);
  options_.computing_threads = 2;
  timed_->close_loads();
  start_before(5s, 8);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  EXPECT_EQ(sum_of(ask(1, 2)), 16);
  EXPECT_EQ(seen().prewarms_omitted, 0U);
  timed_->open_loads();
  EXPECT_TRUE(is_prewarmed());
}

TEST_F(a_host_that_prewarms, is_called_off_where_one_thread_loads_and_computes) {
  add(7);
  timed_->close_loads();
  start_before(500ms, 8);
  EXPECT_EQ(sum_of(ask(1, 1)), 15);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  EXPECT_EQ(sum_of(ask(1, 2)), 16);
  EXPECT_TRUE(is_omitted());
}

TEST_F(a_host_that_prewarms, gives_memory_up_that_comes_to_be_owed_to_a_job) {
  timed_->close_loads();
  start_before(100ms, 8);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  pool_->set_owed(8, std::chrono::steady_clock::now(), 10ms);
  EXPECT_TRUE(pool_->wait_until_met());
  EXPECT_TRUE(is_omitted());
}

TEST_F(a_host_that_prewarms, ends_at_once_with_a_load_under_way) {
  timed_->close_loads();
  start_before(100ms, 8);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  EXPECT_TRUE(host_->stop(patience));
  EXPECT_EQ(seen().state, model_state::cold);
  EXPECT_EQ(timed_->loads(), 0);
}

TEST_F(a_host_that_prewarms, lets_a_model_leave_that_is_being_loaded) {
  timed_->close_loads();
  start_before(100ms, 8);
  ASSERT_TRUE(timed_->wait_for_spare_loads(1));
  host_->retire(0);
  EXPECT_TRUE(pool_->wait_for_serving(0));
  EXPECT_EQ(timed_->loads(), 0);
}

TEST_F(a_host_that_prewarms, loses_nothing_but_the_attempt_when_the_pool_fails) {
  start_before(0ms, 4, 4, [](auto& pool) { pool.fail_next(error_kind::unavailable); });
  ASSERT_TRUE(is_omitted());
  expect_a_cold_start();
}

TEST_F(a_host_that_prewarms, waits_for_the_image_first) {
  timed_->set_image_steps(20);
  start_before(0ms, 8);
  ASSERT_TRUE(is_prewarmed());
  EXPECT_EQ(timed_->image_steps_made(), 20);
}

}  // namespace
}  // namespace sluice::server::testing
