/// What a configuration says of batches, priorities and warm-ups.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/server/repository/model_config.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

std::string const two_inputs = R"(backend: "pytorch"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 2 ] }, { name: "s" data_type: TYPE_STRING dims: [ 1 ] } ]
output { name: "y" data_type: TYPE_FP32 dims: 1 }
)";

model_config with(std::string const& more) {
  return read_model_config(two_inputs + more, "f");
}

struct fault_row {
  std::string text;
  std::vector<std::string> says;
};

void expect_faults(std::vector<fault_row> const& rows) {
  for (auto const& each : rows) {
    SCOPED_TRACE(each.text);
    auto const failure = thrown_by([&] { static_cast<void>(with(each.text)); });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind(), error_kind::invalid_argument);
    for (auto const& word : each.says) EXPECT_THAT(failure->what(), HasSubstr(word));
  }
}

TEST(batching_config, without_a_word_of_it_requests_are_computed_one_by_one) {
  EXPECT_EQ(with("").batching, batching_rules{});
  batching_rules rules;
  rules.max_batch_size = 8;
  EXPECT_EQ(with("max_batch_size: 8").batching, rules);
}

TEST(batching_config, all_of_it_is_read) {
  auto const config = with(R"(max_batch_size: 8
dynamic_batching {
  preferred_batch_size: [ 8, 4 ] preferred_batch_size: 4
  max_queue_delay_microseconds: 100
  priority_levels: 3 default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 max_queue_size: 7 }
  priority_queue_policy { key: 1 value { allow_timeout_override: true } }
  priority_queue_policy { key: 3 value { default_timeout_microseconds: 9 } }
})");
  batching_rules rules;
  rules.max_batch_size = 8;
  rules.is_dynamic = true;
  rules.preferred_sizes = {4, 8};
  rules.max_queue_delay = 100us;
  rules.priority_levels = 3;
  rules.default_priority = 2;
  rules.default_policy = {queue_policy::timeout_action::delay, 5us, false, 7};
  rules.policies = {{1, {queue_policy::timeout_action::reject, 0us, true, 0}},
                    {3, {queue_policy::timeout_action::reject, 9us, false, 0}}};
  EXPECT_EQ(config.batching, rules);
  EXPECT_THAT(config.without_effect, IsEmpty());
  auto const& shown = config.json["dynamic_batching"];
  EXPECT_EQ(shown["preferred_batch_size"], nlohmann::json::array({8, 4, 4}));
  EXPECT_EQ(shown["max_queue_delay_microseconds"], 100);
  EXPECT_EQ(shown["priority_queue_policy"]["3"]["default_timeout_microseconds"], 9);
}

TEST(batching_config, the_preferred_size_is_by_default_the_largest) {
  auto const config = with("max_batch_size: 8 dynamic_batching { preserve_ordering: true }");
  EXPECT_TRUE(config.batching.is_dynamic);
  EXPECT_TRUE(config.batching.preserve_ordering);
  EXPECT_THAT(config.batching.preferred_sizes, IsEmpty());
  EXPECT_EQ(config.json["dynamic_batching"]["preferred_batch_size"], nlohmann::json::array({8}));
}

TEST(batching_config, what_triton_passes_over_is_listed) {
  auto const config = with(
      "dynamic_batching { default_priority_level: 2\n"
      "priority_queue_policy { key: 1 value { } } }");
  EXPECT_FALSE(config.batching.is_dynamic);
  EXPECT_TRUE(config.batching.policies.empty());
  EXPECT_THAT(config.without_effect,
              ElementsAre("line 4: dynamic_batching, as max_batch_size is 0",
                          "line 4: default_priority_level, without priority_levels",
                          "line 5: priority_queue_policy, without priority_levels"));
}

TEST(batching_config, faults_name_their_place_and_what_would_be_right) {
  auto const batching = [](std::string const& fields) {
    return "max_batch_size: 8\ndynamic_batching { " + fields + " }";
  };
  std::string const levels = "priority_levels: 2 default_priority_level: 1 ";
  expect_faults({
      {"dynamic_batching { preferred_batch_size: 4 }", {"f:4:20:", "max_batch_size", "0"}},
      {batching("preferred_batch_size: 0"), {"f:5:20:", "within 1 and 8"}},
      {batching("preferred_batch_size: 4 preferred_batch_size: 9"), {"f:5:44:", "is 9", "8"}},
      {batching("max_queue_delay_microseconds: 18446744073709551615"), {"f:5:20:", "a year"}},
      {batching("max_queue_delay_microseconds: -1"), {"f:5:50:"}},
      {batching("priority_levels: 2"), {"f:5:20:", "default_priority_level", "within 1 and 2"}},
      {batching("priority_levels: 2 default_priority_level: 3"), {"f:5:39:", "is 3"}},
      {batching("priority_levels: 4294967296 default_priority_level: 1"), {"32-bit"}},
      {batching(levels + "priority_queue_policy { key: 3 value { } }"), {"priority 3", "1 and 2"}},
      {batching(levels + "priority_queue_policy { key: 0 value { } }"), {"f:5:", "priority 0"}},
      {batching(levels + "priority_queue_policy { key: 1 }\n priority_queue_policy { key: 2 value {"
                         " timeout_action: 2 } }"),
       {"f:6:41:", "timeout_action", "REJECT, DELAY"}},
      {batching(levels + "preserve_ordering: true"), {"f:5:65:", "preserve_ordering", "one"}},
      {batching("preserve_ordering: true default_queue_policy { timeout_action: DELAY "
                "default_timeout_microseconds: 1 }"),
       {"f:5:67:", "DELAY", "preserve_ordering"}},
      {batching("default_queue_policy { timeout_action: LATER }"), {"'LATER'", "REJECT, DELAY"}},
      {batching("max_batch_size: 3"), {"'dynamic_batching' has no", "belongs to a model"}},
      {batching("") + "sequence_batching { }", {"f:5:22:", "beside 'dynamic_batching'"}},
  });
}

