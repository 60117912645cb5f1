#include "runtime/server/http/token_events.hpp"

#include <gtest/gtest.h>

#include <string>

namespace sluice::server {
namespace {

std::size_t tokens_in(std::string_view text, std::size_t size) {
  token_events events;
  std::size_t found = 0;
  for (std::size_t at = 0; at < text.size(); at += size)
    found += events.take(text.substr(at, size));
  return found;
}

std::string event(std::string_view data) {
  return "data: " + std::string{data} + "\n\n";
}

TEST(token_events, those_with_something_said_count_and_no_others) {
  struct event_with_count {
    char const* data;
    std::size_t tokens;
  };
  for (auto const& [data, tokens] : {
           event_with_count{R"({"choices": [{"index": 0, "text": "a"}]})", 1},
           event_with_count{R"({"choices": [{"text": ""}]})", 0},
           event_with_count{R"({"choices": [{"delta": {"role": "assistant", "content": ""}}]})", 0},
           event_with_count{R"({"choices": [{"delta": {"role": "assistant"}}]})", 0},
           event_with_count{R"({"choices": [{"delta": {"role": "assistant", "content": "a"}}]})",
                            1},
           event_with_count{R"({"choices": [{"delta": {"reasoning_content": "a"}}]})", 1},
           event_with_count{
               R"({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]})",
               1},
           event_with_count{R"({"choices": [{"delta": {}, "finish_reason": "stop"}]})", 0},
           event_with_count{
               R"({"choices": [{"text": "", "finish_reason": "stop"}, {"text": "b"}]})", 1},
           event_with_count{R"({"choices": [], "usage": {"prompt_tokens": 1}})", 0},
           event_with_count{R"({"type": "response.output_text.delta", "delta": "a"})", 1},
           event_with_count{R"({"type": "response.created", "response": {"delta": "a"}})", 0},
           event_with_count{
               R"({"model": "text", "id": "delta", "choices": [{"logprobs": {"text": "a"}}]})", 0},
           event_with_count{R"({"error": {"message": "text"}})", 0},
           event_with_count{"[DONE]", 0},
           event_with_count{R"({"choices": [{"text": "a"}])", 1},  // who reads it may complain
           event_with_count{R"({"choices": [{"text": "a"}]} x)", 0},
           event_with_count{"nonsense", 0},
       }) {
    for (std::size_t const size : {1UL, 3UL, 4096UL}) {
      EXPECT_EQ(tokens_in(event(data), size), tokens) << data << " in pieces of " << size;
      EXPECT_EQ(tokens_in(event("[DONE]") + event(data) + event(R"({"delta": "x"})"), size),
                tokens + 1)
          << data;
    }
  }
}

TEST(token_events, lines_end_as_the_standard_allows_and_other_fields_pass) {
  std::string const data = R"({"delta": "a"})";
  for (auto const& text : {
           "data: " + data + "\r\n\r\n",
           "data: " + data + "\r\r",
           "data:" + data + "\n\n",
           ": loading\n\nevent: x\ndata: " + data + "\nid: 7\n\n",
           std::string{"data: {\"delta\":\ndata: \"a\"}\n\n"},
           "\n\n\r\n" + std::string{"data: "} + data + "\n\n",
           "datax: {}\ndat: {}\ndata\ndata: " + data + "\n\n",
       }) {
    for (std::size_t const size : {1UL, 2UL, 4096UL}) {
      EXPECT_EQ(tokens_in(text, size), 1U) << text << " in pieces of " << size;
    }
  }
  EXPECT_EQ(tokens_in("data: " + data + "\n", 5), 0U);  // it has not ended
  EXPECT_EQ(tokens_in("event: " + data + "\n\n", 5), 0U);
}

TEST(token_events, another_one_may_follow_where_all_are_whole_and_not_before) {
  for (std::string const end : {"\n", "\r", "\r\n"}) {
    std::string const text =
        ": x" + end + end + "event: y" + end + "data: {}" + end + "data" + end + end;
    auto const first = (": x" + end + end).size();
    token_events events;
    EXPECT_TRUE(events.is_between_events());
    for (std::size_t at = 0; at < text.size(); ++at) {
      (void)events.take(text.substr(at, 1));
      // Of a line's end of two bytes the first one is an end by itself.
      auto const left = at < first ? first - at - 1 : text.size() - at - 1;
      EXPECT_EQ(events.is_between_events(), left < end.size()) << text << " at " << at;
    }
  }
}

TEST(token_events, one_that_nobody_ends_takes_no_room_and_those_behind_it_count) {
  token_events events;
  EXPECT_EQ(events.take("data: {\"delta\": \""), 0U);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(events.take(std::string(10'000, 'x')), 0U);
  EXPECT_EQ(events.take("\"}\n\n" + event(R"({"delta": "b"})")), 2U);
  EXPECT_EQ(events.take(event(std::string(100, '[')) + event(R"({"delta": "c"})")), 1U);
}

}  // namespace
}  // namespace sluice::server
