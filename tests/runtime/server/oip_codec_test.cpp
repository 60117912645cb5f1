#include "runtime/server/http/oip_codec.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "runtime/server/inference/datatypes.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

/// A model with one input x and one output y.
model_metadata model_of(datatype type, std::vector<std::int64_t> shape) {
  return {"m", {"1"}, "pytorch_libtorch", {{"x", type, shape}}, {{"y", type, shape}}};
}

std::string body_of(std::string const& type, std::string const& shape, std::string const& data) {
  return R"({"inputs":[{"name":"x","datatype":")" + type + R"(","shape":)" + shape + R"(,"data":)" +
         data + "}]}";
}

template <typename Element>
std::vector<Element> elements_of(tensor const& from) {
  std::vector<Element> result(from.data.size() / sizeof(Element));
  if (!result.empty()) std::memcpy(result.data(), from.data.data(), from.data.size());
  return result;
}

template <typename Element>
std::vector<Element> decoded(datatype type, std::string const& data, std::int64_t count) {
  auto const request = decode_infer_request(
      body_of(std::string{datatype_name(type)}, json{count}.dump(), data), model_of(type, {-1}));
  EXPECT_EQ(request.inputs.at(0).type, type);
  return elements_of<Element>(request.inputs.at(0));
}

infer_response response_with(tensor output) {
  return {"m", "1", "", {std::move(output)}};
}

template <typename Element>
tensor tensor_with(datatype type, std::vector<Element> const& values) {
  tensor result{"y",
                type,
                {static_cast<std::int64_t>(values.size())},
                tensor_bytes::unwritten(values.size() * sizeof(Element))};
  if (!values.empty()) std::memcpy(result.data.data(), values.data(), result.data.size());
  return result;
}

tensor bytes_with(std::vector<std::string> const& values) {
  std::vector<std::byte> bytes;
  for (auto const& value : values) {
    auto const length = static_cast<std::uint32_t>(value.size());
    for (unsigned shift = 0; shift < 32; shift += 8) {
      bytes.push_back(static_cast<std::byte>(length >> shift));
    }
    for (char const c : value) bytes.push_back(static_cast<std::byte>(c));
  }
  return {"y", datatype::bytes, {static_cast<std::int64_t>(values.size())}, std::move(bytes)};
}

json encoded_data(tensor output) {
  return json::parse(
      encode_infer_response(response_with(std::move(output))).json)["outputs"][0]["data"];
}

TEST(oip_codec, decodes_a_whole_request) {
  model_metadata const model{"add",
                             {"3"},
                             "pytorch_libtorch",
                             {{"a", datatype::fp32, {-1, 2}}, {"b", datatype::int64, {2}}},
                             {{"sum", datatype::fp32, {-1, 2}}, {"other", datatype::fp32, {1}}}};
  auto const request = decode_infer_request(R"({
    "id": "req-1", "parameters": {"timeout": 1500, "priority": 2, "custom": "x"},
    "inputs": [
      {"data": [7, -8], "shape": [2], "datatype": "INT64", "name": "b"},
      {"name": "a", "datatype": "FP32", "shape": [2, 2], "data": [[1, 2.5], [-3e-1, 4]], "parameters": {"k": true}}],
    "outputs": [{"name": "sum", "parameters": {"binary_data": false}}],
    "unknown": {"deep": [1, {"a": [{}]}]}})",
                                            model);
  EXPECT_EQ(request.model, "add");
  EXPECT_EQ(request.version, "");
  EXPECT_EQ(request.id, "req-1");
  EXPECT_EQ(request.timeout, std::chrono::microseconds{1500});
  EXPECT_EQ(request.priority, 2U);
  EXPECT_THAT(request.outputs, ElementsAre("sum"));
  ASSERT_EQ(request.inputs.size(), 2U);
  EXPECT_EQ(request.inputs[0].name, "a");  // in the model's order
  EXPECT_THAT(request.inputs[0].shape, ElementsAre(2, 2));
  EXPECT_THAT(elements_of<float>(request.inputs[0]), ElementsAre(1.0F, 2.5F, -0.3F, 4.0F));
  EXPECT_THAT(elements_of<std::int64_t>(request.inputs[1]), ElementsAre(7, -8));
}

