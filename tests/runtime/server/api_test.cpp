#include "runtime/server/http/api.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <string>
#include <variant>

#include "runtime/telemetry/error_table.hpp"
#include "tests/runtime/server/adding_service.hpp"

namespace sluice::server {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using testing::HasSubstr;

class api : public testing::Test {
 protected:
  http_reply reply_to(http_request const& request) {
    auto outcome = api_.handle(request);
    if (!std::holds_alternative<http_reply>(outcome)) return {0, "an infer request", {}};
    return std::get<http_reply>(outcome);
  }
  http_reply get(std::string const& target) { return reply_to({"GET", target, {}, {}, {}}); }
  json ok(std::string const& target) {
    auto const answer = get(target);
    EXPECT_EQ(answer.status, 200U) << target << ' ' << answer.body;
    return json::parse(answer.body);
  }
  static std::string error_in(http_reply const& answer) {
    return json::parse(answer.body).at("error").get<std::string>();
  }

  adding_service service_;
  oip_api api_{service_};
};

TEST_F(api, describes_the_server_and_its_models) {
  EXPECT_EQ(ok("/v2")["name"], "sluice");
  EXPECT_EQ(ok("/v2")["extensions"],
            json::array({"model_configuration", "statistics", "binary_tensor_data", "logging",
                         "model_repository"}));
  EXPECT_EQ(ok("/v2/health/live"), (json{{"live", true}}));
  EXPECT_EQ(ok("/v2/health/ready"), (json{{"ready", true}}));
  EXPECT_EQ(ok("/v2/models/add")["inputs"][0]["name"], "a");
  EXPECT_EQ(ok("/v2/models/add/versions/1")["versions"], json::array({"1"}));
  EXPECT_EQ(ok("/v2/models/a%2Fb%20%C3%A9")["name"], "a/b \xC3\xA9");
  EXPECT_EQ(ok("/v2/models/add/config"), (json{{"name", "add"}}));
  EXPECT_EQ(ok("/v2/sluice/status"), (json{{"state", "adding"}}));
  EXPECT_EQ(ok("/v2/models/stats"), (json{{"of", ""}, {"version", ""}}));
  EXPECT_EQ(ok("/v2/models/add/stats"), (json{{"of", "add"}, {"version", ""}}));
  EXPECT_EQ(ok("/v2/models/add/versions/1/stats"), (json{{"of", "add"}, {"version", "1"}}));
}

TEST_F(api, metrics_are_no_json_and_say_so) {
  auto const answer = get("/metrics");
  EXPECT_EQ(answer.status, 200U);
  EXPECT_EQ(answer.body, "adding 1\n");
  EXPECT_EQ(answer.content_type, "text/plain; version=0.0.4; charset=utf-8");
  EXPECT_EQ(get("/v2").content_type, "application/json");
  EXPECT_TRUE(oip_api::may_wait({"GET", "/metrics", {}, {}, {}}));
  EXPECT_EQ(reply_to({"POST", "/metrics", {}, {}, {}}).status, 405U);
}

TEST_F(api, what_is_not_ready_is_503_with_a_body_of_its_kind_and_a_reason) {
  service_.set_ready({false, "its executor is starting", 2100ms});
  auto const server = get("/v2/health/ready");
  EXPECT_EQ(server.status, 503U);
  EXPECT_EQ(server.retry_after, 3s);
  EXPECT_EQ(json::parse(server.body),
            (json{{"ready", false}, {"error", "its executor is starting"}}));

  EXPECT_EQ(ok("/v2/models/add/ready"), (json{{"name", "add"}, {"ready", true}}));
  auto const cold = get("/v2/models/cold/versions/1/ready");
  EXPECT_EQ(cold.status, 503U);
  EXPECT_EQ(json::parse(cold.body)["name"], "cold");
  EXPECT_EQ(json::parse(cold.body)["ready"], false);
  EXPECT_THAT(error_in(cold), HasSubstr("cold; an infer request loads it"));
  EXPECT_EQ(cold.retry_after, 1s);
}

TEST_F(api, a_failed_model_is_not_called_cold) {
  service_.set_cold(
      {false, "failed: it has ended its process; it is tried again in 7.2 s", 7200ms});
  auto const failed = get("/v2/models/cold/ready");
  EXPECT_EQ(failed.status, 503U);
  EXPECT_EQ(failed.retry_after, 8s);
  EXPECT_EQ(
      error_in(failed),
      "model 'cold' is not ready: failed: it has ended its process; it is tried again in 7.2 s");
  auto const index = reply_to({"POST", "/v2/repository/index", "", {}, {}});
  EXPECT_EQ(json::parse(index.body)[1]["state"], "UNAVAILABLE");
  EXPECT_THAT(json::parse(index.body)[1]["reason"].get<std::string>(), HasSubstr("failed: it has"));
}

TEST_F(api, an_error_that_knows_its_end_says_when_to_come_again) {
  auto const after = [](error_kind kind, std::optional<std::chrono::milliseconds> known) {
    return oip_api::answer(error{kind, "", known}).retry_after;
  };
  EXPECT_EQ(after(error_kind::unavailable, 4001ms), 5s);
  EXPECT_EQ(after(error_kind::unavailable, 4000ms), 4s);
  EXPECT_EQ(after(error_kind::out_of_memory, 1500ms), 2s);
  EXPECT_EQ(after(error_kind::unavailable, 0ms), 1s) << "not at once";
  EXPECT_EQ(after(error_kind::unavailable, std::nullopt), 1s);
  EXPECT_EQ(after(error_kind::deadline_exceeded, 4s), 0s) << "it is not 503";
}

TEST_F(api, the_index_tells_cold_models_from_warm_ones) {
  auto const index = [&](std::string const& body) {
    return reply_to({"POST", "/v2/repository/index", body, {}, {}});
  };
  auto const all = json::parse(R"([{"name":"add","version":"1","state":"READY","reason":""},
                                   {"name":"cold","version":"1","state":"UNAVAILABLE","reason":"cold"}])");
  EXPECT_EQ(json::parse(index("").body), all);
  EXPECT_EQ(json::parse(index("{}").body), all);
  EXPECT_EQ(json::parse(index(R"({"ready":false})").body), all);
  EXPECT_EQ(json::parse(index(R"({"ready":true})").body), json::array({all[0]}));
  service_.set_unservable({{"onnx", {error_kind::unsupported, "not TorchScript"}}});
  EXPECT_EQ(json::parse(index("").body)[2],
            (json{{"name", "onnx"}, {"state", "UNAVAILABLE"}, {"reason", "not TorchScript"}}));
  EXPECT_EQ(json::parse(index(R"({"ready":true})").body), json::array({all[0]}));
  for (std::string const& bad : {std::string{"["}, std::string{"[]"}, std::string{R"({"ready":1})"},
                                 std::string(10'000, '[')}) {
    EXPECT_EQ(index(bad).status, 400U) << bad.substr(0, 20);
  }
}

TEST_F(api, an_infer_request_goes_to_the_service) {
  auto const outcome =
      api_.handle({"POST",
                   "/v2/models/add/versions/1/infer",
                   R"({"id":"7","inputs":[{"name":"a","datatype":"FP32","shape":[1],"data":[1]},
                                       {"name":"b","datatype":"FP32","shape":[1],"data":[2]}]})",
                   {},
                   {}});
  ASSERT_TRUE(std::holds_alternative<decoded_request>(outcome));
  auto const& request = std::get<decoded_request>(outcome);
  EXPECT_EQ(request.model, "add");
  EXPECT_EQ(request.version, "1");
  EXPECT_EQ(request.id, "7");
}

