/// Tensors behind the JSON of requests and answers: what of oip_codec.hpp and api.hpp is about them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "runtime/server/http/api.hpp"
#include "runtime/server/http/oip_codec.hpp"
#include "runtime/server/inference/datatypes.hpp"
#include "tests/runtime/server/adding_service.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

model_metadata model_with(std::vector<tensor_spec> const& inputs) {
  return {"m", {"1"}, "pytorch_libtorch", inputs, inputs};
}

json input(std::string const& name, std::string const& type, json const& shape,
           json const& binary_data_size) {
  return {{"name", name},
          {"datatype", type},
          {"shape", shape},
          {"parameters", {{"binary_data_size", binary_data_size}}}};
}

std::string text_of(tensor_bytes const& bytes) {
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

template <typename Element>
std::string bytes_of(std::vector<Element> const& values) {
  std::string bytes(values.size() * sizeof(Element), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string strings_of(std::vector<std::string> const& values) {
  std::string bytes;
  for (auto const& each : values) {
    bytes += bytes_of<std::uint32_t>({static_cast<std::uint32_t>(each.size())}) + each;
  }
  return bytes;
}

/// `json_text` and `raw` as the body of a request to the API, and what becomes of it.
oip_api::outcome handled(oip_api const& api, std::string const& json_text, std::string const& raw,
                         std::optional<std::string> const& length) {
  auto const body = std::make_shared<std::string>(json_text + raw);
  http_request request{"POST", "/v2/models/add/infer", *body, {}, {}, body};
  if (length) request.binary_header_length = *length;
  return api.handle(request);
}

decoded_request decoded(json const& request, std::string const& raw, model_metadata const& model) {
  auto const body = std::make_shared<std::string>(raw);
  auto const text = request.dump();
  return decode_infer_request({text, std::as_writable_bytes(std::span{*body}), true, body}, model);
}

struct typed_bytes {
  datatype type;
  std::string bytes;
  std::int64_t count;
};

std::vector<typed_bytes> tensors_of_every_type() {
  constexpr auto nan = std::numeric_limits<double>::quiet_NaN();
  return {
      {datatype::boolean, bytes_of<std::uint8_t>({0, 1, 1}), 3},
      {datatype::uint8, bytes_of<std::uint8_t>({0, 255}), 2},
      {datatype::uint16, bytes_of<std::uint16_t>({65535, 1}), 2},
      {datatype::uint32, bytes_of<std::uint32_t>({UINT32_MAX}), 1},
      {datatype::uint64, bytes_of<std::uint64_t>({UINT64_MAX, 2}), 2},
      {datatype::int8, bytes_of<std::int8_t>({-128, 127}), 2},
      {datatype::int16, bytes_of<std::int16_t>({-32768}), 1},
      {datatype::int32, bytes_of<std::int32_t>({INT32_MIN, 5}), 2},
      {datatype::int64, bytes_of<std::int64_t>({INT64_MIN, INT64_MAX}), 2},
      // numbers that are none, with bits that must not be lost
      {datatype::fp16, bytes_of<std::uint16_t>({0x7C01, 0xFE23, 0x8000}), 3},
      {datatype::bf16, bytes_of<std::uint16_t>({0x7F81, 0xFFC1, 0x0001}), 3},
      {datatype::fp32, bytes_of<std::uint32_t>({0x7F800001, 0xFFC12345, 0x3F800000}), 3},
      {datatype::fp64, bytes_of<double>({nan, 5e-324}), 2},
      {datatype::fp64, bytes_of<std::uint64_t>({0x7FF0000000000001, 0xFFF8DEADBEEF0000}), 2},
      {datatype::bytes, strings_of({"", "text", std::string{"\xFF\0\xFE", 3}}), 3},
      {datatype::fp32, "", 0},
      {datatype::bytes, "", 0},
  };
}

TEST(binary_tensors, come_and_go_bit_by_bit) {
  for (auto const& each : tensors_of_every_type()) {
    auto const name = std::string{datatype_name(each.type)};
    auto const model = model_with({{"x", each.type, {-1}}});
    auto const request = decoded({{"inputs", {input("x", name, {each.count}, each.bytes.size())}}},
                                 each.bytes, model);
    ASSERT_EQ(request.inputs.size(), 1U) << name;
    EXPECT_THAT(request.inputs[0].shape, ElementsAre(each.count)) << name;
    EXPECT_EQ(text_of(request.inputs[0].data), each.bytes) << name;

    auto const answer = encode_infer_response({"m", "1", "", request.inputs}, {true, {}});
    EXPECT_EQ(json::parse(answer.json)["outputs"],
              json::array({input("x", name, {each.count}, each.bytes.size())}));
    ASSERT_EQ(answer.tensors.size(), 1U) << name;
    EXPECT_EQ(text_of(answer.tensors[0]), each.bytes) << name;
    // neither way are they copied
    EXPECT_EQ(answer.tensors[0].data(), request.inputs[0].data.data()) << name;
  }
}

TEST(binary_tensors, stand_in_the_order_of_the_request_between_those_in_json) {
  auto const model = model_with({{"a", datatype::int16, {-1}},
                                 {"b", datatype::fp32, {2}},
                                 {"c", datatype::uint8, {-1, -1}},
                                 {"d", datatype::int8, {0}}});
  json const request{{"inputs",
                      {input("d", "INT8", {0}, 0),
                       input("c", "UINT8", {2, 3}, 6),
                       {{"name", "b"}, {"datatype", "FP32"}, {"shape", {2}}, {"data", {1, 2}}},
                       input("a", "INT16", {2}, 4)}}};
  auto const seen = decoded(request, "abcdefAABB", model);
  ASSERT_EQ(seen.inputs.size(), 4U);
  EXPECT_EQ(text_of(seen.inputs[0].data), "AABB");
  EXPECT_EQ(text_of(seen.inputs[1].data), bytes_of<float>({1, 2}));
  EXPECT_EQ(text_of(seen.inputs[2].data), "abcdef");
  EXPECT_EQ(text_of(seen.inputs[3].data), "");
}

TEST(binary_tensors, are_parts_of_the_body_and_keep_it) {
  auto body = std::make_shared<std::string>("12345678");
  std::weak_ptr<std::string> const watched = body;
  auto const text = json{{"inputs", {input("x", "INT8", {8}, 8)}}}.dump();
  auto const raw = std::as_writable_bytes(std::span{*body});
  auto request =
      decode_infer_request({text, raw, true, body}, model_with({{"x", datatype::int8, {8}}}));
  EXPECT_EQ(request.inputs[0].data.data(), raw.data());
  body.reset();
  EXPECT_EQ(text_of(request.inputs[0].data), "12345678");
  request.inputs.clear();
  EXPECT_TRUE(watched.expired());
}

TEST(binary_tensors, that_do_not_fit_are_refused_with_what_would) {
  auto const model = model_with({{"x", datatype::fp32, {-1}}});
  auto const flags = model_with({{"x", datatype::boolean, {-1}}});
  auto const words = model_with({{"x", datatype::bytes, {-1}}});
  auto const x = [](std::string const& type, json const& shape, json const& size) {
    return json{{"inputs", {input("x", type, shape, size)}}};
  };
  json both = x("FP32", {1}, 4);
  both["inputs"][0]["data"] = {1};
  json twice = x("FP32", {1}, 4);
  twice["inputs"].push_back(twice["inputs"][0]);
  json unlike = x("FP32", {1}, 4);
  unlike["inputs"][0]["parameters"] = {{"binary_data", true}};
  struct row {
    json request;
    std::string raw;
    std::vector<std::string> says;
    model_metadata model;
  };
  std::string const four(4, '\0');
  std::vector<row> const rows{
      {x("FP32", {2}, 4),
       four,
       {"input 'x'", "size of 4", "[2]", "2 elements of FP32 take 8"},
       model},
      {x("FP32", {1}, 8), four + four, {"size of 8", "1 elements of FP32 take 4"}, model},
      {x("FP32", {0}, 4), four, {"size of 4", "0 elements of FP32 take 0"}, model},
      {x("FP32", {2}, 8),
       four,
       {"input 'x'", "size of 8", "4 of the 4 bytes", "Inference-Header"},
       model},
      {x("FP32", {1}, 4), "", {"size of 4", "0 of the 0 bytes"}, model},
      {x("FP32", {1}, 4), four + "x", {"5 bytes behind the JSON", "take 4", "must be 5"}, model},
      {x("FP32", {1}, UINT64_MAX), four, {"18446744073709551615"}, model},
      {x("FP32", {1}, -4), four, {"binary_data_size of -4", "number of bytes"}, model},
      {x("FP32", {1}, 4.0), four, {"binary_data_size of 4.0", "number of bytes"}, model},
      {x("FP32", {1}, "4"), four, {"binary_data_size of \"4\"", "number of bytes"}, model},
      {x("FP32", {1}, true), four, {"binary_data_size of true", "number of bytes"}, model},
      {x("FP32", {1ULL << 62U}, 0), "", {"more bytes than 64 bits"}, model},
      {both, four, {"both data and binary_data_size", "one of them"}, model},
      {twice, four + four, {"given twice"}, model},
      {unlike, four, {"'binary_data'", "'binary_data_size'"}, model},
      {x("BOOL", {4}, 4), std::string{"\0\1\2\0", 4}, {"element 2 is 2", "0 and 1"}, flags},
      {x("BYTES", {1}, 3), "abc", {"element 0 of 1 begins at byte 0", "length of 4 bytes"}, words},
      {x("BYTES", {2}, 5), strings_of({"a"}), {"element 1 of 2 begins at byte 5"}, words},
      {x("BYTES", {1}, 6),
       bytes_of<std::uint32_t>({3}) + "ab",
       {"element 0 of 1 begins at byte 0"},
       words},
      {x("BYTES", {1}, 10), strings_of({"a", "b"}), {"1 elements", "end after 5"}, words},
      {x("BYTES", {1LL << 60U}, 4), four, {"element 1 of"}, words},
  };
  for (auto const& each : rows) {
    auto const failure =
        thrown_by([&] { static_cast<void>(decoded(each.request, each.raw, each.model)); });
    ASSERT_TRUE(failure.has_value()) << each.request;
    EXPECT_EQ(failure->kind(), error_kind::invalid_argument) << each.request;
    for (auto const& word : each.says) {
      EXPECT_THAT(failure->what(), HasSubstr(word)) << each.request;
    }
  }
}

TEST(binary_tensors, are_answered_where_they_are_asked_for) {
  auto const form_of = [](json more) {
    more["inputs"] = json::array();
    return decode_infer_request(
               more.dump(),
               {"m", {}, "", {}, {{"y", datatype::fp32, {1}}, {"z", datatype::fp32, {1}}}})
        .form;
  };
  auto const output = [](json const& parameters) {
    return json{{"name", "y"}, {"parameters", parameters}};
  };
  EXPECT_FALSE(form_of(json::object()).is_binary("y"));
  EXPECT_TRUE(form_of({{"parameters", {{"binary_data_output", true}}}}).is_binary("y"));
  EXPECT_FALSE(form_of({{"parameters", {{"binary_data_output", false}}}}).is_binary("y"));
  EXPECT_TRUE(form_of({{"outputs", {output({{"binary_data", true}})}}}).is_binary("y"));
  auto const mixed = form_of({{"parameters", {{"binary_data_output", true}}},
                              {"outputs", {output({{"binary_data", false}}), {{"name", "z"}}}}});
  EXPECT_FALSE(mixed.is_binary("y"));
  EXPECT_TRUE(mixed.is_binary("z"));
  for (auto const& [asked, words] : std::vector<std::pair<json, std::string>>{
           {{{"parameters", {{"binary_data_output", 1}}}},
            "'binary_data_output' of the request is 1"},
           {{{"outputs", {output({{"binary_data", "yes"}})}}}, "of output 'y' is \"yes\""},
           {{{"outputs", {output({{"binary_data_size", 4}})}}}, "give 'binary_data'"}}) {
    auto const failure =
        thrown_by([&, &json_text = asked] { static_cast<void>(form_of(json_text)); });
    ASSERT_TRUE(failure.has_value()) << asked;
    EXPECT_EQ(failure->kind(), error_kind::invalid_argument);
    EXPECT_THAT(failure->what(), HasSubstr(words));
  }
}

TEST(binary_tensors, and_json_mix_in_an_answer) {
  auto const numbers = [](std::string name, std::vector<std::uint8_t> const& values) {
    auto bytes = tensor_bytes::unwritten(values.size());
    if (!values.empty()) std::memcpy(bytes.data(), values.data(), values.size());
    return tensor{
        std::move(name), datatype::uint8, {static_cast<std::int64_t>(values.size())}, bytes};
  };
  infer_response const response{
      "m",
      "1",
      "",
      {numbers("a", {1, 2}), numbers("b", {3}), numbers("none", {}), numbers("c", {4, 5})}};
  auto const answer = encode_infer_response(response, {true, {{"b", false}}});
  EXPECT_EQ(answer.json,
            R"({"model_name":"m","model_version":"1","outputs":[)"
            R"({"name":"a","datatype":"UINT8","shape":[2],"parameters":{"binary_data_size":2}},)"
            R"({"name":"b","datatype":"UINT8","shape":[1],"data":[3]},)"
            R"({"name":"none","datatype":"UINT8","shape":[0],"parameters":{"binary_data_size":0}},)"
            R"({"name":"c","datatype":"UINT8","shape":[2],"parameters":{"binary_data_size":2}}]})");
  ASSERT_EQ(answer.tensors.size(), 3U);
  EXPECT_EQ(text_of(answer.tensors[0]) + text_of(answer.tensors[2]), "\1\2\4\5");
  auto const broken = thrown_by([] {
    static_cast<void>(encode_infer_response(
        {"m", "", "", {{"y", datatype::fp32, {2}, std::vector<std::byte>(7)}}}, {true, {}}));
  });
  ASSERT_TRUE(broken.has_value());
  EXPECT_EQ(broken->kind(), error_kind::internal);
}

TEST(binary_tensors, begin_where_the_header_says) {
  adding_service service;
  oip_api const api{service};
  auto const text =
      json{{"inputs", {input("a", "FP32", {1}, 4), input("b", "FP32", {1}, 4)}}}.dump();
  auto const raw = bytes_of<float>({1, 2});
  auto const plain = R"({"inputs":[{"name":"a","datatype":"FP32","shape":[1],"data":[1]},)"
                     R"({"name":"b","datatype":"FP32","shape":[1],"data":[2]}]})";
  auto const size = [](std::string const& of, std::size_t more = 0) {
    return std::to_string(of.size() + more);
  };
  auto const right = handled(api, text, raw, size(text));
  ASSERT_TRUE(std::holds_alternative<decoded_request>(right));
  EXPECT_EQ(text_of(std::get<decoded_request>(right).inputs.at(1).data), bytes_of<float>({2}));
  EXPECT_TRUE(std::holds_alternative<decoded_request>(handled(api, plain, "", size(plain))));

  struct row {
    std::string json_text, raw;
    std::optional<std::string> length;
    unsigned status;
    std::vector<std::string> says;
  };
  for (auto const& each : std::vector<row>{
           {text, raw, size(text, 9), 400, {"but the body has", size(text + raw), "JSON"}},
           {text, raw, std::string(30, '9'), 400, {std::string(30, '9'), "but the body has"}},
           {text, raw, "-1", 400, {"'-1'", "number of bytes"}},
           {text, raw, "1.0", 400, {"'1.0'", "number of bytes"}},
           {text, raw, "+5", 400, {"'+5'", "number of bytes"}},
           {text, raw, "", 400, {"''", "number of bytes"}},
           {text,
            raw,
            "10",
            400,
            {"Inference-Header-Content-Length", "first 10 bytes", "not JSON"}},
           {text, raw, size(text, 1), 400, {"Inference-Header-Content-Length", "not JSON"}},
           {text, raw, {}, 400, {"the body is not JSON"}},
           {text,
            "",
            {},
            400,
            {"input 'a'", "0 of the 0 bytes", "Inference-Header-Content-Length"}},
           {text, raw, "0", 501, {"without JSON"}},
           {plain, raw, size(plain), 400, {"8 bytes behind the JSON", "take 0"}},
       }) {
    auto const outcome = handled(api, each.json_text, each.raw, each.length);
    ASSERT_TRUE(std::holds_alternative<http_reply>(outcome)) << *each.length;
    auto const& reply = std::get<http_reply>(outcome);
    EXPECT_EQ(reply.status, each.status) << reply.body;
    for (auto const& word : each.says) EXPECT_THAT(reply.body, HasSubstr(word));
  }
}

}  // namespace
}  // namespace sluice::server
