#include "runtime/server/engines/served_models.hpp"

#include <gtest/gtest.h>

namespace sluice::server {
namespace {

using nlohmann::json;

served_models made() {
  return {{"chat", "org/chat"}, std::chrono::system_clock::from_time_t(7)};
}

std::vector<std::string> ids(json const& list) {
  std::vector<std::string> found;
  for (auto const& each : list) found.push_back(each.at("id"));
  return found;
}
using names = std::vector<std::string>;

TEST(served_models, before_the_engine_has_said_anything_its_names_are_listed) {
  auto const list = made().list();
  EXPECT_EQ(ids(list), (names{"chat", "org/chat"}));
  EXPECT_EQ(list[0], (json{{"id", "chat"},
                           {"object", "model"},
                           {"created", 7},
                           {"owned_by", "sluice"},
                           {"root", "chat"}}));
  EXPECT_TRUE(made().unlisted().empty());
}

TEST(served_models, what_the_engine_says_of_them_counts) {
  auto models = made();
  models.learn(R"({"object": "list", "data": [
    {"id": "org/chat", "object": "model", "owned_by": "vllm", "root": "/srv/chat", "max_model_len": 4096},
    {"id": "else", "object": "model"}]})");
  EXPECT_EQ(ids(models.list()), names{"org/chat"});  // it would not know "chat"
  EXPECT_EQ(models.list()[0]["max_model_len"], 4096);
  EXPECT_EQ(models.unlisted(), names{"chat"});
}

TEST(served_models, an_engine_that_lists_none_of_them_is_not_believed) {
  auto models = made();
  models.learn(R"({"data": [{"id": "else"}]})");
  EXPECT_EQ(ids(models.list()), (names{"chat", "org/chat"}));
  EXPECT_EQ(models.unlisted(), (names{"chat", "org/chat"}));  // for the log
}

TEST(served_models, what_is_no_list_changes_nothing) {
  auto models = made();
  models.learn(R"({"data": [{"id": "chat", "owned_by": "me"}]})");
  for (auto const* const text : {"", "[]", "{}", "not JSON", R"({"data": 7})"}) models.learn(text);
  models.learn(R"({"data": [{"id": "chat", "owned_by": "me"}, {"id": 7}, 7, {}]})");
  EXPECT_EQ(models.list()[0]["owned_by"], "me");
}

}  // namespace
}  // namespace sluice::server