TEST_F(api, its_log_is_set_as_triton_s_is) {
  auto const before = spdlog::get_level();
  auto const set = [&](std::string const& settings) {
    auto const answer = reply_to({"POST", "/v2/logging", settings, {}, {}});
    EXPECT_EQ(answer.status, 200U) << answer.body;
    EXPECT_EQ(json::parse(answer.body), ok("/v2/logging"));
    return json::parse(answer.body);
  };
  auto const verbose = set(R"({"log_verbose_level":1,"log_info":true})");
  EXPECT_EQ(verbose, (json{{"log_file", ""},
                           {"log_info", true},
                           {"log_warning", true},
                           {"log_error", true},
                           {"log_verbose_level", 1},
                           {"log_format", "default"}}));
  EXPECT_EQ(spdlog::get_level(), spdlog::level::debug);
  EXPECT_EQ(set("{}"), verbose);
  EXPECT_EQ(set(R"({"log_verbose_level":7})")["log_verbose_level"], 2);
  EXPECT_EQ(spdlog::get_level(), spdlog::level::trace);
  set(R"({"log_verbose_level":0,"log_file":"","log_format":"default"})");
  EXPECT_EQ(spdlog::get_level(), spdlog::level::info);
  EXPECT_EQ(set(R"({"log_info":false})")["log_warning"], true);
  EXPECT_EQ(spdlog::get_level(), spdlog::level::warn);
  set(R"({"log_warning":false})");
  EXPECT_EQ(spdlog::get_level(), spdlog::level::err);
  EXPECT_EQ(set(R"({"log_error":false})")["log_error"], false);
  EXPECT_EQ(spdlog::get_level(), spdlog::level::off);
  spdlog::set_level(before);
}