TEST(oip_codec, no_timeout_and_a_timeout_of_zero_mean_none) {
  auto const model = model_of(datatype::int8, {0});
  auto const with = [&](std::string const& parameters) {
    return decode_infer_request(
               R"({"parameters":)" + parameters +
                   R"(,"inputs":[{"name":"x","datatype":"INT8","shape":[0],"data":[]}]})",
               model)
        .timeout;
  };
  EXPECT_FALSE(with("{}").has_value());
  EXPECT_FALSE(with(R"({"timeout": 0})").has_value());
  auto const longest = with(R"({"timeout": 18446744073709551615})");
  ASSERT_TRUE(longest.has_value());
  EXPECT_GT(longest->count(), 0);
}

TEST(oip_codec, integers_are_exact_over_their_whole_range) {
  EXPECT_THAT(
      decoded<std::int64_t>(datatype::int64,
                            "[9007199254740993, -9223372036854775808, 9223372036854775807]", 3),
      ElementsAre(9007199254740993, std::numeric_limits<std::int64_t>::min(),
                  std::numeric_limits<std::int64_t>::max()));
  EXPECT_THAT(decoded<std::uint64_t>(datatype::uint64, "[18446744073709551615, 0]", 2),
              ElementsAre(std::numeric_limits<std::uint64_t>::max(), 0U));
  EXPECT_THAT(decoded<std::int8_t>(datatype::int8, "[-128, 127, -0]", 3),
              ElementsAre(-128, 127, 0));
  EXPECT_THAT(decoded<std::uint8_t>(datatype::uint8, "[255]", 1), ElementsAre(255));
  EXPECT_THAT(decoded<std::int16_t>(datatype::int16, "[-32768, 32767]", 2),
              ElementsAre(-32768, 32767));
  EXPECT_THAT(decoded<std::uint16_t>(datatype::uint16, "[65535]", 1), ElementsAre(65535));
  EXPECT_THAT(decoded<std::int32_t>(datatype::int32, "[-2147483648]", 1), ElementsAre(-2147483648));
  EXPECT_THAT(decoded<std::uint32_t>(datatype::uint32, "[4294967295]", 1),
              ElementsAre(4294967295U));
}

TEST(oip_codec, reals_of_all_widths_are_converted) {
  EXPECT_THAT(decoded<double>(datatype::fp64, "[0.1, 1e308, 3, -2]", 4),
              ElementsAre(0.1, 1e308, 3.0, -2.0));
  EXPECT_THAT(decoded<float>(datatype::fp32, "[3.4028235e38, 1e-46]", 2),
              ElementsAre(std::numeric_limits<float>::max(), 0.0F));
  EXPECT_THAT(decoded<std::uint16_t>(datatype::fp16, "[1, -2.5, 65504, 6e-8]", 4),
              ElementsAre(0x3C00, 0xC100, 0x7BFF, 0x0001));
  EXPECT_THAT(decoded<std::uint16_t>(datatype::bf16, "[1, 3.140625]", 2),
              ElementsAre(0x3F80, 0x4049));
}

