#include "runtime/server/http/openai_form.hpp"

#include <gtest/gtest.h>

namespace sluice::server {
namespace {

using nlohmann::json;

json error_of(http_reply const& reply) {
  return json::parse(reply.body).at("error");
}

TEST(openai_form, a_path_is_of_all_models_of_one_or_of_the_one_that_the_body_names) {
  EXPECT_EQ(openai_resource_of("/v1/models").is, openai_resource::kind::models);
  EXPECT_EQ(openai_resource_of("/v1/models/?limit=1").is, openai_resource::kind::models);
  for (auto const* const target : {"/v1/models/org%2Fname", "/v1/models/org/name"}) {
    auto const found = openai_resource_of(target);
    EXPECT_EQ(found.is, openai_resource::kind::one_model);
    EXPECT_EQ(found.model, "org/name");
  }
  for (auto const* const target : {"/v1/chat/completions", "/v1/responses", "/v1/x/models"}) {
    EXPECT_EQ(openai_resource_of(target).is, openai_resource::kind::of_a_model) << target;
  }
}

TEST(openai_form, an_error_has_the_four_fields) {
  auto const reply = openai_failure(400, "say \"model\"", {.param = "model"});
  EXPECT_EQ(reply.status, 400U);
  EXPECT_EQ(error_of(reply), (json{{"message", "say \"model\""},
                                   {"type", "invalid_request_error"},
                                   {"param", "model"},
                                   {"code", nullptr}}));
  EXPECT_EQ(error_of(openai_failure(503, "later"))["type"], "server_error");
  EXPECT_GE(openai_failure(503, "later").retry_after.count(), 1);
}

TEST(openai_form, a_refusal_of_the_server_becomes_one_and_keeps_all_else) {
  auto reply = in_openai_form(oip_api::failure(503, "full", std::chrono::milliseconds{2500}));
  EXPECT_EQ(reply.retry_after.count(), 3);
  EXPECT_EQ(error_of(reply)["message"], "full");
  EXPECT_EQ(error_of(in_openai_form(oip_api::failure(401, "who?")))["code"], "invalid_api_key");
  auto const own = openai_failure(404, "x", {.code = "model_not_found"});
  EXPECT_EQ(in_openai_form(own).body, own.body);
  EXPECT_EQ(in_openai_form({200, R"({"error": "no"})", {}}).body, R"({"error": "no"})");
  EXPECT_EQ(in_openai_form({500, "not JSON", {}}).body, "not JSON");
}

TEST(openai_form, an_answer_that_breaks_off_ends_with_the_event_that_its_clients_know) {
  auto const data_of = [](std::string const& event, std::string const& before) {
    EXPECT_TRUE(event.starts_with(before + "data: ") && event.ends_with("}\n\n")) << event;
    return json::parse(event.substr(before.size() + 6));
  };
  auto const chat = data_of(openai_error_event("/v1/chat/completions?x=1", "it \"ended\"\n"), "");
  EXPECT_EQ(chat["error"]["message"], "it \"ended\"\n");
  EXPECT_EQ(chat["error"]["type"], "server_error");
  EXPECT_TRUE(chat["error"]["code"].is_null());
  EXPECT_EQ(data_of(openai_error_event("/v1/responses", "it ended"), "event: error\n"),
            (json{{"type", "error"},
                  {"code", "server_error"},
                  {"message", "it ended"},
                  {"param", nullptr}}));
}

TEST(openai_form, who_asks_for_an_unknown_model_hears_of_some_that_exist) {
  auto const said = error_of(unknown_model("x\xff", {"a", "b"}));
  EXPECT_EQ(said["code"], "model_not_found");
  EXPECT_NE(said["message"].get<std::string>().find("there are a, b"), std::string::npos);
  auto const many = error_of(unknown_model("x", std::vector<std::string>(1000, "m")));
  EXPECT_NE(many["message"].get<std::string>().find("and 968 more"), std::string::npos);
}

TEST(openai_form, models_are_a_list_or_one_of_it) {
  json const models{{{"id", "a"}, {"object", "model"}}, {{"id", "org/b"}, {"object", "model"}}};
  EXPECT_EQ(json::parse(model_list_reply(models).body),
            (json{{"object", "list"}, {"data", models}}));
  EXPECT_EQ(json::parse(one_model_reply(models, "org/b")->body)["id"], "org/b");
  EXPECT_FALSE(one_model_reply(models, "b"));
}

}  // namespace
}  // namespace sluice::server
