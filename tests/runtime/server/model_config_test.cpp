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

TEST(model_config, a_model_may_have_other_shapes_than_requests) {
  std::string const text = R"(backend: "pytorch"
    input [ { name: "x" data_type: TYPE_FP32 dims: [ 2, -1, 6 ] reshape { shape: [ 1, 2, -1, 3, 2 ] } },
            { name: "n" data_type: TYPE_FP32 dims: 1 reshape { } } ]
    output { name: "y" data_type: TYPE_FP32 dims: 4 })";
  auto const one = read_model_config(text, "f");
  EXPECT_THAT(one.inputs[0].shape, ElementsAre(2, -1, 6));
  EXPECT_THAT(one.inputs[0].model_shape.value(), ElementsAre(1, 2, -1, 3, 2));
  EXPECT_TRUE(one.inputs[1].model_shape.value().empty());
  EXPECT_FALSE(one.outputs[0].model_shape.has_value());
  EXPECT_EQ(one.json["input"][0]["reshape"]["shape"], json::array({1, 2, -1, 3, 2}));
  auto const batched = read_model_config(text + "max_batch_size: 2", "f");
  EXPECT_THAT(batched.inputs[0].model_shape.value(), ElementsAre(-1, 1, 2, -1, 3, 2));
  EXPECT_THAT(batched.inputs[1].model_shape.value(), ElementsAre(-1));
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
  auto const config = read_model_config(base + R"(response_cache { enable: true }
    instance_group [ { count: 2 kind: KIND_GPU gpus: 0 } ]
    parameters { key: "INFERENCE_MODE" value: { string_value: "true" } }
    parameters { key: "k" value: { string_value: "v" } })",
                                        "f");
  EXPECT_THAT(
      config.without_effect,
      ElementsAre("line 5: response_cache", "line 6: instance_group.kind",
                  "line 6: instance_group.gpus", "line 7: parameters", "line 8: parameters"));
  EXPECT_EQ(config.computing.instances, 2U);
  EXPECT_FALSE(config.computing.records_launches);
  EXPECT_EQ(config.json["response_cache"]["enable"], true);
  EXPECT_EQ(config.json["instance_group"][0]["count"], 2);
  EXPECT_EQ(config.json["instance_group"][0]["kind"], "KIND_GPU");
  EXPECT_EQ(config.json["instance_group"][0]["gpus"], json::array({0}));
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
            json::parse(R"([{"name":"y","data_type":"TYPE_INT64","dims":[-1,2],"label_filename":"",
                             "is_shape_tensor":false,"is_non_linear_format_io":false}])"));
  EXPECT_EQ(config["instance_group"], json::array());
  EXPECT_EQ(config["parameters"], json::object());
  EXPECT_FALSE(config.contains("dynamic_batching"));
}

TEST(model_config, what_json_cannot_carry_as_a_number_is_a_string_in_it) {
  auto const config =
      read_model_config(base +
                            "model_metrics { metric_control { metric_identifier { family: 'f' } "
                            "histogram_options { buckets: [ 0.5, inf, nan ] } } }",
                        "f");
  EXPECT_EQ(config.json["model_metrics"]["metric_control"][0]["histogram_options"]["buckets"],
            json::array({0.5, "Infinity", "NaN"}));
}

