#include "runtime/server/repository/model_config.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

std::string const io = R"(
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_INT64 dims: [ -1, 2 ] }
)";
std::string const base = "platform: \"pytorch_libtorch\"\n" + io;

TEST(model_config, reads_what_a_model_takes_and_gives) {
  auto const config = read_model_config(
      "name: \"add\" backend: \"pytorch\" default_model_filename: \"m.ts\"" + io, "f");
  EXPECT_EQ(config.name, "add");
  EXPECT_EQ(config.model_filename, "m.ts");
  ASSERT_EQ(config.inputs.size(), 1U);
  EXPECT_EQ(config.inputs[0].name, "x");
  EXPECT_EQ(config.inputs[0].type, datatype::fp32);
  EXPECT_THAT(config.inputs[0].shape, ElementsAre(4));
  EXPECT_EQ(config.outputs[0].type, datatype::int64);
  EXPECT_THAT(config.outputs[0].shape, ElementsAre(-1, 2));
  EXPECT_EQ(config.versions.kind, version_policy::kind_t::latest);
  EXPECT_EQ(config.versions.latest, 1U);
  EXPECT_TRUE(config.without_effect.empty());
}

TEST(model_config, a_batch_dimension_comes_in_front) {
  auto const config = read_model_config(base + "max_batch_size: 8", "f");
  EXPECT_EQ(config.max_batch_size, 8);
  EXPECT_THAT(config.inputs[0].shape, ElementsAre(-1, 4));
  EXPECT_THAT(config.outputs[0].shape, ElementsAre(-1, -1, 2));
  EXPECT_EQ(config.json["input"][0]["dims"], json::array({4}));  // the file's, without it
}

TEST(model_config, dims_may_be_a_scalars_or_repeated) {
  auto const config = read_model_config(R"(backend: "pytorch"
    input [ { name: "rate" data_type: TYPE_INT64 dims: [ ] }, { name: "x" data_type: TYPE_BF16 dims: 1 dims: 2 } ]
    output { name: "y" data_type: TYPE_STRING dims: 1 })",
                                        "f");
  EXPECT_TRUE(config.inputs[0].shape.empty());
  EXPECT_THAT(config.inputs[1].shape, ElementsAre(1, 2));
  EXPECT_EQ(config.outputs[0].type, datatype::bytes);
  EXPECT_EQ(config.json["input"][0]["dims"], json::array());
}

TEST(model_config, version_policies_are_read) {
  EXPECT_EQ(read_model_config(base + "version_policy { latest { num_versions: 3 } }", "f")
                .versions.latest,
            3U);
  EXPECT_EQ(read_model_config(base + "version_policy: { all { } }", "f").versions.kind,
            version_policy::kind_t::all);
  EXPECT_THAT(read_model_config(base + "version_policy { specific { versions: [ 2, 7 ] } }", "f")
                  .versions.specific,
              ElementsAre(2, 7));
}

TEST(model_config, tuning_for_tritons_scheduler_is_passed_over_and_listed) {
  auto const config = read_model_config(base + R"(dynamic_batching { preferred_batch_size: 4 }
    instance_group [ { count: 2 kind: KIND_GPU gpus: 0 } ]
    parameters { key: "INFERENCE_MODE" value: { string_value: "true" } }
    parameters { key: "k" value: { string_value: "v" } })",
                                        "f");
  EXPECT_THAT(config.without_effect,
              ElementsAre("line 5: dynamic_batching", "line 6: instance_group",
                          "line 7: parameters", "line 8: parameters"));
  EXPECT_EQ(config.json["dynamic_batching"]["preferred_batch_size"], json::array({4}));
  EXPECT_EQ(config.json["instance_group"],
            json::parse(R"([{"count":2,"kind":"KIND_GPU","gpus":[0]}])"));
  EXPECT_EQ(config.json["parameters"],
            json::parse(R"({"INFERENCE_MODE":{"string_value":"true"},"k":{"string_value":"v"}})"));
}

TEST(model_config, the_json_has_defaults_filled_in) {
  auto const config = read_model_config(base, "f").json;
  EXPECT_EQ(config["backend"], "pytorch");
  EXPECT_EQ(config["max_batch_size"], 0);
  EXPECT_EQ(config["default_model_filename"], "model.pt");
  EXPECT_EQ(config["version_policy"]["latest"]["num_versions"], 1);
  EXPECT_EQ(config["output"],
            json::parse(R"([{"name":"y","data_type":"TYPE_INT64","dims":[-1,2]}])"));
}

