#include "runtime/server/service.hpp"

#include <gtest/gtest.h>

#include "memhandover/base/bytes.hpp"
#include "runtime/server/engines/scheduling_settings.hpp"
#include "runtime/server/server_setup.hpp"
#include "tests/runtime/server_model/heap_pool.hpp"
#include "tests/runtime/server_model/sum_model.hpp"

namespace sluice::server::testing {
namespace {

using namespace sluice::literals;
using namespace std::chrono_literals;

offered_model offer(std::string const& name, std::string const& version) {
  model_metadata metadata;
  metadata.name = name;
  metadata.versions = {version};
  return {metadata, version};
}

served_model serve(std::string const& name, std::string const& version, unsigned char weight) {
  served_model made;
  made.name = name;
  made.version = version;
  made.model =
      std::make_unique<sum_model>(heap_pool::chunk, weight, std::make_shared<model_control>());
  made.scheduling.goal.latency = scheduler::seconds{0.1};
  made.scheduling.limits = {scheduler::seconds{1e6}, scheduler::seconds{1e6}};
  return made;
}

class a_service : public ::testing::Test {
 protected:
  a_service() : pool_(std::make_shared<heap_pool>(8)) {}

  void attach() {
    std::vector<served_model> models;
    models.push_back(serve("sum", "1", 5));
    models.push_back(serve("sum", "2", 7));
    models.push_back(serve("other", "1", 9));
    host_ = std::make_unique<model_host>(host_options{}, pool_, std::move(models));
    service_.attach(*host_, "127.0.0.1:1");
  }

  infer_result ask(std::string const& model, std::string const& version) {
    infer_request request;
    request.model = model;
    request.version = version;
    request.inputs.push_back(number("input", 0));
    answers answers;
    service_.infer(std::move(request), answers.take(0));
    auto got = answers.wait_for(1);
    return got.empty() ? error{error_kind::internal, "no answer came"} : got[0].second;
  }