std::string const of_first =
    "inputs { key: 'x' value { data_type: TYPE_FP32 dims: [ 3, 2 ] zero_data: true } } ";
std::string const of_second =
    "inputs { key: 's' value { data_type: TYPE_STRING dims: 1 random_data: true } } ";

TEST(warmup_config, samples_are_read_in_the_order_of_the_models_inputs) {
  auto const config =
      with("max_batch_size: 8 model_warmup [ { name: 'a' batch_size: 1 " + of_second + of_first +
           "}, { name: 'b' batch_size: 8 count: 3 " + of_second +
           "inputs { key: 'x' value { data_type: TYPE_FP32 dims: [ 1, 2 ] input_data_file: 'x.bin' "
           "} } } ]");
  warmup_input const text{
      .name = "s", .type = datatype::bytes, .shape = {1}, .data = warmup_input::source::random};
  EXPECT_THAT(
      config.warmup,
      ElementsAre(
          warmup_sample{"a", 1, 1, {{"x", datatype::fp32, {3, 2}, 24, {}, {}}, text}},
          warmup_sample{
              "b",
              8,
              3,
              {{"x", datatype::fp32, {1, 2}, 8, warmup_input::source::file, "x.bin"}, text}}));
  EXPECT_EQ(config.json["model_warmup"][1]["inputs"]["x"]["dims"], nlohmann::json::array({1, 2}));
  EXPECT_THAT(config.without_effect, IsEmpty());
}

TEST(warmup_config, a_sample_of_no_batch_is_passed_over) {
  auto const config = with("model_warmup { name: 'a' }\nmodel_warmup { batch_size: 1 " + of_first +
                           of_second + "}");
  EXPECT_THAT(config.warmup, SizeIs(1));
  EXPECT_THAT(config.without_effect, ElementsAre("line 4: model_warmup, as its batch_size is 0"));
}

TEST(warmup_config, faults_name_their_place_and_what_would_be_right) {
  auto const sample = [](std::string const& fields) {
    return "model_warmup { name: 'w' batch_size: 1 " + fields + " }";
  };
  auto const of_x = [&](std::string const& fields) {
    return sample(of_second + "\ninputs { key: 'x' value { " + fields + " } }");
  };
  expect_faults({
      {"model_warmup { name: 'w' batch_size: 2 " + of_first + of_second + "}",
       {"f:4:26:", "at most 1"}},
      {"max_batch_size: 4 model_warmup { batch_size: 5 " + of_first + of_second + "}",
       {"f:4:", "at most 4"}},
      {sample(of_first), {"f:4:1:", "'w' lacks input 's'", "inputs { key: \"s\""}},
      {sample(of_first + of_second + "inputs { key: 'z' value { } }"), {"no input 'z'", "'w'"}},
      {of_x("dims: [ 3, 2 ] zero_data: true"), {"f:5:19:", "'x'", "TYPE_FP32"}},
      {of_x("data_type: TYPE_FP64 dims: [ 3, 2 ] zero_data: true"), {"f:5:27:", "TYPE_FP32"}},
      {of_x("data_type: TYPE_FP32 dims: [ 3 ] zero_data: true"), {"f:5:48:", "[3]", "[-1, 2]"}},
      {of_x("data_type: TYPE_FP32 dims: [ 3, 4 ] zero_data: true"), {"[3, 4]"}},
      {of_x("data_type: TYPE_FP32 dims: [ -1, 2 ] zero_data: true"), {"[-1, 2]", "at least 1"}},
      {of_x("data_type: TYPE_FP32 dims: [ 9223372036854775807, 2 ] zero_data: true"), {"dims"}},
      {of_x("data_type: TYPE_FP32 dims: [ 3, 2 ]"), {"f:5:", "zero_data", "input_data_file"}},
      {of_x("data_type: TYPE_FP32 dims: [ 3, 2 ] input_data_file: '../x'"), {"f:5:", "'warmup'"}},
      {of_x("data_type: TYPE_FP32 dims: [ 3, 2 ] input_data_file: '/x'"), {"'warmup'"}},
      {of_x("data_type: TYPE_FP32 dims: [ 3, 2 ] input_data_file: ''"), {"'warmup'"}},
      {of_x("data_type: TYPE_FP32 dims: [ 3, 2 ] zero_data: true random_data: true"),
       {"beside 'zero_data'"}},
  });
}

}  // namespace
}  // namespace sluice::server
