#include "runtime/server/http/named_body.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

/// What is said of a body, cut into pieces of `size` bytes; nothing: it may pass.
std::string refusal_of(std::string_view body, std::size_t size) {
  named_body reading;
  auto const failure = thrown_by([&] {
    for (std::size_t at = 0; at < body.size(); at += size) reading.take(body.substr(at, size));
    reading.finish();
  });
  if (!failure) return {};
  EXPECT_EQ(failure->kind(), error_kind::invalid_argument);
  return failure->what();
}

std::string model_of(std::string_view body, std::size_t size) {
  named_body reading;
  for (std::size_t at = 0; at < body.size(); at += size) reading.take(body.substr(at, size));
  reading.finish();
  return reading.model() == nullptr ? "none" : *reading.model();
}

constexpr std::size_t whole = 1U << 20U;

TEST(named_body, the_model_is_found_wherever_it_stands_and_however_the_body_is_cut) {
  struct body_with_name {
    char const* body;
    char const* name;
  };
  for (auto const& [body, name] : {
           body_with_name{R"({"model": "chat"})", "chat"},
           body_with_name{R"( { "messages": [{"model": "x"}, 1.5e3, -2, true, null], "n": {"model":
             {"model": 3}}, "model" : "org/chat:7b", "stream": true } )",
                          "org/chat:7b"},
           body_with_name{R"({"mod\u0065l": "ch\u0061t"})", "chat"},
           body_with_name{R"({"model": "\u00e9\ud83d\ude00\n"})", "é😀\n"},
           body_with_name{R"({"modelx": "a", "mode": "b", "model": "c", "amodel": 1})", "c"},
           body_with_name{R"({"model": ""})", ""},
       }) {
    for (std::size_t const size : {1UL, 2UL, 3UL, 7UL, whole}) {
      EXPECT_EQ(model_of(body, size), name) << body << " in pieces of " << size;
    }
  }
}

TEST(named_body, it_is_known_before_the_body_is_over) {
  named_body reading;
  reading.take(R"({"prompt": ")");
  EXPECT_EQ(reading.model(), nullptr);
  reading.take(std::string(100'000, 'x'));
  reading.take(R"(", "model": "ch)");
  EXPECT_EQ(reading.model(), nullptr);
  reading.take("at\"");
  ASSERT_NE(reading.model(), nullptr);
  EXPECT_EQ(*reading.model(), "chat");
}

TEST(named_body, what_two_might_read_differently_is_refused) {
  auto const deep = R"({"model": "a", "x": )" + std::string(300, '[') + std::string(300, ']') + "}";
  struct wrong_body {
    std::string body;
    char const* said;
  };
  for (auto const& [body, said] : {
           wrong_body{R"({"model": "a", "model": "b"})", "'model' twice"},
           wrong_body{R"({"model": "a", "mod\u0065l": "a"})", "'model' twice"},
           wrong_body{R"({"model": "a", "Model": "b"})", "the key 'Model'"},
           wrong_body{R"({"MODEL": "a"})", "the key 'MODEL'"},
           wrong_body{R"({"model": 7})", "must be a string"},
           wrong_body{R"({"model": null})", "must be a string"},
           wrong_body{R"({"model": ["a"]})", "must be a string"},
           wrong_body{R"({"model": {"model": "a"}})", "must be a string"},
           wrong_body{R"({"model": true})", "must be a string"},
           wrong_body{R"([{"model": "a"}])", "not a JSON object"},
           wrong_body{R"("model")", "not a JSON object"},
           wrong_body{"7", "not a JSON object"},
           wrong_body{"null", "not a JSON object"},
           wrong_body{"{}", "names no model"},
           wrong_body{R"({"messages": [{"model": "a"}]})", "names no model"},
           wrong_body{"", "is empty"},
           wrong_body{"   ", "ends before its JSON does"},
           wrong_body{R"({"model": "a")", "ends before its JSON does"},
           wrong_body{R"({"model": "a"}})", "stands behind the body's JSON"},
           wrong_body{R"({"model": "a"} {"model": "b"})", "stands behind the body's JSON"},
           wrong_body{R"({"model": "a",})", "is not JSON"},
           wrong_body{R"({"model": "a" /* b */})", "is not JSON"},
           wrong_body{R"({model: "a"})", "is not JSON"},
           wrong_body{R"({'model': 'a'})", "is not JSON"},
           wrong_body{R"({"model": "a", "x": NaN})", "is not JSON"},
           wrong_body{R"({"model": "a", "x": 01})", "is not JSON"},
           wrong_body{"{\"model\": \"a\nb\"}", "is not JSON"},
           wrong_body{"{\"model\": \"\xff\"}", "is not JSON"},
           wrong_body{"{\"model\": \"a\", \"x\": \"\xc0\xaf\"}", "is not JSON"},
           wrong_body{R"({"model": "\ud83d"})", "is not JSON"},
           wrong_body{"\xef\xbb\xbf{\"model\": \"a\"}", "byte order mark"},
           wrong_body{std::string{"{\0\"\0m\0", 6}, "is not JSON"},
           wrong_body{deep, "deeper than 256 levels"},
           wrong_body{"model=a", "is not JSON"},
       }) {
    for (std::size_t const size : {1UL, 5UL, whole}) {
      EXPECT_NE(refusal_of(body, size).find(said), std::string::npos)
          << body << " in pieces of " << size << ": " << refusal_of(body, size);
    }
  }
}

TEST(named_body, names_and_keys_without_end_take_no_room) {
  auto const long_name = R"({"model": ")" + std::string(100'000, 'a') + R"("})";
  EXPECT_EQ(model_of(long_name, 1000).size(), longest_model_name + 1);
  auto const long_key = R"({")" + std::string(100'000, 'k') + R"(": 1, "model": "a"})";
  EXPECT_EQ(model_of(long_key, 1000), "a");
  auto const key_that_begins_so =
      R"({"model)" + std::string(100'000, 'l') + R"(": 1, "model": "a"})";
  EXPECT_EQ(model_of(key_that_begins_so, 1000), "a");
}

}  // namespace
}  // namespace sluice::server