  std::shared_ptr<heap_pool> pool_;
  model_service service_{{offer("sum", "1"), offer("sum", "2"), offer("other", "1")}};
  std::unique_ptr<model_host> host_;
};

TEST_F(a_service, refuses_requests_while_it_starts_but_says_what_it_offers) {
  EXPECT_FALSE(service_.ready());
  EXPECT_EQ(service_.ready().reason, "the server is starting");
  EXPECT_EQ(failure_of(ask("sum", "")), error_kind::unavailable);
  EXPECT_EQ(service_.metadata("other", "").name, "other");
  EXPECT_FALSE(service_.model_ready("other", ""));
  EXPECT_EQ(service_.models(), (std::vector<std::string>{"sum", "other"}));
  EXPECT_EQ(service_.status()["server"]["state"], "starting");
}

TEST_F(a_service, takes_the_newest_version_unless_one_is_named) {
  attach();
  EXPECT_TRUE(service_.ready());
  EXPECT_EQ(sum_of(ask("sum", "")), 14);
  EXPECT_EQ(sum_of(ask("sum", "1")), 10);
  EXPECT_TRUE(service_.model_ready("sum", "2"));
}

TEST_F(a_service, does_not_find_unknown_models_and_versions) {
  attach();
  EXPECT_EQ(failure_of(ask("nobody", "")), error_kind::not_found);
  EXPECT_EQ(failure_of(ask("sum", "3")), error_kind::not_found);
  EXPECT_THROW((void)service_.metadata("nobody", ""), error);
  EXPECT_THROW((void)service_.model_ready("sum", "3"), error);
}

TEST_F(a_service, is_not_ready_once_it_drains) {
  attach();
  EXPECT_EQ(service_.model_ready("sum", "").reason, "cold");
  service_.drain();
  EXPECT_FALSE(service_.ready());
  EXPECT_EQ(service_.ready().reason, "the server is shutting down");
  EXPECT_EQ(service_.status()["server"]["state"], "draining");
}

/// Its process has ended since it was asked whether it is ready.
class ending_executor : public model_executor {
 public:
  [[nodiscard]] model_state state(model_index /*model*/) const override {
    return model_state::cold;
  }
  request_ticket submit(model_index /*model*/, infer_request /*request*/,
                        completion /*done*/) override {
    return 1;
  }
  void cancel(request_ticket /*which*/) override {}
  [[nodiscard]] nlohmann::json status() const override {
    return {{"executor", {{"state", "starting"}}}};
  }
};

TEST_F(a_service, has_the_state_that_its_executor_has_in_the_same_status) {
  ending_executor executor;
  service_.attach(executor, "127.0.0.1:1");
  EXPECT_TRUE(service_.ready());
  EXPECT_EQ(service_.status()["server"]["state"], "restarting");
}

TEST_F(a_service, tells_states_bytes_and_latencies_without_waking_anybody) {
  attach();
  EXPECT_EQ(sum_of(ask("other", "")), 18);
  auto const status = service_.status();
  EXPECT_EQ(status["server"]["state"], "ready");
  EXPECT_EQ(status["models"][0]["state"], "cold");
  EXPECT_EQ(status["models"][2]["state"], "warm");
  EXPECT_EQ(status["models"][2]["bytes"], heap_pool::chunk);
  EXPECT_EQ(status["models"][2]["cold_starts"], 1);
  EXPECT_EQ(status["models"][2]["slo"]["latency_ms"], 100.0);
  EXPECT_EQ(status["requests"]["total"], 1);
  EXPECT_EQ(status["latency_ms"]["cold"]["n"], 1);
  EXPECT_GT(status["latency_ms"]["cold"]["p99"], 0.0);
  EXPECT_EQ(status["pauses"]["count"], 1);
  EXPECT_EQ(status["pauses"]["cut_short"], 0);
  EXPECT_EQ(status["pauses"]["min_share"], 0.0);
  EXPECT_GT(status["pauses"]["held_s"], 0.0);
  EXPECT_EQ(status["handovers"].size(), 1U);
  EXPECT_EQ(status["handovers"][0]["bytes"], heap_pool::chunk);
  EXPECT_FALSE(service_.model_ready("sum", "")) << "asking woke it";
}

TEST_F(a_service, is_ready_only_if_all_models_that_are_wanted_can_be_served) {
  error const why{error_kind::unsupported, "not TorchScript"};
  for (bool const is_wanted : {false, true}) {
    model_service service{{offer("sum", "1")}, {{"onnx", why, is_wanted}}};
    attach();
    service.attach(*host_, "127.0.0.1:1");
    EXPECT_EQ(service.ready().ready, !is_wanted);
    EXPECT_EQ(service.ready().reason,
              is_wanted ? "model 'onnx' cannot be served: not TorchScript" : "");
    EXPECT_EQ(service.models(), std::vector<std::string>{"sum"});
    ASSERT_EQ(service.unservable().size(), 1U);
    try {
      (void)service.metadata("onnx", "");
      ADD_FAILURE() << "no error";
    } catch (error const& failure) {
      EXPECT_EQ(failure.kind(), error_kind::unavailable);
      EXPECT_STREQ(failure.what(), "model 'onnx' cannot be served: not TorchScript");
    }
    EXPECT_EQ(service.status()["unservable"][0]["reason"], "not TorchScript");
  }
}

/// Whose first model cannot be served.
class refusing_executor final : public model_executor {
 public:
  [[nodiscard]] model_state state(model_index /*model*/) const override {
    return model_state::cold;
  }
  [[nodiscard]] readiness model_ready(model_index model) const override {
    auto const why = unservable(model);
    return why ? readiness{false, why->what()} : readiness{};
  }
  [[nodiscard]] std::optional<error> unservable(model_index model) const override {
    return model == 0 ? std::optional{error{error_kind::invalid_argument, "no TorchScript"}}
                      : std::nullopt;
  }
  request_ticket submit(model_index /*model*/, infer_request /*request*/,
                        completion done) override {
    done(infer_response{});
    return 0;
  }
  void cancel(request_ticket /*which*/) override {}
  [[nodiscard]] nlohmann::json status() const override { return nlohmann::json::object(); }
};

TEST(a_service_whose_host_refuses_a_model, says_so_whatever_it_is_asked_of_it) {
  refusing_executor host;
  auto offered = offer("sum", "1");
  offered.max_batch_size = 1;
  model_service service{{offered, offer("other", "1")}};
  EXPECT_EQ(service.metadata("sum", "").name, "sum") << "nobody has refused it yet";
  service.attach(host, "127.0.0.1:1");
  std::string const reason = "model 'sum' cannot be served: no TorchScript";
  auto const is_refused = [&](error const& failure) {
    return failure.kind() == error_kind::unavailable && failure.what() == reason;
  };
  try {
    (void)service.metadata("sum", "");
    ADD_FAILURE() << "no error";
  } catch (error const& failure) {
    EXPECT_TRUE(is_refused(failure)) << failure.what();
  }
  infer_request wrong;
  wrong.model = "sum";
  wrong.inputs = {number("input", 0), number("input", 0)};
  wrong.inputs[0].shape = {2};
  answers answers;
  service.infer(std::move(wrong), answers.take(0));
  auto const got = answers.wait_for(1);
  ASSERT_EQ(got.size(), 1U);
  EXPECT_TRUE(is_refused(std::get<error>(got[0].second)));
  EXPECT_EQ(service.model_ready("sum", "").reason, "no TorchScript");
  EXPECT_EQ(service.versions("sum"), std::vector<std::string>{"1"});
  EXPECT_EQ(service.statistics("sum", "")["model_stats"].size(), 1U);
  EXPECT_EQ(service.metadata("other", "").name, "other");
}

class a_batching_service : public a_service {
 protected:
  /// What it says of two inputs with so many rows.
  infer_result ask_rows(std::int64_t first, std::int64_t second, std::int64_t most = 8) {
    auto offered = offer("sum", "1");
    offered.max_batch_size = most;
    model_service service{{offered}};
    attach();
    service.attach(*host_, "127.0.0.1:1");
    infer_request request;
    request.model = "sum";
    request.inputs = {number("input", 0), number("other", 0)};
    request.inputs[0].shape = {first, 1};
    request.inputs[1].shape = {second, 1};
    answers answers;
    service.infer(std::move(request), answers.take(0));
    auto got = answers.wait_for(1);
    return got.empty() ? error{error_kind::internal, "no answer came"} : got[0].second;
  }
  std::string refusal(infer_result const& result) {
    auto const* const failure = std::get_if<error>(&result);
    return failure != nullptr && failure->kind() == error_kind::invalid_argument ? failure->what()
                                                                                 : "no refusal";
  }
};

TEST_F(a_batching_service, takes_as_many_rows_as_its_configuration_says) {
  EXPECT_EQ(refusal(ask_rows(8, 8)), "no refusal");
  EXPECT_EQ(refusal(ask_rows(9, 9)),
            "input 'input' has 9 rows, but model 'sum' takes at most 8 in one request "
            "(max_batch_size); send them in several");
  EXPECT_FALSE(host_->state(0) == model_state::warm) << "a request that is refused loads nothing";
}

TEST_F(a_batching_service, takes_inputs_of_one_size_only) {
  EXPECT_EQ(
      refusal(ask_rows(8, 1)),
      "input 'input' has 8 rows and input 'other' has 1; the first dimension of all inputs of "
      "model 'sum' is its batch, and must be equal");
  EXPECT_EQ(refusal(ask_rows(8, 1, 0)), "no refusal") << "without a batch dimension";
}

TEST_F(a_service, counts_and_times_the_requests_of_each_version) {
  attach();
  EXPECT_EQ(sum_of(ask("sum", "")), 14);
  EXPECT_EQ(sum_of(ask("sum", "2")), 14);
  EXPECT_EQ(sum_of(ask("sum", "1")), 10);
  auto const of = [this](std::string const& model, std::string const& version) {
    return service_.statistics(model, version)["model_stats"];
  };
  EXPECT_EQ(of("", "").size(), 3U);
  ASSERT_EQ(of("sum", "").size(), 2U) << "all its versions";
  ASSERT_EQ(of("sum", "2").size(), 1U);
  auto const second = of("sum", "2")[0];
  EXPECT_EQ(second["version"], "2");
  EXPECT_EQ(second["execution_count"], 2);
  auto const& stats = second["inference_stats"];
  EXPECT_EQ(stats["success"]["count"], 2);
  EXPECT_EQ(stats["queue"]["count"], 2);
  EXPECT_GT(stats["compute_infer"]["ns"], 0);
  EXPECT_GE(
      stats["success"]["ns"].get<std::int64_t>(),
      stats["queue"]["ns"].get<std::int64_t>() + stats["compute_infer"]["ns"].get<std::int64_t>());
  EXPECT_EQ(of("other", "")[0]["execution_count"], 0);
  EXPECT_THROW((void)service_.statistics("nobody", ""), error);
  EXPECT_THROW((void)service_.statistics("sum", "3"), error);
}

TEST(a_service_of_batches, counts_their_samples) {
  auto const pool = std::make_shared<heap_pool>(8);
  auto batched = offer("sum", "1");
  batched.max_batch_size = 8;
  model_service service{{batched, offer("whole", "1")}};
  std::vector<served_model> models;
  models.push_back(serve("sum", "1", 5));
  models.push_back(serve("whole", "1", 5));
  model_host host{host_options{}, pool, std::move(models)};
  service.attach(host, "127.0.0.1:1");
  answers answers;
  for (auto const* const model : {"sum", "whole"}) {
    infer_request request;
    request.model = model;
    request.inputs.push_back(number("input", 0));
    request.inputs[0].shape = {3, 1};
    service.infer(std::move(request), answers.take(0));
  }
  ASSERT_EQ(answers.wait_for(2).size(), 2U);
  EXPECT_EQ(service.statistics("sum", "")["model_stats"][0]["inference_count"], 3);
  EXPECT_EQ(service.statistics("whole", "")["model_stats"][0]["inference_count"], 1);
}

model_entry entry(std::string const& name, std::string const& version) {
  model_entry made;
  made.metadata.name = name;
  made.version = version;
  return made;
}

policy::policy policy_for(std::vector<std::string> const& names) {
  policy::policy wanted;
  wanted.file = "policy.yaml";
  for (auto const& name : names) {
    policy::model_policy model;
    model.name = name;
    model.slo.latency = 50ms;
    wanted.models.push_back(model);
  }
  return wanted;
}

unservable_model onnx() {
  return {"onnx", {error_kind::unsupported, "not TorchScript"}};
}

TEST(choosing_models, takes_all_versions_of_those_that_the_policy_names) {
  auto const chosen =
      choose_models(policy_for({"b", "a"}),
                    {{entry("a", "1"), entry("a", "2"), entry("b", "1"), entry("c", "1")}, {}})
          .served;
  ASSERT_EQ(chosen.size(), 3U);
  EXPECT_EQ(chosen[0].entry.metadata.name, "b");
  EXPECT_EQ(chosen[2].entry.version, "2");
}

TEST(choosing_models, names_every_model_that_is_missing_and_those_that_are_there) {
  try {
    (void)choose_models(policy_for({"a", "x", "y", "onnx"}), {{entry("a", "1")}, {onnx()}});
    FAIL() << "no error";
  } catch (error const& failure) {
    EXPECT_EQ(failure.kind(), error_kind::not_found);
    std::string const text = failure.what();
    EXPECT_NE(text.find("x, y"), std::string::npos) << text;
    EXPECT_NE(text.find("it has a"), std::string::npos) << text;
    EXPECT_NE(text.find("model 'onnx': not TorchScript"), std::string::npos) << text;
  }
}

TEST(choosing_models, goes_on_without_those_that_cannot_be_served) {
  unservable_model const folder{"lost+found", {error_kind::not_found, "no configuration"}};
  auto const choice =
      choose_models(policy_for({"onnx", "a"}), {{entry("a", "1")}, {folder, onnx()}});
  ASSERT_EQ(choice.served.size(), 1U);
  EXPECT_EQ(choice.served[0].entry.metadata.name, "a");
  ASSERT_EQ(choice.unservable.size(), 2U);
  EXPECT_FALSE(choice.unservable[0].is_wanted);
  EXPECT_TRUE(choice.unservable[1].is_wanted);
}

TEST(choosing_models, names_all_reasons_where_none_can_be_served) {
  unservable_model const second{"b", {error_kind::not_found, "no configuration"}};
  try {
    (void)choose_models(policy_for({"onnx", "b"}), {{}, {onnx(), second}});
    FAIL() << "no error";
  } catch (error const& failure) {
    EXPECT_EQ(failure.kind(), error_kind::unsupported);
    EXPECT_STREQ(failure.what(),
                 "no model that policy.yaml names can be served: model 'onnx': not TorchScript; "
                 "model 'b': no configuration");
  }
}

TEST(served_models, keep_their_promise_and_limits_from_the_policy) {
  auto wanted = policy_for({"a"});
  wanted.models[0].slo.percentile = 0.95;
  wanted.models[0].warm = {policy::warm_mode::automatic, 2s, 8s};
  wanted.models[0].on_miss_predicted = policy::miss_action::reject;
  wanted.server.request_timeout = 1500us;
  auto const made = served({entry("a", "1"), wanted.models[0]},
                           std::make_unique<sum_model>(1_MiB, 1, std::make_shared<model_control>()),
                           wanted, memhandover::backend_kind::host);
  EXPECT_EQ(made.scheduling.goal.percentile, 0.95);
  EXPECT_EQ(made.scheduling.goal.latency, 50ms);
  EXPECT_EQ(made.scheduling.limits.min_idle, 2s);
  EXPECT_EQ(made.scheduling.limits.max_idle, 8s);
  EXPECT_TRUE(made.scheduling.reject_on_miss);
  EXPECT_EQ(made.queue_timeout, 2ms) << "rounded up, never to nothing";
  EXPECT_FALSE(made.always_warm);
}

TEST(served_models, are_prewarmed_where_the_policy_leaves_it_to_the_scheduler_when_they_go) {
  auto wanted = policy_for({"a"});
  auto const may_prewarm = [&](policy::warm_policy const& warm) {
    wanted.models[0].warm = warm;
    return served({entry("a", "1"), wanted.models[0]},
                  std::make_unique<sum_model>(1_MiB, 1, std::make_shared<model_control>()), wanted,
                  memhandover::backend_kind::host)
        .scheduling.may_prewarm;
  };
  EXPECT_TRUE(may_prewarm({}));
  EXPECT_FALSE(may_prewarm({.prewarm = false}));
  EXPECT_FALSE(may_prewarm({.mode = policy::warm_mode::fixed}));
  EXPECT_FALSE(may_prewarm({.mode = policy::warm_mode::always}));
  EXPECT_FALSE(scheduling_of(wanted.models[0]).may_prewarm) << "as engines have it";
}

TEST(served_models, have_one_timeout_when_it_is_fixed_and_none_when_they_are_always_warm) {
  auto wanted = policy_for({"a"});
  auto const make = [&](policy::warm_mode mode) {
    wanted.models[0].warm = {mode, 2s, 8s};
    return served({entry("a", "1"), wanted.models[0]},
                  std::make_unique<sum_model>(1_MiB, 1, std::make_shared<model_control>()), wanted,
                  memhandover::backend_kind::cuda);
  };
  auto const fixed = make(policy::warm_mode::fixed);
  EXPECT_EQ(fixed.scheduling.limits.min_idle, 8s);
  EXPECT_EQ(fixed.scheduling.limits.max_idle, 8s);
  auto const always = make(policy::warm_mode::always);
  EXPECT_TRUE(always.always_warm);
  EXPECT_NO_THROW((scheduler::model_controller{always.scheduling, scheduler::instant{}}));
}

TEST(host_options, follow_the_policy) {
  auto wanted = policy_for({"a"});
  EXPECT_EQ(host_options_of(wanted).pause, pause_mode::on_launch);
  EXPECT_EQ(host_options_of(wanted).min_share, 0.05);
  EXPECT_FALSE(host_options_of(wanted).run_ahead);
  wanted.training = {policy::pause_rule::on_cold_start, 3ms, 0.25, 150us};
  auto const made = host_options_of(wanted);
  EXPECT_EQ(made.pause, pause_mode::on_cold_start);
  EXPECT_EQ(made.pause_hysteresis, 3ms);
  EXPECT_EQ(made.min_share, 0.25);
  EXPECT_EQ(made.run_ahead, 150us);
}

TEST(pool_options, refuse_a_share_of_memory_and_name_what_would_be_right) {
  auto wanted = policy_for({"a"});
  wanted.pool.memory = policy::memory_amount{4_GiB, 0.0};
  wanted.pool.backend = policy::pool_backend::host;
  EXPECT_EQ(pool_options_of(wanted).pool_bytes, 4_GiB);
  EXPECT_EQ(pool_options_of(wanted).backend, "host");
  wanted.pool.memory = policy::memory_amount{0, 0.8};
  EXPECT_THROW((void)pool_options_of(wanted), error);
}

}  // namespace
}  // namespace sluice::server::testing