TEST(model_config, faults_name_their_place_and_what_would_be_right) {
  struct row {
    std::string text;
    std::vector<std::string> says;
    error_kind kind = error_kind::invalid_argument;
  };
  auto const input = [](std::string const& fields) {
    return "backend: 'pytorch'\ninput { " + fields +
           " }\noutput { name: 'y' data_type: TYPE_FP32 dims: 1 }";
  };
  auto const unsupported = error_kind::unsupported;
  std::vector<row> const rows{
      {io, {"f:2:1:", "pytorch_libtorch"}},
      {"platform: 'onnxruntime_onnx'" + io,
       {"f:1:11:", "onnxruntime_onnx", "pytorch_libtorch"},
       unsupported},
      {"backend: 'python'" + io, {"f:1:10:", "'python'", "pytorch"}, unsupported},
      {"backend: 'pytorch'", {"no input"}},
      {"backend: 'pytorch' input { name: 'x' data_type: TYPE_FP32 dims: 1 }", {"no output"}},
      {base + "max_batchsize: 4", {"f:5:1:", "'max_batchsize'", "did you mean 'max_batch_size'?"}},
      {base + "max_batch_size: -1", {"f:5:17:", "max_batch_size"}},
      {base + "max_batch_size: 2147483648", {"32-bit"}},
      {base + "max_batch_size: '4'", {"integer"}},
      {base + "max_batch_size: 4 max_batch_size: 4", {"second time", "line 5"}},
      {base + "max_batch_size: [ 4 ]", {"one value"}},
      {base + "name: add", {"quotes"}},
      {base + "name: 5", {"quotes"}},
      {base + "default_model_filename: '../x'", {"without folders"}},
      {base + "default_model_filename: '..'", {"without folders"}},
      {base + "sequence_batching { }", {"f:5:1:", "sequence_batching"}, unsupported},
      {base + "ensemble_scheduling { }", {"ensemble_scheduling"}, unsupported},
      {base + "version_policy { }", {"exactly one"}},
      {base + "version_policy: 3", {"exactly one"}},
      {base + "version_policy { all { } latest { } }", {"exactly one"}},
      {base + "version_policy { newest { } }", {"'newest'", "latest"}},
      {base + "version_policy { latest { num_versions: 0 } }", {"at least 1"}},
      {base + "version_policy { latest { number: 1 } }", {"'number'", "num_versions"}},
      {base + "version_policy { specific { } }", {"versions"}},
      {base + "version_policy { specific { versions: 1.5 } }", {"integer"}},
      {base + io, {"two inputs named 'x'"}},
      {input("data_type: TYPE_FP32 dims: 1"), {"f:2:7:", "name"}},
      {input("name: 'x' dims: 1"), {"f:2:7:", "'x'", "data_type"}},
      {input("name: 'x' data_type: TYPE_FLOAT dims: 1"), {"f:2:30:", "'x'", "TYPE_FP32"}},
      {input("name: 'x' data_type: 'TYPE_FP32' dims: 1"), {"'x'", "TYPE_FP32"}},
      {input("name: 'x' data_type: TYPE_FP32"), {"'x'", "dims"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 0"), {"f:2:46:", "'x'", "at least 1"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: [ 1, -2 ]"), {"-2"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 18446744073709551615"), {"64 bits"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 1 reshape { }"), {"reshape"}, unsupported},
      {input("name: 'x' data_type: TYPE_FP32 dims: 1 optional: true"), {"optional"}, unsupported},
      {input("name: 'x' data_type: TYPE_FP32 dims: 1 optional: maybe"), {"true or false"}},
      {input("nam: 'x'"), {"'nam'", "did you mean 'name'?"}},
      {"backend: 'pytorch' input: 5", {"a message"}},
  };
  for (auto const& each : rows) {
    auto const failure = thrown_by([&] { static_cast<void>(read_model_config(each.text, "f")); });
    ASSERT_TRUE(failure.has_value()) << each.text;
    EXPECT_EQ(failure->kind(), each.kind) << each.text;
    for (auto const& word : each.says) EXPECT_THAT(failure->what(), HasSubstr(word)) << each.text;
  }
}

TEST(model_config, harmless_forms_of_refused_fields_are_taken) {
  EXPECT_NO_THROW(static_cast<void>(read_model_config(
      "backend: 'pytorch' input { name: 'x' data_type: TYPE_FP32 dims: 1 optional: false format: "
      "FORMAT_NONE } "
      "output { name: 'y' data_type: TYPE_FP32 dims: 1 label_filename: 'labels.txt' }",
      "f")));
}

}  // namespace
}  // namespace sluice::server