TEST_F(api, it_traces_nothing_and_says_so) {
  for (auto const* const target : {"/v2/trace/setting", "/v2/models/add/trace/setting"}) {
    EXPECT_EQ(ok(target)["trace_level"], json::array({"OFF"}));
    auto const same =
        reply_to({"POST", target, R"({"trace_level":["OFF"],"trace_file":null})", {}, {}});
    EXPECT_EQ(json::parse(same.body), ok(target)) << target;
  }
}

TEST_F(api, wrong_requests_have_their_status_and_say_why) {
  struct row {
    http_request request;
    unsigned status;
    std::string says;
  };
  std::vector<row> const rows{
      {{"GET", "/", {}, {}, {}}, 404, "/v2"},
      {{"GET", "/v2/models/none", {}, {}, {}}, 404, "'none'"},
      {{"GET", "/v2/models/add/versions/9", {}, {}, {}}, 404, "version '9'"},
      {{"GET", "/v2/models/none/ready", {}, {}, {}}, 404, "'none'"},
      {{"GET", "/v2/models/none/config", {}, {}, {}}, 404, "'none'"},
      {{"POST", "/v2/models/none/infer", "{}", {}, {}}, 404, "'none'"},
      {{"GET", "/v2/models/%zz", {}, {}, {}}, 400, "percent"},
      {{"POST", "/v2/models/add/infer", "{", {}, {}}, 400, "JSON"},
      {{"POST", "/v2/models/add/infer", "{}", "br", {}}, 415, "'br'"},
      {{"POST", "/v2/models/add/infer", "{}", {}, "12"}, 400, "the body has 2 bytes"},
      {{"POST", "/v2/models/add/infer", "{}", {}, "x"}, 400, "Inference-Header-Content-Length"},
      {{"POST", "/v2/models/add/infer", "{}", {}, ""}, 400, "Inference-Header-Content-Length"},
      {{"POST", "/v2/repository/models/add/load", "{}", {}, {}}, 501, "its policy"},
      {{"POST", "/v2/repository/models/add/unload", "", {}, {}}, 501, "its policy"},
      {{"POST", "/v2/repository/models/add/load", "[]", {}, {}}, 400, "parameters"},
      {{"POST", "/v2/repository/models/add/load", R"({"parameters": 3})", {}, {}},
       400,
       "parameters"},
      {{"GET", "/v2/models/none/stats", {}, {}, {}}, 404, "'none'"},
      {{"POST", "/v2/models/stats", "{}", {}, {}}, 405, "GET"},
      {{"GET", "/v2/models/none/trace/setting", {}, {}, {}}, 404, "'none'"},
      {{"POST", "/v2/models/add/trace/setting", R"({"trace_level":["TIMESTAMPS"]})", {}, {}},
       501,
       "'trace_level'"},
      {{"POST", "/v2/trace/setting", R"({"trace_rate":"1"})", {}, {}}, 501, "'trace_rate'"},
      {{"POST", "/v2/trace/setting", R"({"rate":"1"})", {}, {}}, 400, "'rate'"},
      {{"POST", "/v2/logging", "[]", {}, {}}, 400, "an object"},
      {{"POST", "/v2/logging", "{", {}, {}}, 400, "an object"},
      {{"POST", "/v2/logging", R"({"log_inform":true})", {}, {}}, 400, "log_info, "},
      {{"POST", "/v2/logging", R"({"log_info":1})", {}, {}}, 400, "true or false"},
      {{"POST", "/v2/logging", R"({"log_verbose_level":-1})", {}, {}}, 400, "at least 0"},
      {{"POST", "/v2/logging", R"({"log_file":"/tmp/x"})", {}, {}}, 501, "standard error"},
      {{"POST", "/v2/logging", R"({"log_format":"ISO8601"})", {}, {}}, 501, "one format"},
      {{"POST", "/v2/logging", R"({"log_warning":false})", {}, {}}, 501, "levels"},
      {{"DELETE", "/v2/logging", {}, {}, {}}, 405, "GET, HEAD, POST"},
  };
  for (auto const& each : rows) {
    auto const answer = reply_to(each.request);
    EXPECT_EQ(answer.status, each.status) << each.request.target;
    EXPECT_THAT(error_in(answer), HasSubstr(each.says)) << each.request.target;
  }
  EXPECT_EQ(reply_to({"POST", "/v2/models/add/infer", "{}", "Identity", {}}).status,
            400U);  // goes on to the body
}

