#include "runtime/simulator/trace_files.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::simulator {
namespace {

using testing::HasSubstr;

trace read(std::string const& text, trace_reading const& how = {}) {
  std::istringstream from{text};
  return read_trace(from, "trace.txt", how);
}

std::string refusal(std::string const& text) {
  try {
    (void)read(text);
  } catch (error const& wrong) {
    EXPECT_EQ(wrong.kind(), error_kind::invalid_argument);
    return wrong.what();
  }
  return "was read";
}

std::string const azure_llm = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n";

TEST(a_trace_of_azure_llm, has_carriage_returns_seven_digits_and_no_last_newline) {
  auto const seen = read(azure_llm +
                             "2023-11-16 23:59:59.9799600,4808,10\r\n"
                             "2023-11-17 00:00:00.0319600,3180,8",
                         {.per_context_token_s = 0.001, .per_generated_token_s = 0.01});
  ASSERT_EQ(seen.requests.size(), 2U);
  EXPECT_EQ(seen.requests[0].at_s, 0.0);
  EXPECT_NEAR(seen.requests[1].at_s, 0.052, 1e-6);
  EXPECT_NEAR(seen.length_s, 0.052, 1e-6);
  EXPECT_NEAR(seen.requests[0].service_s, 4.808 + 0.1, 1e-12);
  ASSERT_EQ(seen.models.size(), 1U);
}

TEST(a_trace_of_azure_llm, without_costs_of_tokens_takes_the_mean) {
  auto const seen = read(azure_llm + "2023-11-16 23:59:59,1,2\r\n", {.service_s = 0.25});
  EXPECT_EQ(seen.requests[0].service_s, 0.25);
}

TEST(a_trace_of_azure_functions, is_by_ends_and_has_a_model_for_each_function) {
  auto const seen = read(
      "app,func,end_timestamp,duration\n"
      "a,f,10.0,1.0\n"
      "a,g,10.5,9.5\n"
      "a,f,20.0,0\n");
  ASSERT_EQ(seen.requests.size(), 3U);
  EXPECT_EQ(seen.models, (std::vector<std::string>{"a/f", "a/g"}));
  EXPECT_EQ(seen.requests[0].model, 1U);  // came first, at 1 s
  EXPECT_EQ(seen.requests[0].service_s, 9.5);
  EXPECT_EQ(seen.requests[1].at_s, 8.0);
  EXPECT_EQ(seen.requests[2].at_s, 19.0);
}

TEST(a_trace_of_functions, may_have_begun_before_the_record) {
  auto const seen = read("app,func,end_timestamp,duration\na,f,1.0,3.0\na,f,2.0,0.5\n");
  EXPECT_EQ(seen.requests[0].at_s, 0.0);
  EXPECT_EQ(seen.requests[1].at_s, 3.5);
}

TEST(a_trace_of_mooncake, has_an_object_in_each_line_and_milliseconds) {
  auto const seen = read(
      "{\"timestamp\": 27482, \"input_length\": 6955, \"output_length\": 52, \"hash_ids\": [46]}\n"
      "{\"timestamp\": 30535, \"input_length\": 6472, \"output_length\": 26}\n",
      {.per_generated_token_s = 0.02});
  ASSERT_EQ(seen.requests.size(), 2U);
  EXPECT_NEAR(seen.requests[1].at_s, 3.053, 1e-9);
  EXPECT_NEAR(seen.requests[0].service_s, 1.04, 1e-9);
}

TEST(a_trace_of_columns, takes_them_in_any_order) {
  auto const seen = read("model,time_s\nbert,5\nresnet,6.5\nbert,6.5\n", {.service_s = 0.1});
  EXPECT_EQ(seen.models, (std::vector<std::string>{"bert", "resnet"}));
  EXPECT_EQ(seen.requests[2].at_s, 1.5);
  EXPECT_EQ(seen.requests[2].service_s, 0.1);
  EXPECT_EQ(read("time_s,service_s\n0,0.5\n").requests[0].service_s, 0.5);
}

TEST(a_trace_without_models, spreads_them_by_zipf) {
  std::string text = "time_s\n";
  for (int i = 0; i < 3000; ++i) {
    text += std::to_string(i) + "\n";
  }
  auto const seen = read(text, {.models = 3, .zipf_exponent = 1.0});
  std::vector<int> counts(3);
  for (auto const& each : seen.requests) {
    ++counts.at(each.model);
  }
  EXPECT_EQ(seen.models.size(), 3U);
  EXPECT_NEAR(counts[0], 3000.0 * 6 / 11, 120.0);
  EXPECT_NEAR(counts[2], 3000.0 * 2 / 11, 120.0);
}

TEST(a_trace, may_be_played_faster) {
  EXPECT_EQ(read("time_s\n10\n30\n", {.speed = 4.0}).length_s, 5.0);
}

TEST(a_bad_trace, is_refused_with_file_and_line) {
  EXPECT_THAT(refusal(azure_llm + "\r\nyesterday,1,2\r\n"), HasSubstr("trace.txt:3: TIMESTAMP"));
  EXPECT_THAT(refusal(azure_llm + "2023-02-30 10:00:00,1,2\r\n"),
              HasSubstr("trace.txt:2: TIMESTAMP is '2023-02-30 10:00:00'"));
  EXPECT_THAT(refusal(azure_llm + "2023-11-16 10:00:00.,1,2\r\n"), HasSubstr("trace.txt:2:"));
  EXPECT_THAT(refusal(azure_llm + "2023-11-16 10:00:00.5x,1,2\r\n"), HasSubstr("trace.txt:2:"));
  EXPECT_THAT(refusal(azure_llm + "2023-11-16 24:00:00,1,2\r\n"), HasSubstr("trace.txt:2:"));
  EXPECT_THAT(refusal(azure_llm + "2023-11-16 10:00:00,1\r\n"),
              HasSubstr("trace.txt:2: has 2 columns, the first line has 3"));
  EXPECT_THAT(refusal(azure_llm + "2023-11-16 10:00:00,many,2\r\n"),
              HasSubstr("trace.txt:2: ContextTokens is 'many', must be a number"));
  EXPECT_THAT(refusal("time_s\n1\nnan\n"), HasSubstr("trace.txt:3: time_s is 'nan'"));
  EXPECT_THAT(refusal("time_s\n1\n1e300\n"), HasSubstr("trace.txt:3: time_s is 1e300"));
  EXPECT_THAT(refusal("time_s\n-1\n"), HasSubstr("trace.txt:2: time_s is -1, must be 0 or more"));
  EXPECT_THAT(refusal("time_s,model\n1,\n"), HasSubstr("trace.txt:2: model is empty"));
  EXPECT_THAT(refusal("{\"timestamp\": 1}\n"), HasSubstr("trace.txt:1: 'input_length' must be"));
  EXPECT_THAT(refusal("{\"timestamp\": 1\n"), HasSubstr("trace.txt:1: is no JSON object"));
}

TEST(a_bad_trace, whose_time_goes_back_is_refused) {
  EXPECT_THAT(refusal("time_s\n1\n3\n2.5\n"),
              HasSubstr("trace.txt:4: its time is 0.500 s before that of a line above"));
}

TEST(a_bad_trace, with_unknown_columns_or_none_at_all_is_refused) {
  EXPECT_THAT(refusal("time_s,colour\n1,red\n"),
              HasSubstr("trace.txt:1: column 'colour' is not known; columns are time_s, model"));
  EXPECT_THAT(refusal("model\nbert\n"), HasSubstr("trace.txt:1: there is no column time_s"));
  EXPECT_THAT(refusal("time_s,time_s\n1,2\n"), HasSubstr("is there twice"));
  EXPECT_THAT(refusal(""), HasSubstr("trace.txt: has no requests"));
  EXPECT_THAT(refusal(azure_llm), HasSubstr("has no requests"));
}

TEST(a_file_that_is_not_there, is_named) {
  try {
    (void)read_trace("no/such/trace.csv", {});
    FAIL();
  } catch (error const& wrong) {
    EXPECT_EQ(wrong.kind(), error_kind::not_found);
    EXPECT_THAT(wrong.what(), HasSubstr("no/such/trace.csv cannot be opened: No such file"));
  }
}

}  // namespace
}  // namespace sluice::simulator