TEST(model_config, a_file_with_every_field_that_has_no_effect_is_taken) {
  auto const config = read_model_config(base + R"(runtime: "r"
    optimization {
      graph { level: 1 } priority: PRIORITY_MAX eager_batching: true gather_kernel_buffer_threshold: 1
      cuda { graphs: true graph_spec { batch_size: 1 input { key: "x" value { dim: [ 4 ] } }
             graph_lower_bound { batch_size: 1 input { key: "x" value { dim: 4 } } } } }
      execution_accelerators { gpu_execution_accelerator [ { name: "t" parameters { key: "k" value: "v" } } ] }
      input_pinned_memory { enable: false } output_pinned_memory { enable: true } }
    instance_group { name: "g" kind: KIND_MODEL host_policy: "h" passive: true profile: "p"
      rate_limiter { resources [ { name: "r" global: true count: 2 } ] priority: 1 }
      secondary_devices { kind: KIND_NVDLA device_id: 1 } }
    metric_tags { key: "k" value: "v" }
    model_transaction_policy { decoupled: false })",
                                        "f");
  EXPECT_THAT(
      config.without_effect,
      ElementsAre("line 5: runtime", "line 7: optimization.graph", "line 7: optimization.priority",
                  "line 7: optimization.eager_batching",
                  "line 7: optimization.gather_kernel_buffer_threshold",
                  "line 8: optimization.cuda.graph_spec",
                  "line 10: optimization.execution_accelerators",
                  "line 11: optimization.input_pinned_memory",
                  "line 11: optimization.output_pinned_memory", "line 12: instance_group.kind",
                  "line 12: instance_group.host_policy", "line 12: instance_group.passive",
                  "line 12: instance_group.profile", "line 13: instance_group.rate_limiter",
                  "line 14: instance_group.secondary_devices", "line 15: metric_tags"));
  EXPECT_EQ(config.computing, (computing_rules{.instances = 1, .records_launches = true}));
}

TEST(model_config, the_counts_of_all_instance_groups_are_one_number) {
  auto const instances = [](std::string const& groups) {
    return read_model_config(base + groups, "f").computing.instances;
  };
  EXPECT_EQ(instances(""), 1U);
  EXPECT_EQ(instances("instance_group { }"), 1U);
  EXPECT_EQ(instances("instance_group [ { count: 2 }, { count: 3 kind: KIND_CPU } ]"), 5U);
}