TEST(oip_codec, numbers_that_json_lacks_are_strings) {
  auto const values = decoded<float>(datatype::fp32, R"(["NaN", "Infinity", "-Infinity"])", 3);
  EXPECT_TRUE(std::isnan(values[0]));
  EXPECT_EQ(values[1], std::numeric_limits<float>::infinity());
  EXPECT_EQ(values[2], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(encoded_data(tensor_with<float>(datatype::fp32, values)),
            (json{"NaN", "Infinity", "-Infinity"}));
  EXPECT_EQ(
      encoded_data(tensor_with<std::uint16_t>(datatype::fp16, {0x7C00, 0xFC00, 0x7E00, 0x3C00})),
      (json{"Infinity", "-Infinity", "NaN", 1.0}));
}

TEST(oip_codec, booleans_and_strings_are_decoded) {
  EXPECT_THAT(decoded<std::uint8_t>(datatype::boolean, "[true, false]", 2), ElementsAre(1, 0));
  auto const request = decode_infer_request(
      body_of("BYTES", "[3]", R"(["ab", "", "\u00e9\u0000"])"), model_of(datatype::bytes, {3}));
  EXPECT_EQ(request.inputs[0].data, bytes_with({"ab", "", std::string{"\xC3\xA9\0", 3}}).data);
}

TEST(oip_codec, data_may_be_nested_or_flat) {
  auto const model = model_of(datatype::uint8, {-1, -1, -1});
  std::vector<std::byte> expected;
  for (int i = 0; i < 8; ++i) expected.push_back(static_cast<std::byte>(i));
  for (auto const* const data : {"[0,1,2,3,4,5,6,7]", "[[[0,1],[2,3]],[[4,5],[6,7]]]"}) {
    EXPECT_EQ(decode_infer_request(body_of("UINT8", "[2,2,2]", data), model).inputs[0].data,
              expected)
        << data;
  }
  for (auto const* const data : {"[]", "[[],[]]"}) {
    auto const request = decode_infer_request(body_of("UINT8", "[2,0,3]", data), model);
    EXPECT_TRUE(request.inputs[0].data.empty()) << data;
  }
  EXPECT_EQ(decode_infer_request(body_of("UINT8", "[]", "[5]"), model_of(datatype::uint8, {}))
                .inputs[0]
                .data.size(),
            1U);
}

TEST(oip_codec, keys_may_come_in_any_order) {
  std::vector<std::string> keys{R"("name":"x")", R"("datatype":"INT8")", R"("shape":[2])",
                                R"("data":[1,-2])"};
  std::sort(keys.begin(), keys.end());
  do {
    auto const body =
        R"({"inputs":[{)" + keys[0] + "," + keys[1] + "," + keys[2] + "," + keys[3] + "}]}";
    auto const request = decode_infer_request(body, model_of(datatype::int8, {-1}));
    EXPECT_THAT(elements_of<std::int8_t>(request.inputs[0]), ElementsAre(1, -2)) << body;
  } while (std::next_permutation(keys.begin(), keys.end()));
}

struct fault {
  std::string body;
  std::vector<std::string> says;
  error_kind kind = error_kind::invalid_argument;
};

/// Every fault must be an error of its kind that says all of its words.
void expect_faults(std::vector<fault> const& faults, model_metadata const& model) {
  for (auto const& each : faults) {
    auto const failure =
        thrown_by([&] { static_cast<void>(decode_infer_request(each.body, model)); });
    ASSERT_TRUE(failure.has_value()) << each.body;
    EXPECT_EQ(failure->kind(), each.kind) << each.body;
    for (auto const& word : each.says) EXPECT_THAT(failure->what(), HasSubstr(word)) << each.body;
  }
}

TEST(oip_codec, refuses_tensors_that_do_not_hold_together) {
  auto const model = model_of(datatype::int8, {-1, 3});
  expect_faults(
      {
          {body_of("INT8", "[1,3]", "[1,2]"), {"input 'x'", "2 elements", "needs 3"}},
          {body_of("INT8", "[1,3]", "[[1,2,3],[4,5,6]]"), {"input 'x'", "[2,3]", "[1,3]"}},
          {body_of("INT8", "[2,3]", "[[1,2,3],[4,5]]"), {"input 'x'", "ragged", "3 elements", "2"}},
          {body_of("INT8", "[2,3]", "[[1,2,3],4,5,6]"), {"input 'x'", "mixes"}},
          {body_of("INT8", "[2,3]", "[1,[2,3]]"), {"input 'x'", "mixes"}},
          {body_of("INT8", "[2,3]", "[[],1]"), {"input 'x'", "mixes"}},
          {body_of("INT8", "[2,3]", "[[],[[]]]"), {"input 'x'", "ragged"}},
          {body_of("INT8", "[1,3]", "[[[1],[2],[3]]]"), {"input 'x'", "nested as [1,3,1]"}},
          {body_of("INT8", "[2,3]", "[[1,2,3,4,5,6]]"), {"input 'x'", "nested as [1,6]", "flat"}},
          {body_of("INT8", "[1,3]", "5"), {"'data' of input 'x'", "a number", "a list"}},
          {body_of("INT8", "[1,3]", R"({"a":1})"), {"'data' of input 'x'", "an object", "a list"}},
          {body_of("INT8", "[1,3]", R"([{"a":1}])"), {"input 'x'", "an object"}},
          {body_of("INT8", "[-1,3]", "[1,2,3]"), {"input 'x'", "-1", "at least 0"}},
          {body_of("INT8", "[1.5,3]", "[1,2,3]"), {"input 'x'", "1.5", "integer"}},
          {body_of("INT8", "[[1],3]", "[1,2,3]"), {"input 'x'", "nested"}},
          {body_of("INT8", R"(["1",3])", "[1,2,3]"), {"input 'x'", "integer"}},
          {body_of("INT8", "3", "[1,2,3]"), {"'shape' of input 'x'", "a list"}},
          {body_of("INT8", "[9223372036854775807,3]", "[1,2,3]"),
           {"input 'x'", "more elements than"}},
          {body_of("INT8", "[18446744073709551615,3]", "[1]"),
           {"input 'x'", "18446744073709551615"}},
          {body_of("INT8", "[4611686018427387904,3]", "[1]"), {"input 'x'", "1 elements", "needs"}},
          {body_of("INT8", "[3]", "[1,2,3]"), {"input 'x'", "1 dimensions", "[-1,3]"}},
          {body_of("INT8", "[1,4]", "[1,2,3,4]"),
           {"input 'x'", "[-1,3]", "dimension 1 must be 3, not 4"}},
          {body_of("INT16", "[1,3]", "[1,2,3]"), {"input 'x'", "INT16", "takes INT8"}},
          {body_of("int8", "[1,3]", "[1,2,3]"), {"input 'x'", "'int8'", "one of", "BF16"}},
          {R"({"inputs":[{"name":"x","shape":[1,3],"data":[1,2,3]}]})",
           {"input 'x'", "no datatype"}},
          {R"({"inputs":[{"name":"x","datatype":"INT8","data":[1,2,3]}]})",
           {"input 'x'", "no shape"}},
          {R"({"inputs":[{"name":"x","datatype":"INT8","shape":[1,3]}]})",
           {"input 'x'", "no data"}},
      },
      model);
}

// The product wraps around to 0 in 64 bits; only the claimed element count may not be believed.
TEST(oip_codec, a_huge_claimed_shape_is_refused_without_memory_for_it) {
  expect_faults(
      {{body_of("FP64", "[4294967296,4294967296]", "[]"), {"input 'x'", "more elements than"}},
       {body_of("FP64", "[4294967296,4294967295]", "[1]"), {"input 'x'", "1 elements"}}},
      model_of(datatype::fp64, {-1, -1}));
}

TEST(oip_codec, refuses_elements_that_the_type_cannot_hold) {
  struct row {
    datatype type;
    std::string element;
    std::vector<std::string> says;
  };
  std::vector<row> const rows{
      {datatype::int8, "128", {"128", "INT8", "-128 to 127"}},
      {datatype::int8, "-129", {"-129"}},
      {datatype::uint8, "-1", {"-1", "0 to 255"}},
      {datatype::uint8, "256", {"256"}},
      {datatype::int16, "32768", {"32768"}},
      {datatype::uint16, "65536", {"65536"}},
      {datatype::int32, "2147483648", {"2147483648"}},
      {datatype::uint32, "4294967296", {"4294967296"}},
      {datatype::int64, "9223372036854775808", {"9223372036854775808"}},
      {datatype::int64, "-9223372036854775809", {"INT64"}},
      {datatype::uint64, "18446744073709551616", {"UINT64"}},
      {datatype::int32, "1.0", {"is 1.0", "integer"}},
      {datatype::int32, "1e3", {"is 1000.0", "integer"}},
      {datatype::int32, "true", {"true", "integer"}},
      {datatype::int32, "\"1\"", {"\"1\"", "integer"}},
      {datatype::int32, "null", {"null", "integer"}},
      {datatype::boolean, "1", {"true or false"}},
      {datatype::boolean, "\"true\"", {"true or false"}},
      {datatype::fp32, "3.5e38", {"FP32", "3.40282e+38"}},
      {datatype::fp32, "-1e39", {"FP32"}},
      {datatype::fp16, "65520", {"FP16", "65504"}},
      {datatype::bf16, "3.4e38", {"BF16"}},
      {datatype::fp32, "null", {"null", "\"NaN\""}},
      {datatype::fp32, "true", {"true"}},
      {datatype::fp32, "\"nan\"", {"\"nan\"", "\"NaN\""}},
      {datatype::bytes, "1", {"strings"}},
      {datatype::bytes, "null", {"strings"}},
  };
  for (auto const& each : rows) {
    auto says = each.says;
    says.insert(says.end(), {"element 0", "input 'x'"});
    expect_faults(
        {{body_of(std::string{datatype_name(each.type)}, "[1]", "[" + each.element + "]"), says}},
        model_of(each.type, {-1}));
  }
}

TEST(oip_codec, refuses_wrong_sets_of_tensors) {
  model_metadata const model{"m",
                             {"1"},
                             "p",
                             {{"x", datatype::int8, {1}}, {"z", datatype::int8, {1}}},
                             {{"y", datatype::int8, {1}}}};
  std::string const x = R"({"name":"x","datatype":"INT8","shape":[1],"data":[1]})";
  std::string const z = R"({"name":"z","datatype":"INT8","shape":[1],"data":[1]})";
  std::string const w = R"({"name":"w","datatype":"INT8","shape":[1],"data":[1]})";
  expect_faults(
      {
          {"{}", {"no inputs", "'x', 'z'"}},
          {R"({"inputs":[]})", {"input 'x' is missing"}},
          {R"({"inputs":[)" + x + "]}", {"input 'z' is missing", "'x', 'z'"}},
          {R"({"inputs":[)" + x + "," + z + "," + w + "]}", {"no input 'w'", "'x', 'z'"}},
          {R"({"inputs":[)" + x + "," + x + "]}", {"input 'x' is given twice"}},
          {R"({"inputs":[{"datatype":"INT8"}]})", {"inputs[0] has no name"}},
          {R"({"inputs":[)" + x + "," + z + R"(],"outputs":[{"name":"q"}]})",
           {"no output 'q'", "'y'"}},
          {R"({"inputs":[)" + x + "," + z + R"(],"outputs":[{}]})", {"outputs[0] has no name"}},
          {R"({"inputs":[)" + x + "," + z + R"(],"outputs":[{"name":"y"},{"name":"y"}]})",
           {"output 'y'", "twice"}},
          {R"({"inputs":{}})", {"'inputs' of the request is an object", "a list"}},
          {R"({"inputs":[1]})", {"'inputs'", "objects"}},
          {R"({"inputs":[[]]})", {"'inputs'", "objects"}},
          {R"({"inputs":null})", {"'inputs' of the request is null"}},
          {R"({"inputs":[{"name":1}]})", {"'name' of inputs[0] is a number", "a string"}},
          {R"({"inputs":[{"name":"x","parameters":[]}]})",
           {"'parameters' of input 'x' is a list", "an object"}},
          {R"({"inputs":[{"name":"x","parameters":{"a":[]}}]})", {"'a' of input 'x' is a list"}},
          {R"({"parameters":{"parameters":{"timeout":5}}})",
           {"'parameters' of the request's parameters", "an object"}},
          {R"({"inputs":[{"name":"x","parameters":{"parameters":{}}}]})",
           {"'parameters' of input 'x'", "an object"}},
          {R"({"id":7})", {"'id' of the request is a number", "a string"}},
          {R"({"parameters":{"timeout":-1},"inputs":[]})", {"timeout", "-1", "microseconds"}},
          {R"({"parameters":{"timeout":"1s"},"inputs":[]})", {"timeout", "microseconds"}},
          {R"({"parameters":{"timeout":null}})", {"'timeout'", "null"}},
          {R"({"parameters":{"priority":-1},"inputs":[]})", {"'priority' is -1", "at least 0"}},
          {R"({"parameters":{"priority":1.0},"inputs":[]})", {"'priority' is 1.0"}},
          {R"({"parameters":{"priority":"1"},"inputs":[]})", {"'priority' is \"1\""}},
      },
      model);
}

TEST(oip_codec, refuses_extensions_that_it_lacks) {
  auto const x = [](std::string const& parameters) {
    return R"({"inputs":[{"name":"x","datatype":"INT8","shape":[1],"parameters":)" + parameters +
           "}]}";
  };
  auto const unsupported = error_kind::unsupported;
  expect_faults(
      {
          {x(R"({"shared_memory_region":"r"})"),
           {"input 'x'", "shared_memory_region"},
           unsupported},
          {R"({"inputs":[],"outputs":[{"name":"y","parameters":{"classification":3}}]})",
           {"output 'y'"},
           unsupported},
      },
      model_of(datatype::int8, {1}));
}

TEST(oip_codec, refuses_what_is_not_json_of_a_request) {
  std::string const deep = R"({"inputs":[{"name":"x","data":)" + std::string(100'000, '[');
  std::string const deep_elsewhere = R"({"ignored":)" + std::string(100'000, '[');
  std::string many_keys = "{";
  for (int i = 0; i < 300; ++i) many_keys += "\"k" + std::to_string(i) + "\":0,";
  std::string many_tensors = R"({"inputs":[{})";
  for (int i = 0; i < 2000; ++i) many_tensors += ",{}";
  expect_faults(
      {
          {"", {"not JSON"}},
          {"[]", {"must be an object"}},
          {"7", {"must be an object"}},
          {"\"text\"", {"must be an object"}},
          {"{", {"not JSON"}},
          {"{} {}", {"not JSON"}},
          {R"({"inputs":[},)", {"not JSON"}},
          {R"({"inputs":[{"name":"x","data":[NaN]}]})", {"not JSON", "\"NaN\""}},
          {R"({"inputs":[{"name":"x","data":[-Infinity]}]})", {"not JSON", "\"-Infinity\""}},
          {R"({"inputs":[{"name":"x","data":[1e999]}]})", {"not JSON", "1e999"}},
          {R"({"inputs":[{"name":"x","data":[01]}]})", {"not JSON", "byte 32"}},
          {R"({"inputs":[{"name":"x","data":[1],"zz":?}]})", {"not JSON", "byte 40"}},
          {R"({"inputs":[{"name":"q","data":[1,]}]})", {"not JSON", "byte 34"}},
          {R"({"inputs":[{"name":"x","data":[1 2]}]})", {"not JSON", "','"}},
          {R"({"inputs":[{"name":"x","data":["\ud800"]}]})", {"not JSON", "escape"}},
          {"{\"inputs\":[{\"name\":\"x\",\"data\":[\"\xFF\"]}]}", {"not JSON", "UTF-8"}},
          {"{\"inputs\":[{\"name\":\"x\",\"data\":[\"\n\"]}]}", {"not JSON", "control"}},
          {"{\"id\":\"\xFF\"}", {"not JSON"}},
          {"{\"id\":\"\xED\xA0\x80\"}", {"not JSON"}},
          {R"({"id":"\ud800"})", {"not JSON"}},
          {std::string{"{\"id\":\"a\0b\"}", 12}, {"not JSON"}},
          {std::string{"{}\0", 3}, {"not JSON", "byte 3", "zero"}},
          {R"({"id":"a","id":"b"})", {"'id'", "twice"}},
          {R"({"inputs":[],"inputs":[]})", {"'inputs'", "twice"}},
          {R"({"inputs":[{"name":"x","data":[1],"data":[2]}]})", {"'data'", "twice", "input 'x'"}},
          {R"({"inputs":[{"name":"x","parameters":{"a":1,"a":2}}]})", {"'a'", "twice"}},
          {deep, {"deeper than 64"}},
          {deep_elsewhere, {"deeper than 64"}},
          {many_keys, {"more than 256 keys"}},
          {many_tensors, {"more than 1024 inputs"}},
      },
      model_of(datatype::int8, {1}));
}

TEST(oip_codec, encodes_a_whole_response) {
  infer_response response{"add", "3", "req-1", {}};
  response.outputs.push_back(
      {"y", datatype::fp32, {1, 3}, tensor_with<float>(datatype::fp32, {1, -0.1F, 1e30F}).data});
  response.outputs.push_back(
      {"q\"uote", datatype::boolean, {2}, std::vector{std::byte{1}, std::byte{0}}});
  EXPECT_EQ(encode_infer_response(response).json,
            R"({"model_name":"add","model_version":"3","id":"req-1","outputs":[)"
            R"({"name":"y","datatype":"FP32","shape":[1,3],"data":[1.0,-0.1,1e+30]},)"
            R"({"name":"q\"uote","datatype":"BOOL","shape":[2],"data":[true,false]}]})");
  EXPECT_EQ(encode_infer_response({"m", "", "", {}}).json, R"({"model_name":"m","outputs":[]})");
}

TEST(oip_codec, encoded_numbers_are_exact) {
  EXPECT_EQ(encoded_data(tensor_with<std::int64_t>(datatype::int64, {9007199254740993, INT64_MIN})),
            (json{9007199254740993, INT64_MIN}));
  EXPECT_EQ(encoded_data(tensor_with<std::uint64_t>(datatype::uint64, {UINT64_MAX})),
            json::array({UINT64_MAX}));
  EXPECT_EQ(encoded_data(tensor_with<std::int8_t>(datatype::int8, {-128})), json::array({-128}));
  EXPECT_EQ(encoded_data(tensor_with<std::uint16_t>(datatype::bf16, {0x3F81})),
            json::array({1.0078125}));
  for (float const value : {0.1F, 1.0F / 3, std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max()}) {
    auto const data = encoded_data(tensor_with<float>(datatype::fp32, {value}));
    EXPECT_EQ(data[0].get<float>(), value);
    EXPECT_TRUE(data[0].is_number_float());
  }
  EXPECT_EQ(encoded_data(bytes_with({"a\"b", "\xC3\xA9", ""})), (json{"a\"b", "\xC3\xA9", ""}));
}

TEST(oip_codec, a_tensor_is_the_same_after_encoding_and_decoding) {
  std::vector<tensor> const tensors{
      tensor_with<float>(datatype::fp32, {0.1F, -1e-40F, 16777217.0F}),
      tensor_with<double>(datatype::fp64, {0.1, 5e-324, 1.7976931348623157e308}),
      tensor_with<std::uint16_t>(datatype::fp16, {0x0001, 0x7BFF, 0x3555, 0x8000, 0xFC00}),
      tensor_with<std::uint16_t>(datatype::bf16, {0x0001, 0x7F7F, 0x8000}),
      tensor_with<std::int32_t>(datatype::int32, {INT32_MIN, 0, INT32_MAX}),
      bytes_with({"", "text", "\xF0\x9F\x98\x80"}),
  };
  for (auto const& original : tensors) {
    auto const response = json::parse(encode_infer_response(response_with(original)).json);
    auto const back = decode_infer_request(json{{"inputs", response["outputs"]}}.dump(),
                                           {"m", {}, "", {{"y", original.type, {-1}}}, {}});
    EXPECT_EQ(back.inputs.at(0).data, original.data) << datatype_name(original.type);
  }
}

TEST(oip_codec, refuses_to_encode_what_does_not_hold_together) {
  auto const kind_of = [](tensor output) {
    auto const failure = thrown_by(
        [&] { static_cast<void>(encode_infer_response(response_with(std::move(output)))); });
    return failure ? std::optional{failure->kind()} : std::nullopt;
  };
  EXPECT_EQ(kind_of({"y", datatype::fp32, {2}, std::vector<std::byte>(7)}), error_kind::internal);
  EXPECT_EQ(kind_of({"y", datatype::fp32, {-1}, {}}), error_kind::internal);
  EXPECT_EQ(kind_of({"y", datatype::fp64, {INT64_MAX, 4}, {}}), error_kind::internal);
  EXPECT_EQ(kind_of({"y", datatype::bytes, {1}, std::vector<std::byte>(3)}), error_kind::internal);
  EXPECT_EQ(kind_of({"y", datatype::bytes, {1}, std::vector<std::byte>(4, std::byte{0xFF})}),
            error_kind::internal);
  EXPECT_EQ(kind_of({"y", datatype::bytes, {1}, std::vector<std::byte>(8)}), error_kind::internal);
  EXPECT_EQ(kind_of(bytes_with({"\xFF"})), error_kind::unsupported);
}

TEST(oip_codec, metadata_lists_tensors_as_the_protocol_says) {
  auto const metadata = encode_model_metadata(model_of(datatype::bytes, {-1, 2}));
  EXPECT_EQ(metadata, json::parse(R"({"name":"m","versions":["1"],"platform":"pytorch_libtorch",
    "inputs":[{"name":"x","datatype":"BYTES","shape":[-1,2]}],"outputs":[{"name":"y","datatype":"BYTES","shape":[-1,2]}]})"));
}

TEST(oip_codec, an_error_is_json_whatever_it_quotes) {
  EXPECT_EQ(json::parse(encode_error("a \"b\" \xFF"))["error"], "a \"b\" \xEF\xBF\xBD");
  EXPECT_LT(encode_error(std::string(1'000'000, 'x')).size(), 6000U);
  std::string const words(4096, 'x');
  EXPECT_EQ(json::parse(encode_error("model 'm': " + words))["error"], "model 'm': " + words);
}

}  // namespace
}  // namespace sluice::server