TEST_F(api, wrong_verbs_are_405_with_the_right_ones) {
  for (auto const* const method : {"POST", "PUT", "DELETE", "OPTIONS", "get", "X"}) {
    auto const answer = reply_to({method, "/v2", {}, {}, {}});
    EXPECT_EQ(answer.status, 405U) << method;
    EXPECT_EQ(answer.allow, "GET, HEAD") << method;
  }
  for (auto const* const method : {"GET", "HEAD", "PUT"}) {
    auto const answer = reply_to({method, "/v2/models/add/infer", {}, {}, {}});
    EXPECT_EQ(answer.status, 405U) << method;
    EXPECT_EQ(answer.allow, "POST") << method;
  }
}

TEST_F(api, a_request_that_cannot_succeed_is_refused_without_its_body) {
  EXPECT_FALSE(api_.refuse({"POST", "/v2/models/add/infer", {}, {}, {}}).has_value());
  EXPECT_EQ(api_.refuse({"POST", "/v2/models/none/infer", {}, {}, {}})->status, 404U);
  EXPECT_EQ(api_.refuse({"PUT", "/v2/models/add/infer", {}, {}, {}})->status, 405U);
  EXPECT_FALSE(api_.refuse({"POST", "/v2/models/add/infer", {}, {}, "5"}).has_value());
  EXPECT_EQ(api_.refuse({"POST", "/v2/models/add/infer", {}, {}, "five"})->status, 400U);
}

TEST_F(api, errors_keep_their_words_except_for_bugs) {
  for (int i = 0; i <= static_cast<int>(error_kind::internal); ++i) {
    auto const kind = static_cast<error_kind>(i);
    auto const answer = oip_api::answer(error{kind, "the words"});
    EXPECT_EQ(answer.status, static_cast<unsigned>(telemetry::http_status(kind)));
    EXPECT_EQ(answer.retry_after.count() > 0, answer.status == 503 || answer.status == 429);
    if (kind == error_kind::internal) {
      EXPECT_THAT(error_in(answer), testing::Not(HasSubstr("the words")));
    } else {
      EXPECT_EQ(error_in(answer), "the words");
    }
  }
  EXPECT_EQ(oip_api::answer(error{error_kind::unavailable, ""}).status, 503U);
  EXPECT_EQ(oip_api::answer(error{error_kind::deadline_exceeded, ""}).status, 504U);
  EXPECT_EQ(oip_api::answer(error{error_kind::internal, ""}).status, 500U);
}

TEST_F(api, a_bug_that_comes_at_each_request_is_logged_once) {
  testing::internal::CaptureStdout();  // spdlog's own logger
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(oip_api::answer(error{error_kind::internal, "a bug of this test"}).status, 500U);
  }
  auto const said = testing::internal::GetCapturedStdout();
  EXPECT_THAT(said, HasSubstr("a bug of this test"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(api, an_answer_that_cannot_be_encoded_is_an_error) {
  infer_response broken{"m", "1", "", {{"y", datatype::fp32, {2}, {}}}};
  EXPECT_EQ(oip_api::answer(broken).status, 500U);
}

}  // namespace
}  // namespace sluice::server