TEST(model_config, texts_may_be_in_any_form_of_the_format) {
  auto const config =
      read_model_config("\xEF\xBB\xBF# \xE9: a comment may have any bytes\n" + base +
                            "name: \"a\" 'b\\x63\\u00e9';\nmax_batch_size: 0x10,",
                        "f");
  EXPECT_EQ(config.name, "abc\u00e9");
  EXPECT_EQ(config.max_batch_size, 16);
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
      {io, {"f:1:1:", "pytorch_libtorch"}},
      {"platform: 'onnxruntime_onnx'" + io,
       {"f:1:1:", "onnxruntime_onnx", "pytorch_libtorch"},
       unsupported},
      {"backend: 'python'" + io, {"f:1:1:", "'python'", "pytorch"}, unsupported},
      {"backend: 'pytorch'", {"no input"}},
      {"backend: 'pytorch' input { name: 'x' data_type: TYPE_FP32 dims: 1 }", {"no output"}},
      {base + "max_batchsize: 4",
       {"f:5:1:", "'max_batchsize'", "did you mean \"max_batch_size\"?"}},
      {base + "max_batch_size: -1", {"f:5:1:", "max_batch_size"}},
      {base + "instance_group { count: -1 }", {"f:5:18:", "'count' is -1", "at least 1"}},
      {base + "instance_group [ { count: 60 }, { count: 5 } ]", {"f:5:", "65 instances", "64"}},
      {base + "max_batch_size: 2147483648", {"f:5:17:", "out of range"}},
      {base + "max_batch_size: '4'", {"integer"}},
      {base + "max_batch_size: 4 max_batch_size: 4", {"f:5:19:", "second time"}},
      {base + "max_batch_size: [ 4 ]", {"f:5:17:", "integer"}},
      {base + "name: add", {"quotes"}},
      {base + "name: 5", {"quotes"}},
      {base + "default_model_filename: '../x'", {"without folders"}},
      {base + "default_model_filename: '..'", {"without folders"}},
      {base + "sequence_batching { }", {"f:5:1:", "sequence_batching"}, unsupported},
      {base + "ensemble_scheduling { }", {"ensemble_scheduling"}, unsupported},
      {base + "version_policy { }", {"exactly one"}},
      {base + "version_policy: 3", {"f:5:17:", "\"{\""}},
      {base + "version_policy { all { } latest { } }",
       {"f:5:26:", "'latest'", "'all'", "one of them"}},
      {base + "version_policy { newest { } }", {"'newest'", "latest"}},
      {base + "version_policy { latest { num_versions: 0 } }", {"at least 1"}},
      {base + "version_policy { latest { number: 1 } }", {"'number'", "num_versions"}},
      {base + "version_policy { specific { } }", {"versions"}},
      {base + "version_policy { specific { versions: 1.5 } }", {"integer"}},
      {base + io, {"two inputs named 'x'"}},
      {input("data_type: TYPE_FP32 dims: 1"), {"f:2:1:", "name"}},
      {input("name: 'x' dims: 1"), {"f:2:1:", "'x'", "data_type"}},
      {input("name: 'x' data_type: TYPE_FLOAT dims: 1"),
       {"f:2:30:", "data_type", "'TYPE_FLOAT'", "TYPE_FP32"}},
      {input("name: 'x' data_type: 'TYPE_FP32' dims: 1"), {"f:2:30:", "TYPE_FP32"}},
      {input("name: 'x' data_type: TYPE_FP32"), {"'x'", "dims"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 0"), {"f:2:40:", "'x'", "at least 1"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: [ 1, -2 ]"), {"-2"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 18446744073709551615"),
       {"f:2:46:", "out of range"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: [ 2, 3 ] reshape { shape: [ 5 ] }"),
       {"f:2:55:", "reshape of input 'x' to [5]", "[2, 3]"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: [ 2, -1, 3 ] reshape { shape: [ 3, -1, 2 ] }"),
       {"[3, -1, 2]", "between them"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ -1, -1 ] }"), {"-1"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 0x7fffffffffffffff dims: 2 reshape { shape: "
             "0x7fffffffffffffff shape: 2 }"),
       {"reshape"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 2 reshape { }"), {"to []", "[2]"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 1 reshape { shape: 0 }"), {"f:2:58:", "of 0"}},
      {input("name: 'x' data_type: TYPE_FP32 dims: 1 optional: true"), {"optional"}, unsupported},
      {input("name: 'x' data_type: TYPE_FP32 dims: 1 optional: maybe"),
       {"f:2:58:", "maybe", "optional"}},
      {input("nam: 'x'"), {"'nam'", "did you mean \"name\"?"}},
      {"backend: 'pytorch' input: 5", {"f:1:27:", "\"{\""}},
      {"name: 'x' reshape { }", {"f:1:11:", "'reshape'", "belongs to 'input' or 'output'"}},
      {"input { max_batch_size: 1 }", {"f:1:9:", "'input'", "belongs to a model configuration"}},
      {"dims: 1 # dims", {"f:1:1:", "'dims'", "'input'"}},
      {"input { format: FORMAT_NHCW }", {"f:1:17:", "'FORMAT_NHCW'", "FORMAT_NHWC"}},
      {"a 5", {"f:1:1:", "'a'"}},
      {"name", {"f:1:5:", "the file ends"}},
      {"name:", {"f:1:6:", "the file ends"}},
      {"input {\n # }\n", {"f:3:1:", "the file ends", "never closed"}},
      {"input < name: 'x' }", {"f:1:19:"}},
      {"}", {"f:1:1:", "}"}},
      {"\t\tname: 5", {"f:1:9:", "quotes"}},
      {"input [\t{ name: 'x' }, { data_type: TYPE_FP32 } ]" + base,
       {"f:1:11:", "'x'", "data_type"}},
      {"input [ { name: 'x' data_type: TYPE_FP32 dims: 1 },\n\t{ dims: 1 } ]" + base,
       {"f:2:4:", "name"}},
      {"name: 'x\ny'", {"f:1:9:"}},
      {"name: '\\q'", {"f:1:9:", "escape"}},
      {"backend: 'pytorch' parameters { key: 'k' value { string_value: '\\xFF' } }",
       {"f:1:50:", "'string_value'", "UTF-8"}},
      {std::string{"name: \0", 7}, {"f:1:7:"}},
      {"name: \xFF", {"f:1:7:"}},
      {"[a.b]: 1", {"f:1:"}},
      {"name: " + std::string(100'000, 'x'), {"f:1:7:", "…"}},
  };
  for (auto const& each : rows) {
    SCOPED_TRACE(each.text.substr(0, 200));
    auto const failure = thrown_by([&] { static_cast<void>(read_model_config(each.text, "f")); });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind(), each.kind);
    for (auto const& word : each.says) EXPECT_THAT(failure->what(), HasSubstr(word));
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
