#include "runtime/policy/policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <ostream>
#include <string>
#include <vector>

namespace sluice::policy {
namespace {

using namespace std::chrono_literals;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// What follows a valid model in the tests of other sections.
constexpr auto valid_model = "version: 1\nmodels: [{name: m, slo: {latency: 1s}}]\n";

std::vector<std::string> complaints(std::string const& text) {
  std::vector<std::string> result;
  try {
    (void)parse(text, "p.yaml");
  } catch (policy_error const& wrong) {
    EXPECT_EQ(wrong.kind(), error_kind::invalid_argument);
    for (auto const& one : wrong.problems()) {
      result.push_back(one.text());
    }
  }
  return result;
}

TEST(policy, every_key_is_read) {
  auto const read = parse(R"(
version: 1
server: {host: 0.0.0.0, port: 9000, max_body: 1MiB, model_repository: models, request_timeout: 5s,
         spare_executor: false, grpc_port: 0,
         max_waiting_bodies: 3MiB, threads: 7, max_connections: 11, parallel_models: 13}
pool: {backend: host, device: 3, memory: 40GiB, chunk: 4MiB}
training: {pause: on_cold_start, pause_hysteresis: 500us, min_share: 20%, run_ahead: 150us,
           allow_mps: true, park: never, stay: 3, resident_share: 75%, resident_window: 20s}
models:
  - name: resnet
    slo: {percentile: 95, latency: 150ms, attainment: 99.9%, window: 1m}
    warm: {mode: auto, min_idle: 2s, max_idle: 20m, prewarm: false}
    on_miss_predicted: reject
    max_queue: 17
  - name: bert
    slo: {percentile: 90%, latency: 1s}
    warm: {mode: always}
scheduler: {tick: 100ms, reserve: 512MiB}
)",
                          "/etc/sluice/p.yaml");
  EXPECT_EQ(read.file, "/etc/sluice/p.yaml");
  EXPECT_EQ(read.server.host, "0.0.0.0");
  EXPECT_EQ(read.server.port, 9000);
  EXPECT_EQ(read.server.grpc_port, 0);
  EXPECT_EQ(read.server.max_body, 1_MiB);
  EXPECT_EQ(read.server.model_repository, "/etc/sluice/models");
  EXPECT_EQ(read.server.request_timeout, 5s);
  EXPECT_FALSE(read.server.spare_executor);
  EXPECT_EQ(read.server.max_waiting_bodies, 3_MiB);
  EXPECT_EQ(read.server.threads, 7U);
  EXPECT_EQ(read.server.max_connections, 11U);
  EXPECT_EQ(read.server.parallel_models, 13U);
  EXPECT_EQ(read.pool.backend, pool_backend::host);
  EXPECT_EQ(read.pool.device, 3);
  ASSERT_TRUE(read.pool.memory);
  EXPECT_EQ(read.pool.memory->bytes, 40_GiB);
  EXPECT_EQ(read.pool.memory->share, 0.0);
  EXPECT_EQ(read.pool.chunk, 4_MiB);
  EXPECT_EQ(read.training.pause, pause_rule::on_cold_start);
  EXPECT_EQ(read.training.pause_hysteresis, 500us);
  EXPECT_DOUBLE_EQ(read.training.min_share, 0.2);
  EXPECT_EQ(read.training.run_ahead, 150us);
  EXPECT_EQ(read.training.park, park_rule::never);
  EXPECT_EQ(read.training.stay, 3U);
  EXPECT_DOUBLE_EQ(read.training.resident_share, 0.75);
  EXPECT_EQ(read.training.resident_window, 20s);
  EXPECT_TRUE(read.training.allow_mps);
  ASSERT_EQ(read.models.size(), 2U);
  EXPECT_EQ(read.models[0].name, "resnet");
  EXPECT_DOUBLE_EQ(read.models[0].slo.percentile, 0.95);
  EXPECT_EQ(read.models[0].slo.latency, 150ms);
  EXPECT_DOUBLE_EQ(read.models[0].slo.attainment, 0.999);
  EXPECT_EQ(read.models[0].slo.window, 1min);
  EXPECT_EQ(read.models[0].warm.mode, warm_mode::automatic);
  EXPECT_EQ(read.models[0].warm.min_idle, 2s);
  EXPECT_EQ(read.models[0].warm.max_idle, 20min);
  EXPECT_FALSE(read.models[0].warm.prewarm);
  EXPECT_EQ(read.models[0].on_miss_predicted, miss_action::reject);
  EXPECT_EQ(read.models[0].max_queue, 17U);
  EXPECT_DOUBLE_EQ(read.models[1].slo.percentile, 0.9);
  EXPECT_EQ(read.models[1].warm.mode, warm_mode::always);
  EXPECT_EQ(read.scheduler.tick, 100ms);
  EXPECT_EQ(read.scheduler.reserve, 512_MiB);
}

TEST(policy, what_is_left_out_takes_its_default) {
  auto const read = parse(valid_model, "p.yaml");
  EXPECT_EQ(read.server.host, "127.0.0.1");
  EXPECT_EQ(read.server.port, 8000);
  EXPECT_FALSE(read.server.grpc_port);
  EXPECT_EQ(read.server.max_body, 64_MiB);
  EXPECT_TRUE(read.server.model_repository.empty());
  EXPECT_EQ(read.server.request_timeout, 30s);
  EXPECT_TRUE(read.server.spare_executor);
  EXPECT_EQ(read.server.max_waiting_bodies, 1_GiB);
  EXPECT_EQ(read.server.threads, 2U);
  EXPECT_EQ(read.server.max_connections, 16'384U);
  EXPECT_EQ(read.server.parallel_models, 4U);
  EXPECT_EQ(read.pool.backend, pool_backend::automatic);
  EXPECT_EQ(read.pool.device, 0);
  EXPECT_FALSE(read.pool.memory);
  EXPECT_FALSE(read.pool.chunk);
  EXPECT_EQ(read.training.pause, pause_rule::on_launch);
  EXPECT_EQ(read.training.pause_hysteresis, 2ms);
  EXPECT_DOUBLE_EQ(read.training.min_share, 0.05);
  EXPECT_FALSE(read.training.run_ahead);
  EXPECT_EQ(read.training.park, park_rule::if_needed);
  EXPECT_EQ(read.training.stay, 10U);
  EXPECT_DOUBLE_EQ(read.training.resident_share, 0.5);
  EXPECT_EQ(read.training.resident_window, 1min);
  EXPECT_FALSE(read.training.allow_mps);
  EXPECT_DOUBLE_EQ(read.models.at(0).slo.percentile, 0.99);
  EXPECT_DOUBLE_EQ(read.models.at(0).slo.attainment, 0.99);
  EXPECT_EQ(read.models.at(0).slo.window, 5min);
  EXPECT_EQ(read.models.at(0).warm.mode, warm_mode::automatic);
  EXPECT_EQ(read.models.at(0).warm.min_idle, 1s);
  EXPECT_EQ(read.models.at(0).warm.max_idle, 10min);
  EXPECT_TRUE(read.models.at(0).warm.prewarm);
  EXPECT_EQ(read.models.at(0).on_miss_predicted, miss_action::queue);
  EXPECT_EQ(read.models.at(0).max_queue, 64U);
  EXPECT_EQ(read.scheduler.tick, 250ms);
  EXPECT_FALSE(read.scheduler.reserve);
}

TEST(policy, auto_is_the_same_as_leaving_out) {
  auto const read =
      parse(std::string{valid_model} +
                "pool: {backend: auto, memory: auto, chunk: auto}\nscheduler: {reserve: auto}\n"
                "training: {run_ahead: auto}\n",
            "p.yaml");
  EXPECT_EQ(read.pool.backend, pool_backend::automatic);
  EXPECT_FALSE(read.pool.memory);
  EXPECT_FALSE(read.pool.chunk);
  EXPECT_FALSE(read.scheduler.reserve);
  EXPECT_FALSE(read.training.run_ahead);
}

TEST(policy, host_copies_have_an_amount_or_none) {
  EXPECT_EQ(parse(valid_model, "p.yaml").host_copies.memory, 0U);
  auto const read = parse(std::string{valid_model} + "host_copies: {memory: 3GiB}\n", "p.yaml");
  EXPECT_EQ(read.host_copies.memory, 3_GiB);
}

TEST(policy, an_engine_stands_in_the_place_of_a_model) {
  auto const read = parse(R"(
version: 1
models:
  - name: chat
    slo: {latency: 2s}
    max_queue: 5
    engine: {command: [python3, server.py, "--port={port}"], ready: /health,
             routes: [/v1/chat/completions, /files/*], api: http, start: at_boot,
             env: {HF_HOME: /srv, EMPTY: ""}, start_timeout: 3m, max_silence: 20s, max_requests: 7,
             kept_connections: 0}
  - name: other
    slo: {latency: 2s}
    engine: {command: [serve, "{socket}"], routes: [/]}
)",
                          "p.yaml");
  ASSERT_EQ(read.models.size(), 2U);
  ASSERT_TRUE(read.models[0].engine && read.models[1].engine);
  auto const& chat = *read.models[0].engine;
  EXPECT_THAT(chat.command, ElementsAre("python3", "server.py", "--port={port}"));
  EXPECT_EQ(chat.ready, "/health");
  EXPECT_THAT(chat.routes, ElementsAre("/v1/chat/completions", "/files/*"));
  EXPECT_EQ(chat.start, engine_start::at_boot);
  EXPECT_EQ(chat.env.at("HF_HOME"), "/srv");
  EXPECT_EQ(chat.env.at("EMPTY"), "");
  EXPECT_EQ(chat.start_timeout, 3min);
  EXPECT_EQ(chat.max_silence, 20s);
  EXPECT_EQ(chat.max_requests, 7U);
  EXPECT_EQ(chat.kept_connections, 0U);
  EXPECT_TRUE(chat.names(port_placeholder));
  EXPECT_FALSE(chat.names(socket_placeholder));
  auto const& other = *read.models[1].engine;
  EXPECT_TRUE(other.ready.empty());
  EXPECT_EQ(other.start, engine_start::on_demand);
  EXPECT_EQ(other.start_timeout, 10min);
  EXPECT_EQ(other.max_silence, 5min);
  EXPECT_EQ(other.max_requests, 1024U);
  EXPECT_EQ(other.kept_connections, 64U);
}

/// The complaints of a policy with that engine, its keys on line 3.
std::vector<std::string> of_engine(std::string const& keys, std::string const& beside = {}) {
  return complaints("version: 1\nmodels: [{name: m, slo: {latency: 1s}" + beside + ", engine:\n{" +
                    keys + "}}]\n");
}

TEST(policy, every_mistake_of_an_engine_has_its_place) {
  struct wrong_engine {
    char const* keys;
    char const* said;
  };
  for (auto const& [keys, said] : {
           wrong_engine{"routes: [/a]", "p.yaml:3:1: models[0].engine.command: is missing"},
           wrong_engine{"command: [x]", "p.yaml:3:1: models[0].engine.routes: is missing"},
           wrong_engine{"command: x, routes: [/a]",
                        "p.yaml:3:11: models[0].engine.command: is \"x\", must be a list of at "
                        "least one text"},
           wrong_engine{"command: [], routes: [/a]", "is an empty list, must be a list"},
           wrong_engine{"command: [x, 8000], routes: [/a]",
                        "p.yaml:3:15: models[0].engine.command[1]: is 8000, which YAML does not "
                        "take for text; put it in quotes"},
           wrong_engine{"command: [x, [y]], routes: [/a]", "must be a single value"},
           wrong_engine{"command: [x], routes: [a]",
                        "p.yaml:3:25: models[0].engine.routes[0]: is \"a\", must be a path"},
           wrong_engine{"command: [x], routes: [/a/../b]", "must not have \".\" or \"..\""},
           wrong_engine{"command: [x], routes: [/a*]", "must be a path"},
           wrong_engine{"command: [x], routes: [/v2/models]", "where the server answers itself"},
           wrong_engine{"command: [x], routes: [/metrics]", "where the server answers itself"},
           wrong_engine{"command: [x], routes: [/a, /a]", "which line 3 has already"},
           wrong_engine{"command: [x], routes: [/a], api: grpc",
                        "models[0].engine.api: is \"grpc\", must be one of http, openai, oip"},
           wrong_engine{"command: [x], routes: [/a], served_names: [b]",
                        "models[0].engine.served_names: has no meaning with api http"},
           wrong_engine{"command: [x], api: openai, served_names: [b, b]",
                        "which line 3 has already"},
           wrong_engine{"command: [x], api: openai, served_names: [m]",
                        "models[0].engine.served_names[0]: is \"m\", which line 2 has already"},
           wrong_engine{"command: [x], api: openai, served_names: [\"\"]",
                        "must be a text of at most"},
           wrong_engine{"command: [x], api: openai, routes: [/v1/*]",
                        "models[0].engine.routes[0]: is \"/v1/*\", where requests are led by"},
           wrong_engine{"command: [x], api: openai, routes: [/v1/models/x]", "give longer paths"},
           wrong_engine{"command: [x], routes: [/a], start: boot", "at_boot, on_demand"},
           wrong_engine{"command: [x], routes: [/a], memory: shared", "pool, own"},
           wrong_engine{"command: [x], routes: [/a], ready: health", "must be a path"},
           wrong_engine{"command: [x], routes: [/a], env: {1A: x}",
                        "models[0].engine.env.1A: is \"1A\", must be the name of a variable"},
           wrong_engine{"command: [x], routes: [/a], env: {A: 1}", "put it in quotes"},
           wrong_engine{"command: [x], routes: [/a], env: {A: a, A: b}", "a second time"},
           wrong_engine{"command: [x], routes: [/a], env: {PORT: \"1\"}",
                        "p.yaml:3:36: models[0].engine.env.PORT: is the server's to choose"},
           wrong_engine{"command: [\"{port}\", \"{socket}\"], routes: [/a]",
                        "an engine listens in one place"},
           wrong_engine{"command: [x], routes: [/a], max_requests: 0", "must be at least 1"},
           wrong_engine{"command: [x], routes: [/a], kept_connections: 5000",
                        "must be at most 4096"},
           wrong_engine{"command: [x], routes: [/a], start_timeout: 1ms", "must be at least 100ms"},
           wrong_engine{"command: [x], routes: [/a], port: 1", "is no known key"},
       }) {
    EXPECT_THAT(of_engine(keys), ElementsAre(HasSubstr(said))) << keys;
  }
  EXPECT_THAT(of_engine("command: [x], routes: [/a], memory: own", ", warm: {mode: always}"),
              ElementsAre(HasSubstr("models[0].warm: has no meaning beside engine.memory own")));
  EXPECT_THAT(
      of_engine("command: [x], routes: [/a], memory: own, kv: pool", ", warm: {mode: always}"),
      ElementsAre());
  EXPECT_THAT(of_engine("command: [x], routes: [/a], env: {SLUICE_VLLM_KV: pool}"),
              ElementsAre(HasSubstr("engine.env.SLUICE_VLLM_KV: is the server's to set")));
  EXPECT_THAT(of_engine("command: [x], routes: [/a]", ", warm: {prewarm: true}"),
              ElementsAre(HasSubstr("models[0].warm.prewarm: has no meaning beside engine")));
  EXPECT_THAT(of_engine("command: [x], routes: [/a]", ", warm: {mode: fixed, min_idle: 1s}"),
              ElementsAre(HasSubstr("models[0].warm.min_idle: has no meaning with mode fixed")));
  for (std::string const key : {"ttft", "tbt"}) {
    auto const of = [&](std::string const& engine) {
      return complaints("version: 1\nmodels: [{name: m, slo: {latency: 1s, " + key + ": 20ms}" +
                        engine + "}]\n");
    };
    auto const refused =
        ElementsAre(HasSubstr("models[0].slo." + key + ": has no meaning but of engines with api"));
    EXPECT_THAT(of(", engine: {command: [x], routes: [/a]}"), refused);
    EXPECT_THAT(of(""), refused);
    EXPECT_THAT(of(", engine: {command: [x], api: openai}"), ElementsAre());
  }
  EXPECT_THAT(of_engine("command: [x], routes: [/a]", ", on_miss_predicted: reject"),
              ElementsAre(HasSubstr("on_miss_predicted: has no meaning beside engine")));
}

TEST(policy, engines_that_are_found_by_their_models_need_no_routes) {
  auto const read = parse(R"(
version: 1
models:
  - {name: a, slo: {latency: 1s}, engine: {command: [x], api: openai, served_names: [org/a, a:7b]}}
  - {name: b, slo: {latency: 1s}, engine: {command: [x], api: openai, routes: [/v1/audio/*, /tokenize]}}
  - {name: c, slo: {latency: 1s}, engine: {command: [x], routes: [/*]}}
)",
                          "p.yaml");
  EXPECT_EQ(read.models[0].engine->api, engine_api::openai);
  EXPECT_THAT(read.models[0].engine->served_names, ElementsAre("org/a", "a:7b"));
  EXPECT_TRUE(read.models[0].engine->routes.empty());
  EXPECT_THAT(complaints(R"(version: 1
models:
  - {name: a, slo: {latency: 1s}, engine: {command: [x], api: openai, served_names: [b]}}
  - {name: b, slo: {latency: 1s}, engine: {command: [x], api: openai}}
)"),
              ElementsAre(HasSubstr("models[0].engine.served_names[0]: is \"b\", which line 4 has "
                                    "already; each name leads to one engine")));
}

TEST(policy, models_of_the_open_inference_protocol_stand_below_one_path) {
  auto const read = parse(R"(
version: 1
models:
  - {name: vision, slo: {latency: 1s}, engine: {command: [x], api: oip, served_names: [resnet, vit.1]}}
  - {name: chat, slo: {latency: 1s}, engine: {command: [x], api: openai, served_names: [resnet]}}
)",
                          "p.yaml");
  EXPECT_EQ(read.models[0].engine->api, engine_api::oip);
  EXPECT_THAT(complaints(R"(version: 1
models:
  - {name: a, slo: {latency: 1s}, engine: {command: [x], api: oip, served_names: [b, org/c, ..]}}
  - {name: b, slo: {latency: 1s}}
)"),
              ElementsAre(HasSubstr("models[0].engine.served_names[0]: is \"b\", which line 4 has"),
                          HasSubstr("served_names[1]: is \"org/c\", must be letters"),
                          HasSubstr("served_names[2]: is \"..\", must be letters")));
}

/// What is said of a policy with `text` behind its model; nothing if it is right.
std::string refusal(std::string const& text) {
  try {
    (void)parse(std::string{valid_model} + text, "p.yaml");
  } catch (policy_error const& why) {
    return why.what();
  }
  return "";
}

TEST(policy, a_share_that_leaves_no_time_to_be_parked_is_refused_with_the_numbers) {
  auto const said = refusal("training: {resident_share: 95%, resident_window: 1s}\n");
  for (auto const* const part : {"p.yaml:3:28: training.resident_share: ", "95%", "is 1s",
                                 "away for 50ms", "at least 100ms"}) {
    EXPECT_NE(said.find(part), std::string::npos) << said;
  }
  EXPECT_NE(refusal("training: {resident_share: 100%}\n").find("away for 0s"), std::string::npos);
  EXPECT_EQ(refusal("training: {resident_share: 100%, park: never}\n"), "");
  EXPECT_EQ(refusal("training: {resident_share: 90%, resident_window: 1s}\n"), "");
  EXPECT_EQ(refusal("training: {resident_share: 0%}\n"), "");
}

TEST(policy, host_copies_that_mean_nothing_are_refused_with_what_would) {
  EXPECT_NE(refusal("pool: {backend: cuda, chunk: 4MiB}\nhost_copies: {memory: 3MiB}\n")
                .find("less than one chunk of 4MiB"),
            std::string::npos);
  EXPECT_EQ(refusal("pool: {backend: host}\nhost_copies: {memory: 3MiB}\n"), "");
  EXPECT_EQ(refusal("pool: {backend: host, chunk: 4MiB}\nhost_copies: {memory: 0B}\n"), "");
  for (auto const& [text, said] : std::map<std::string, std::string>{
           {"disk: 1GiB, disk_path: /none/of/it",
            "p.yaml:3:52: host_copies.disk_path: there is no folder /none/of/it"},
           {"disk: 1GiB", "p.yaml:3:35: host_copies.disk: needs host_copies.disk_path"},
           {"disk_path: /", "host_copies.disk_path: has no meaning without host_copies.disk"}}) {
    EXPECT_NE(refusal("host_copies: {memory: 1GiB, " + text + "}\n").find(said), std::string::npos)
        << refusal("host_copies: {memory: 1GiB, " + text + "}\n");
  }
  EXPECT_NE(refusal("host_copies: {disk: 1GiB, disk_path: /}\n").find("needs host_copies.memory"),
            std::string::npos);
}

TEST(policy, training_may_be_given_no_share_or_all_of_it) {
  auto const share = [](std::string const& text) {
    return parse(std::string{valid_model} + "training: {min_share: " + text + "}\n", "p.yaml")
        .training.min_share;
  };
  EXPECT_DOUBLE_EQ(share("0%"), 0.0);
  EXPECT_DOUBLE_EQ(share("0.5%"), 0.005);
  EXPECT_DOUBLE_EQ(share("100%"), 1.0);
}

TEST(policy, memory_may_be_a_share_of_what_is_free) {
  auto const read = parse(std::string{valid_model} + "pool: {memory: 80%}\n", "p.yaml");
  ASSERT_TRUE(read.pool.memory);
  EXPECT_EQ(read.pool.memory->bytes, 0U);
  EXPECT_DOUBLE_EQ(read.pool.memory->share, 0.8);
}

TEST(policy, windows_line_ends_and_a_byte_order_mark_do_no_harm) {
  EXPECT_THAT(
      complaints("\xef\xbb\xbfversion: 1\r\nmodels:\r\n- {name: m, slo: {latency: 1s}}\r\n"),
      ElementsAre());
}

TEST(policy, anchors_may_share_a_section_between_models) {
  auto const read = parse(
      "version: 1\nmodels:\n- {name: a, slo: &s {latency: 1s}}\n- {name: b, slo: *s}\n", "p.yaml");
  EXPECT_EQ(read.models.at(1).slo.latency, 1s);
}

TEST(policy, all_mistakes_are_told_in_one_pass_in_the_order_of_the_file) {
  EXPECT_THAT(
      complaints(R"(version: 2
sever: {}
server: {host: 5, port: 99999, max_body: 64, model_repository: "", request_timeout: 30}
server: {}
pool:
  backend: cdua
  device: "0"
  memory: 40GB
  chunk: 3000B
  42: x
  [a]: b
training: []
models:
  - nmae: resnet
    slo: {percentile: 0.99, latency: 0ms, attainment: 0.99, window: -5m}
    warm: {mode: fixed, min_idle: 1s, max_idle: 10min}
    on_miss_predicted: quque
  - plain
  - name: a
    slo:
      latency: 150ms
      latency: 150ms
  - name: a
    slo: {latency: 40s, percentile: 101%}
    warm: {min_idle: 20m}
  - name: a/b
    warm:
  - name: true
    slo: {}
scheduler:
  tick: 1ms
  reserve: 99999999999999TiB
  allow: yes
)"),
      ElementsAre(
          "p.yaml:1:10: version: is 2, must be 1, the only one that this sluice knows",
          R"(p.yaml:2:1: sever: is no known key; did you mean "server"?)",
          R"(p.yaml:3:16: server.host: is 5, which YAML does not take for text; put it in quotes: "5")",
          "p.yaml:3:25: server.port: is 99999, must be at most 65535; for example 8000",
          R"(p.yaml:3:42: server.max_body: "64" has no unit; add B, KiB, MiB, GiB or TiB, for example 64MiB)",
          R"(p.yaml:3:64: server.model_repository: is "", must be the path of a folder; for example models)",
          R"(p.yaml:3:85: server.request_timeout: "30" has no unit; add us, ms, s, m or h, for example 200ms)",
          "p.yaml:4:1: server: is given a second time, after line 3; keep one of them",
          R"(p.yaml:6:12: pool.backend: is "cdua", must be one of auto, host, cuda; did you mean "cuda"?)",
          R"(p.yaml:7:11: pool.device: is "0", must be a whole number, without quotes; for example 0)",
          R"(p.yaml:8:11: pool.memory: "40GB" has the unknown unit "GB"; did you mean 40GiB?)",
          "p.yaml:9:10: pool.chunk: is 3000B, must be at least 4KiB; for example 64MiB",
          "p.yaml:10:3: pool.42: is no known key; known are backend, device, memory, chunk",
          "p.yaml:11:3: pool: has a key that is not a word; write `key: value`",
          "p.yaml:12:11: training: is a list, must be a section of keys; for example {pause: "
          "on_launch}",
          "p.yaml:14:5: models[0].name: is missing; add `name: resnet50`",
          R"(p.yaml:14:5: models[0].nmae: is no known key; did you mean "name"?)",
          "p.yaml:15:23: models[0].slo.percentile: is 0.99%, must be at least 1%; for example 99%",
          "p.yaml:15:38: models[0].slo.latency: is 0s, must be at least 1us; for example 150ms",
          R"(p.yaml:15:55: models[0].slo.attainment: "0.99" has no unit; add %, for example 99%)",
          R"(p.yaml:15:69: models[0].slo.window: "-5m" is not a duration; write a number and a unit, for example 200ms)",
          "p.yaml:16:35: models[0].warm.min_idle: has no meaning with mode fixed; max_idle is the "
          "timeout",
          R"(p.yaml:16:49: models[0].warm.max_idle: "10min" has the unknown unit "min"; did you mean 10m?)",
          R"(p.yaml:17:24: models[0].on_miss_predicted: is "quque", must be one of queue, reject; did you mean "queue"?)",
          R"(p.yaml:18:5: models[1]: is "plain", must be a section of keys)",
          "p.yaml:22:7: models[2].slo.latency: is given a second time, after line 21; keep one of "
          "them",
          R"(p.yaml:23:11: models[3].name: is "a", which line 19 has already; each model stands once)",
          "p.yaml:24:20: models[3].slo.latency: is 40s, longer than server.request_timeout, which "
          "is 30s; "
          "lower it or raise the timeout",
          "p.yaml:24:37: models[3].slo.percentile: is 101%, must be at most 100%; for example 99%",
          "p.yaml:25:22: models[3].warm.min_idle: min_idle is 20m and max_idle is 10m; min_idle "
          "must not "
          "be the longer one",
          "p.yaml:26:5: models[4].slo: is missing; add `slo: {latency: 150ms}`",
          R"(p.yaml:26:11: models[4].name: is "a/b", must be letters, digits, "_", "-" and ".", not beginning with "-" or ".", as the model's folder is called; for example resnet50)",
          "p.yaml:27:5: models[4].warm: is empty, must be a section of keys; for example {mode: "
          "auto}",
          R"(p.yaml:28:11: models[5].name: is true, which YAML does not take for text; put it in quotes: "true")",
          "p.yaml:29:10: models[5].slo.latency: is missing; add `latency: 150ms`",
          "p.yaml:31:9: scheduler.tick: is 1ms, must be at least 10ms; for example 250ms",
          R"(p.yaml:32:12: scheduler.reserve: "99999999999999TiB" is too large to be an amount of memory; write less, for example 64MiB)",
          "p.yaml:33:3: scheduler.allow: is no known key; known are tick, reserve"));
}

struct mistake {
  char const* about;
  std::string text;
  char const* message;
};

void PrintTo(mistake const& instance, std::ostream* to) {
  *to << instance.about;
}

std::string about(testing::TestParamInfo<mistake> const& instance) {
  return instance.param.about;
}

class single_mistake : public testing::TestWithParam<mistake> {};

TEST_P(single_mistake, is_told_with_its_place_and_what_would_be_right) {
  EXPECT_THAT(complaints(GetParam().text), ElementsAre(GetParam().message));
}

std::string with(std::string const& section) {
  return valid_model + section + "\n";
}

INSTANTIATE_TEST_SUITE_P(
    between_keys, single_mistake,
    testing::Values(
        mistake{"chunk_granularity_host", with("pool: {chunk: 6000B}"),
                "p.yaml:3:15: pool.chunk: is 6000B, must be a multiple of 4KiB; for example 8KiB"},
        mistake{"chunk_granularity_cuda", with("pool: {backend: cuda, chunk: 3MiB}"),
                "p.yaml:3:30: pool.chunk: is 3MiB, must be a multiple of 2MiB; for example 4MiB"},
        mistake{
            "memory_below_a_chunk", with("pool: {memory: 8MiB, chunk: 64MiB}"),
            "p.yaml:3:16: pool.memory: is 8MiB, less than one chunk of 64MiB; give at least 64MiB"},
        mistake{"memory_share_above_all", with("pool: {memory: 120%}"),
                "p.yaml:3:16: pool.memory: is 120%, must be at most 100%; for example 40GiB"},
        mistake{"reserve_is_the_pool", with("pool: {memory: 1GiB}\nscheduler: {reserve: 1GiB}"),
                "p.yaml:4:22: scheduler.reserve: is 1GiB, must be less than pool.memory, which is "
                "1GiB"},
        mistake{"max_idle_below_default_min_idle",
                "version: 1\nmodels: [{name: m, slo: {latency: 1s}, warm: {max_idle: 10ms}}]",
                "p.yaml:2:57: models[0].warm.max_idle: min_idle is 1s and max_idle is 10ms; "
                "min_idle must "
                "not be the longer one"},
        mistake{"max_idle_of_always",
                "version: 1\nmodels: [{name: m, slo: {latency: 1s}, warm: {mode: always, max_idle: "
                "1m}}]",
                "p.yaml:2:71: models[0].warm.max_idle: has no meaning with mode always; remove it"},
        mistake{"prewarm_of_always",
                "version: 1\nmodels: [{name: m, slo: {latency: 1s}, warm: {mode: always, prewarm: "
                "true}}]",
                "p.yaml:2:70: models[0].warm.prewarm: has no meaning with mode always; remove it"},
        mistake{"prewarm_of_fixed",
                "version: 1\nmodels: [{name: m, slo: {latency: 1s}, warm: {mode: fixed, prewarm: "
                "false}}]",
                "p.yaml:2:69: models[0].warm.prewarm: has no meaning with mode fixed; mode auto "
                "has it"}),
    about);

INSTANTIATE_TEST_SUITE_P(
    values, single_mistake,
    testing::Values(
        mistake{
            "boolean_of_another_dialect", with("training: {allow_mps: yes}"),
            R"(p.yaml:3:23: training.allow_mps: is "yes", must be true or false, without quotes)"},
        mistake{
            "boolean_in_quotes", with("training: {allow_mps: \"true\"}"),
            R"(p.yaml:3:23: training.allow_mps: is "true", must be true or false, without quotes)"},
        mistake{
            "port_with_a_fraction", with("server: {port: 80.5}"),
            R"(p.yaml:3:16: server.port: is "80.5", must be a whole number, without quotes; for example 8000)"},
        mistake{"port_of_both_kinds", with("server: {grpc_port: 8000}"),
                "p.yaml:3:21: server.grpc_port: is 8000, as server.port; gRPC and HTTP take a port "
                "each"},
        mistake{"port_for_grpc_below_zero", with("server: {grpc_port: -1}"),
                "p.yaml:3:21: server.grpc_port: is -1, must be at least 0; for example 8001"},
        mistake{"port_below_zero", with("server: {port: -1}"),
                "p.yaml:3:16: server.port: is -1, must be at least 0; for example 8000"},
        mistake{
            "port_beyond_any_integer", with("server: {port: 99999999999999999999}"),
            R"(p.yaml:3:16: server.port: is "99999999999999999999", must be a whole number, without quotes; for example 8000)"},
        mistake{"empty_value", with("server:\n  port:"),
                "p.yaml:4:3: server.port: is empty, must be a single value; for example 8000"},
        mistake{"section_for_a_value", with("server: {port: {a: 1}}"),
                "p.yaml:3:16: server.port: is a section, must be a single value; for example 8000"},
        mistake{
            "value_for_a_section", with("server: 8000"),
            R"(p.yaml:3:9: server: is "8000", must be a section of keys; for example {port: 8000})"},
        mistake{
            "host_with_a_path", with("server: {host: http://x}"),
            R"(p.yaml:3:16: server.host: is "http://x", must be an IP address, or localhost; for example 127.0.0.1)"},
        mistake{
            "host_by_name", with("server: {host: example.com}"),
            R"(p.yaml:3:16: server.host: is "example.com", must be an IP address, or localhost; for example 127.0.0.1)"},
        mistake{
            "other_case", with("training: {pause: Never}"),
            R"(p.yaml:3:19: training.pause: is "Never", must be one of on_launch, on_request, on_cold_start, never; did you mean "never"?)"},
        mistake{
            "hysteresis_too_long", with("training: {pause_hysteresis: 1m}"),
            "p.yaml:3:30: training.pause_hysteresis: is 1m, must be at most 1s; for example 2ms"},
        mistake{"min_share_above_all", with("training: {min_share: 101%}"),
                "p.yaml:3:23: training.min_share: is 101%, must be at most 100%; for example 5%"},
        mistake{"min_share_as_a_fraction", with("training: {min_share: 0.2}"),
                R"(p.yaml:3:23: training.min_share: "0.2" has no unit; add %, for example 99%)"},
        mistake{"park_that_is_none", with("training: {park: always}"),
                R"(p.yaml:3:18: training.park: is "always", must be one of never, if_needed)"},
        mistake{"no_stay", with("training: {stay: 0}"),
                "p.yaml:3:18: training.stay: is 0, must be at least 1; for example 10"},
        mistake{
            "resident_share_above_all", with("training: {resident_share: 101%}"),
            "p.yaml:3:28: training.resident_share: is 101%, must be at most 100%; for example 50%"},
        mistake{
            "resident_window_too_short", with("training: {resident_window: 10ms}"),
            "p.yaml:3:29: training.resident_window: is 10ms, must be at least 1s; for example 1m"},
        mistake{"no_run_ahead", with("training: {run_ahead: 0us}"),
                "p.yaml:3:23: training.run_ahead: is 0s, must be at least 1us; for example 200us"},
        mistake{"run_ahead_too_long", with("training: {run_ahead: 2s}"),
                "p.yaml:3:23: training.run_ahead: is 2s, must be at most 1s; for example 200us"},
        mistake{
            "run_ahead_without_a_unit", with("training: {run_ahead: 200}"),
            R"(p.yaml:3:23: training.run_ahead: "200" has no unit; add us, ms, s, m or h, for example 200ms)"},
        mistake{"no_models", "version: 1\nmodels: []\n",
                "p.yaml:2:9: models: is an empty list, must be a list of at least one section; for "
                "example "
                "[{name: resnet50, slo: {latency: 150ms}}]"},
        mistake{
            "models_as_a_section", "version: 1\nmodels: {a: b}\n",
            "p.yaml:2:9: models: is a section, must be a list of at least one section; for example "
            "[{name: resnet50, slo: {latency: 150ms}}]"},
        mistake{"no_version", "models: [{name: m, slo: {latency: 1s}}]\n",
                "p.yaml:1:1: version: is missing; add `version: 1`"}),
    about);

INSTANTIATE_TEST_SUITE_P(
    whole_files, single_mistake,
    testing::Values(
        mistake{
            "empty", "",
            "p.yaml:1:1: the file is empty; a policy needs at least `version: 1` and `models:`"},
        mistake{
            "only_a_comment", "# nothing\n",
            "p.yaml:1:1: the file is empty; a policy needs at least `version: 1` and `models:`"},
        mistake{
            "a_word", "hello\n",
            "p.yaml:1:1: this is not a policy; it must consist of keys, the first `version: 1`"},
        mistake{
            "a_list", "- version: 1\n",
            "p.yaml:1:1: this is not a policy; it must consist of keys, the first `version: 1`"},
        mistake{"two_documents", with("---\nversion: 1"),
                "p.yaml:3:1: a second document begins here; a policy is one document"},
        mistake{"unclosed_bracket", "version: 1\nmodels: [a\n",
                "p.yaml:3:1: this is not valid YAML: end of sequence flow not found"},
        mistake{"tab_as_indentation", "version: 1\n\tmodels: []\n",
                "p.yaml:2:1: this is not valid YAML: illegal tab when looking for indentation"}),
    about);

TEST(policy, a_comma_outside_of_a_list_is_a_mistake_and_not_read_for_ever) {
  for (auto const* const text : {",", "1, models: []\n", "version: 1\n---\n,\n"}) {
    EXPECT_THAT(complaints(text), testing::Not(testing::IsEmpty())) << text;
  }
}

TEST(policy, a_reference_to_nothing_is_told_with_its_place) {
  // Newer releases of yaml-cpp name it, too.
  EXPECT_THAT(
      complaints("version: *one\n"),
      ElementsAre(
          AnyOf("p.yaml:1:10: this is not valid YAML: the referenced anchor is not defined",
                "p.yaml:1:10: this is not valid YAML: the referenced anchor is not defined: one")));
}

TEST(policy, deep_nesting_is_refused_instead_of_exhausting_the_stack) {
  for (auto const& nested : {std::string(100'000, '['), "a: " + std::string(100'000, '{')}) {
    EXPECT_THAT(complaints(nested), ElementsAre(HasSubstr("nested too deeply")));
  }
}

TEST(policy, a_list_that_contains_itself_is_told_not_followed) {
  EXPECT_THAT(complaints("version: 1\nmodels: &m\n - *m\n"),
              ElementsAre("p.yaml:2:9: models[0]: is a list, must be a section of keys"));
}

class policy_file : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("policy-test-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path write(std::string const& text) {
    auto const file = folder_ / "p.yaml";
    std::ofstream{file, std::ios::binary} << text;
    return file;
  }

  static std::pair<error_kind, std::string> refusal(std::filesystem::path const& file) {
    try {
      (void)load(file);
    } catch (policy_error const& wrong) {
      return {wrong.kind(), wrong.what()};
    }
    return {error_kind::internal, "was accepted"};
  }

  std::filesystem::path folder_;
};

TEST_F(policy_file, relative_repository_lies_beside_the_file) {
  auto const file =
      write(std::string{valid_model} +
            "server: {model_repository: ../models, token_file: tokens, access_log: stderr}\n");
  EXPECT_EQ(load(file).server.model_repository, folder_.parent_path() / "models");
  EXPECT_EQ(load(file).server.token_file, folder_ / "tokens");
  EXPECT_EQ(load(file).server.access_log, "stderr");
  EXPECT_EQ(
      load(write(std::string{valid_model} + "server: {access_log: a.log}\n")).server.access_log,
      folder_ / "a.log");
}

TEST_F(policy_file, that_is_missing_is_told_as_not_found) {
  auto const file = folder_ / "none.yaml";
  auto const [kind, text] = refusal(file);
  EXPECT_EQ(kind, error_kind::not_found);
  EXPECT_EQ(text, file.string() + ":1:1: there is no such file; give the path of a policy file");
}

TEST_F(policy_file, that_is_a_folder_is_told_so) {
  auto const [kind, text] = refusal(folder_);
  EXPECT_EQ(kind, error_kind::invalid_argument);
  EXPECT_EQ(text, folder_.string() + ":1:1: this is a folder; give the path of a policy file");
}

TEST_F(policy_file, that_never_ends_is_refused) {
  EXPECT_EQ(
      refusal("/dev/zero").second,
      "/dev/zero:1:1: is larger than 1MiB, so it is no policy; give the path of a policy file");
}

TEST(policy, two_differ_in_the_keys_whose_values_do) {
  auto const with = [](std::string const& more) {
    return parse("version: 1\n" + more + "models: [{name: a, slo: {latency: 50ms}}]\n",
                 "/x/policy.yaml");
  };
  auto const plain = with("");
  EXPECT_TRUE(differing_keys(plain, with("server: {port: 8000}\n")).empty()) << "the default";
  EXPECT_EQ(differing_keys(plain, with("server: {port: 1}\npool: {chunk: 4MiB, memory: 1GiB}\n")),
            (std::vector<std::string>{"pool.chunk", "pool.memory", "server.port"}));
  EXPECT_EQ(differing_keys(with("server: {tls: {certificate_file: a, key_file: b}}\n"), plain),
            (std::vector<std::string>{"server.tls.certificate_file", "server.tls.key_file"}));
  EXPECT_EQ(differing_keys(plain, with("training: {min_share: 20%, pause: never}\n")),
            (std::vector<std::string>{"training.min_share", "training.pause"}));
  EXPECT_EQ(differing_keys(plain, with("server: {grpc_port: 0}\n")),
            (std::vector<std::string>{"server.grpc_port"}));
  auto other = plain;
  other.models.clear();
  EXPECT_TRUE(differing_keys(plain, other).empty()) << "models are not compared";
}

}  // namespace
}  // namespace sluice::policy
