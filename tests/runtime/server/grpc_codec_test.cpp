/// Messages of inference calls, and the calls that are answered at once, without sockets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "runtime/server/grpc/calls.hpp"
#include "runtime/server/grpc/inference.pb.h"
#include "runtime/server/grpc/message_codec.hpp"
#include "tests/runtime/server/adding_service.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using inference::ModelInferRequest;
using testing::ElementsAre;
using testing::HasSubstr;

template <typename Element>
std::string bytes_of(std::vector<Element> const& values) {
  std::string bytes(values.size() * sizeof(Element), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string text_of(tensor_bytes const& bytes) {
  return {reinterpret_cast<char const*>(bytes.data()), bytes.size()};
}

model_metadata model_of(datatype type) {
  return {"m", {"1"}, "", {{"x", type, {-1}}}, {{"y", type, {-1}}}};
}

ModelInferRequest with_input(std::string const& type, std::int64_t extent) {
  ModelInferRequest asked;
  asked.set_model_name("m");
  auto& input = *asked.add_inputs();
  input.set_name("x");
  input.set_datatype(type);
  input.add_shape(extent);
  return asked;
}

inference::InferTensorContents& contents_of(ModelInferRequest& asked) {
  return *asked.mutable_inputs(0)->mutable_contents();
}

/// As they come from a socket, in pieces.
decoded_request decoded(ModelInferRequest const& asked, model_metadata const& model) {
  auto const bytes = asked.SerializeAsString();
  auto const middle = bytes.size() / 2;
  std::string_view const all{bytes};
  return decode_infer_request(read_infer_request({all.substr(0, middle), all.substr(middle)}),
                              model);
}

std::string refusal_of(ModelInferRequest const& asked, model_metadata const& model,
                       error_kind kind = error_kind::invalid_argument) {
  auto const failure = thrown_by([&] { static_cast<void>(decoded(asked, model)); });
  if (!failure) return "it was taken";
  EXPECT_EQ(failure->kind(), kind) << failure->what();
  return failure->what();
}

TEST(grpc_messages, a_raw_tensor_is_a_part_of_the_message_and_keeps_it) {
  auto asked = with_input("FP32", 2);
  asked.set_id("seven");
  asked.set_model_version("3");
  (*asked.mutable_parameters())["timeout"].set_int64_param(5000);
  (*asked.mutable_parameters())["priority"].set_uint64_param(2);
  asked.add_outputs()->set_name("y");
  asked.add_raw_input_contents(bytes_of<float>({1.5F, -2.0F}));
  auto message = read_infer_request({asked.SerializeAsString()});
  auto const* const bytes = message->raw_input_contents(0).data();
  auto const request = decode_infer_request(message, model_of(datatype::fp32));
  EXPECT_EQ(static_cast<void const*>(request.inputs.at(0).data.data()), bytes);
  message.reset();
  EXPECT_EQ(text_of(request.inputs.at(0).data), bytes_of<float>({1.5F, -2.0F}));
  EXPECT_EQ(request.id, "seven");
  EXPECT_EQ(request.version, "3");
  EXPECT_EQ(request.timeout, std::chrono::milliseconds{5});
  EXPECT_EQ(request.priority, 2U);
  EXPECT_THAT(request.outputs, ElementsAre("y"));
}

TEST(grpc_messages, bytes_that_are_no_text_are_refused_without_a_line_of_protobufs) {
  silence_protobuf();
  testing::internal::CaptureStderr();
  EXPECT_THROW(static_cast<void>(read_infer_request({"\x0A\x02\xFF\xFE"})), error);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(grpc_messages, typed_contents_have_the_bytes_of_their_type) {
  struct row {
    datatype type;
    std::string name;
    std::function<void(inference::InferTensorContents&)> fill;
    std::string bytes;
  };
  std::vector<row> const rows{
      {datatype::boolean, "BOOL", [](auto& c) { c.add_bool_contents(true); },
       bytes_of<std::uint8_t>({1})},
      {datatype::int8, "INT8", [](auto& c) { c.add_int_contents(-128); },
       bytes_of<std::int8_t>({-128})},
      {datatype::int16, "INT16", [](auto& c) { c.add_int_contents(-300); },
       bytes_of<std::int16_t>({-300})},
      {datatype::int32, "INT32", [](auto& c) { c.add_int_contents(1 << 30); },
       bytes_of<std::int32_t>({1 << 30})},
      {datatype::int64, "INT64", [](auto& c) { c.add_int64_contents(INT64_MIN); },
       bytes_of<std::int64_t>({INT64_MIN})},
      {datatype::uint8, "UINT8", [](auto& c) { c.add_uint_contents(255); },
       bytes_of<std::uint8_t>({255})},
      {datatype::uint16, "UINT16", [](auto& c) { c.add_uint_contents(65535); },
       bytes_of<std::uint16_t>({65535})},
      {datatype::uint32, "UINT32", [](auto& c) { c.add_uint_contents(UINT32_MAX); },
       bytes_of<std::uint32_t>({UINT32_MAX})},
      {datatype::uint64, "UINT64", [](auto& c) { c.add_uint64_contents(UINT64_MAX); },
       bytes_of<std::uint64_t>({UINT64_MAX})},
      {datatype::fp32, "FP32", [](auto& c) { c.add_fp32_contents(0.1F); }, bytes_of<float>({0.1F})},
      {datatype::fp64, "FP64", [](auto& c) { c.add_fp64_contents(0.1); }, bytes_of<double>({0.1})},
      {datatype::bytes, "BYTES",
       [](auto& c) {
         c.add_bytes_contents(std::string{"a\0b", 3});
       },
       bytes_of<std::uint32_t>({3}) + std::string{"a\0b", 3}},
  };
  for (auto const& each : rows) {
    auto asked = with_input(each.name, 1);
    each.fill(contents_of(asked));
    EXPECT_EQ(text_of(decoded(asked, model_of(each.type)).inputs.at(0).data), each.bytes)
        << each.name;
  }
  auto nothing = with_input("FP32", 0);
  EXPECT_TRUE(decoded(nothing, model_of(datatype::fp32)).inputs.at(0).data.empty());
}

TEST(grpc_messages, wrong_contents_are_refused_with_what_would_be_right) {
  auto const refusal = [](std::string const& name, datatype type, auto fill) {
    auto asked = with_input(name, 1);
    fill(contents_of(asked));
    return refusal_of(asked, model_of(type));
  };
  EXPECT_THAT(refusal("INT8", datatype::int8, [](auto& c) { c.add_int_contents(128); }),
              HasSubstr("the contents of input 'x' have 128, which is beyond -128 … 127"));
  EXPECT_THAT(refusal("UINT16", datatype::uint16, [](auto& c) { c.add_uint_contents(65536); }),
              HasSubstr("beyond 0 … 65535"));
  EXPECT_THAT(refusal("FP32", datatype::fp32, [](auto& c) { c.add_fp64_contents(1); }),
              HasSubstr("are in fp64_contents; elements of FP32 take fp32_contents"));
  EXPECT_THAT(refusal("FP32", datatype::fp32,
                      [](auto& c) {
                        c.add_fp32_contents(1);
                        c.add_int_contents(1);
                      }),
              HasSubstr("have both int_contents and fp32_contents"));
  EXPECT_THAT(refusal("FP32", datatype::fp32,
                      [](auto& c) {
                        c.add_fp32_contents(1);
                        c.add_fp32_contents(2);
                      }),
              HasSubstr("size of 8 bytes and shape [1]: 1 elements of FP32 take 4"));
  for (auto const& [name, type] : {std::pair{"FP16", datatype::fp16}, {"BF16", datatype::bf16}}) {
    EXPECT_THAT(refusal(name, type, [](auto& c) { c.add_fp32_contents(1); }),
                HasSubstr("send them in raw_input_contents"));
  }
}

TEST(grpc_messages, what_is_wrong_with_raw_contents_is_said) {
  auto const model = model_of(datatype::fp32);
  auto asked = with_input("FP32", 1);
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("size of 0 bytes"));
  asked.add_raw_input_contents("123");
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("size of 3 bytes and shape [1]"));
  *asked.mutable_raw_input_contents(0) = "1234";
  EXPECT_EQ(refusal_of(asked, model), "it was taken");
  asked.add_raw_input_contents("");
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("raw_input_contents has 2 for 1 inputs"));
  asked.mutable_raw_input_contents()->RemoveLast();
  *asked.add_inputs() = asked.inputs(0);
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("which has 1 for 2 inputs"));
  asked.add_raw_input_contents("1234");
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("given twice"));
  asked = with_input("FP32", 1);
  asked.add_raw_input_contents("1234");
  contents_of(asked).add_fp32_contents(1);
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("give one of them"));
}

TEST(grpc_messages, shapes_and_parameters_are_checked_as_in_json) {
  auto const model = model_of(datatype::fp32);
  auto asked = with_input("FP32", -1);
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("has -1 in its shape"));
  asked = with_input("FP32", 1);
  for (int i = 0; i < 40; ++i) asked.mutable_inputs(0)->add_shape(1);
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("a shape of 41 dimensions"));
  asked = with_input("FP32", std::numeric_limits<std::int64_t>::max());
  asked.add_raw_input_contents("1234");
  EXPECT_THAT(refusal_of(asked, model), HasSubstr("64 bits"));
  asked = with_input("FP32", 1);
  asked.add_raw_input_contents("1234");
  for (auto const* const name : {"timeout", "priority"}) {
    auto wrong = asked;
    auto& parameter = (*wrong.mutable_parameters())[name];
    parameter.set_int64_param(-1);
    EXPECT_THAT(refusal_of(wrong, model), HasSubstr("is -1"));
    parameter.set_double_param(1.5);
    EXPECT_THAT(refusal_of(wrong, model), HasSubstr("is 1.5"));
    parameter.clear_choice();
    EXPECT_THAT(refusal_of(wrong, model), HasSubstr("has no value"));
  }
  (*asked.mutable_parameters())["sequence_id"].set_string_param("passed over");
  EXPECT_EQ(refusal_of(asked, model), "it was taken");
  (*asked.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
  EXPECT_THAT(refusal_of(asked, model, error_kind::unsupported), HasSubstr("shared_memory_region"));
}

TEST(grpc_messages, what_is_none_is_refused_and_takes_no_more_memory_than_it_has) {
  auto const refusal = [](std::string const& bytes) -> std::string {
    auto const failure = thrown_by([&] { static_cast<void>(read_infer_request({bytes})); });
    return failure ? failure->what() : "it was taken";
  };
  EXPECT_EQ(refusal(""), "it was taken");
  for (std::string const& wrong :
       {std::string{"\xff\xff"}, std::string{"\x2a\x7f"}, std::string{"\x0a\x01\xff"},
        std::string{"\x0b"}, std::string{"\0", 1}}) {
    EXPECT_THAT(refusal(wrong), HasSubstr("is no ModelInferRequest"));
  }
  for (char const tag : {'\x2a', '\x32', '\x3a'}) {
    std::string many;
    for (int i = 0; i < 1025; ++i) many += {tag, '\0'};
    EXPECT_THAT(refusal(many), HasSubstr("more than 1024"));
  }
  auto whole = with_input("FP32", 1);
  whole.add_raw_input_contents("1234");
  auto const bytes = whole.SerializeAsString();
  for (std::size_t end = 0; end < bytes.size(); ++end) {
    static_cast<void>(refusal(bytes.substr(0, end)));
  }
}

std::string joined(message_pieces const& pieces) {
  std::string result;
  for (auto const& each : pieces) result += text_of(each);
  return result;
}

tensor numbers(std::string name, std::vector<float> const& values) {
  auto bytes = tensor_bytes::unwritten(values.size() * sizeof(float));
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return {std::move(name), datatype::fp32, {static_cast<std::int64_t>(values.size())}, bytes};
}

TEST(grpc_messages, an_answer_has_its_tensors_without_a_copy) {
  infer_response const response{"m", "1", "id", {numbers("a", {1, 2}), numbers("none", {})}};
  auto const pieces = encode_infer_message(response);
  EXPECT_TRUE(std::any_of(pieces.begin(), pieces.end(), [&](tensor_bytes const& each) {
    return each.data() == response.outputs[0].data.data();
  }));
  inference::ModelInferResponse answer;
  ASSERT_TRUE(answer.ParseFromString(joined(pieces)));
  EXPECT_EQ(answer.model_name() + answer.model_version() + answer.id(), "m1id");
  ASSERT_EQ(answer.outputs_size(), 2);
  EXPECT_EQ(answer.outputs(0).datatype(), "FP32");
  EXPECT_THAT(answer.outputs(0).shape(), ElementsAre(2));
  EXPECT_THAT(answer.raw_output_contents(), ElementsAre(bytes_of<float>({1, 2}), ""));
  EXPECT_TRUE(answer.parameters().empty());

  inference::ModelStreamInferResponse element;
  ASSERT_TRUE(element.ParseFromString(joined(encode_stream_message(response))));
  EXPECT_EQ(element.error_message(), "");
  EXPECT_TRUE(element.infer_response().parameters().at("triton_final_response").bool_param());
  EXPECT_EQ(element.infer_response().raw_output_contents(0), bytes_of<float>({1, 2}));

  ASSERT_TRUE(element.ParseFromString(joined(encode_stream_error("why", "id"))));
  EXPECT_EQ(element.error_message(), "why");
  EXPECT_EQ(element.infer_response().id(), "id");
}

TEST(grpc_messages, an_output_that_is_not_whole_is_a_fault) {
  auto broken = numbers("a", {1, 2});
  for (std::vector<std::int64_t> const& shape : std::vector<std::vector<std::int64_t>>{{3}, {-2}}) {
    broken.shape = shape;
    auto const failure = thrown_by([&] {
      static_cast<void>(encode_infer_message({"m", "1", "", {broken}}));
    });
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(failure->kind(), error_kind::internal);
  }
}

class grpc_calls : public testing::Test {
 protected:
  template <typename Answer, typename Question = inference::Empty>
  Answer answered(std::string_view name, Question const& question = {}) {
    auto const reply = answer_call(api_, name, question.SerializeAsString());
    EXPECT_EQ(reply.status, 200U) << reply.reason;
    Answer answer;
    EXPECT_TRUE(answer.ParseFromString(reply.message));
    return answer;
  }
  static inference::ModelQuestion about(std::string const& model, std::string const& version = "") {
    inference::ModelQuestion question;
    question.set_name(model);
    question.set_version(version);
    return question;
  }

  adding_service service_;
  oip_api api_{service_};
};

TEST_F(grpc_calls, say_what_http_says) {
  service_.set_config({{"name", "add"},
                       {"backend", "pytorch"},
                       {"max_batch_size", 8},
                       {"input", {{{"name", "a"}, {"data_type", "TYPE_FP32"}}}}});
  EXPECT_TRUE(answered<inference::ServerLiveResponse>("ServerLive").live());
  EXPECT_TRUE(answered<inference::ServerReadyResponse>("ServerReady").ready());
  service_.set_ready({false, "starting"});
  EXPECT_FALSE(answered<inference::ServerReadyResponse>("ServerReady").ready());
  EXPECT_TRUE(answered<inference::ModelReadyResponse>("ModelReady", about("add")).ready());
  EXPECT_FALSE(answered<inference::ModelReadyResponse>("ModelReady", about("cold")).ready());
  EXPECT_EQ(answered<inference::ServerMetadataResponse>("ServerMetadata").name(), "sluice");
  auto const metadata =
      answered<inference::ModelMetadataResponse>("ModelMetadata", about("a/b \xC3\xA9", "1"));
  EXPECT_EQ(metadata.platform(), "adding");
  EXPECT_THAT(metadata.inputs(1).shape(), ElementsAre(-1));
  auto const config =
      answered<inference::ModelConfigResponse>("ModelConfig", about("add")).config();
  EXPECT_EQ(config.name(), "add");
  EXPECT_EQ(config.max_batch_size(), 8);
  EXPECT_EQ(config.input(0).data_type(), sluice::server::pbtxt::TYPE_FP32);
  EXPECT_EQ(answered<inference::RepositoryIndexResponse>("RepositoryIndex").models_size(), 2);
  inference::RepositoryIndexRequest ready;
  ready.set_ready(true);
  auto const index = answered<inference::RepositoryIndexResponse>("RepositoryIndex", ready);
  ASSERT_EQ(index.models_size(), 1);
  EXPECT_EQ(index.models(0).name() + index.models(0).state(), "addREADY");
}

TEST_F(grpc_calls, fail_with_the_words_and_statuses_of_http) {
  auto const reply_to = [this](std::string_view name, auto const& question) {
    return answer_call(api_, name, question.SerializeAsString());
  };
  for (auto const* const name : {"ModelReady", "ModelMetadata", "ModelStatistics"}) {
    auto const reply = reply_to(name, about("nobody"));
    EXPECT_EQ(reply.status, 404U) << name;
    EXPECT_THAT(reply.reason, HasSubstr("there is no model 'nobody'"));
    EXPECT_EQ(reply.cause, "not_found");
  }
  inference::RepositoryModelRequest load;
  load.set_model_name("a/b");
  for (auto const* const name : {"RepositoryModelLoad", "RepositoryModelUnload"}) {
    auto const reply = reply_to(name, load);
    EXPECT_EQ(reply.status, 501U);
    EXPECT_THAT(reply.reason, HasSubstr("its policy"));
  }
  (*load.mutable_parameters())["file:1/model.pt"].set_bytes_param("x");
  EXPECT_THAT(reply_to("RepositoryModelLoad", load).reason, HasSubstr("the content of a file"));
  for (auto const* const name :
       {"SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"}) {
    EXPECT_EQ(reply_to(name, inference::RegionRequest{}).status, 501U);
  }
  EXPECT_EQ(answer_call(api_, "ModelReady", "\xff").status, 400U);
  EXPECT_FALSE(is_call("Nothing"));
  EXPECT_EQ(answer_call(api_, "Nothing", "").status, 501U);
}

TEST_F(grpc_calls, read_and_write_settings) {
  auto const before = answered<inference::LogSettings>("LogSettings").settings();
  EXPECT_TRUE(before.at("log_info").bool_param());
  EXPECT_EQ(before.at("log_verbose_level").uint32_param(), 0U);
  EXPECT_EQ(before.at("log_file").string_param(), "");
  inference::LogSettings wanted;
  (*wanted.mutable_settings())["log_file"].set_string_param("/tmp/log");
  EXPECT_EQ(answer_call(api_, "LogSettings", wanted.SerializeAsString()).status, 501U);
  (*wanted.mutable_settings())["log_file"].clear_choice();
  EXPECT_EQ(answer_call(api_, "LogSettings", wanted.SerializeAsString()).status, 400U);

  inference::TraceSettings off;
  (*off.mutable_settings())["trace_level"].add_value("OFF");
  (*off.mutable_settings())["trace_rate"].add_value("1000");
  (*off.mutable_settings())["trace_count"].clear_value();
  off.set_model_name("add");
  auto const traces = answered<inference::TraceSettings>("TraceSetting", off).settings();
  EXPECT_THAT(traces.at("trace_level").value(), ElementsAre("OFF"));
  EXPECT_THAT(traces.at("trace_rate").value(), ElementsAre("1000"));
  (*off.mutable_settings())["trace_level"].add_value("TIMESTAMPS");
  EXPECT_EQ(answer_call(api_, "TraceSetting", off.SerializeAsString()).status, 501U);
  off.set_model_name("nobody");
  EXPECT_EQ(answer_call(api_, "TraceSetting", off.SerializeAsString()).status, 404U);
}

TEST(grpc_codes, are_what_tritons_clients_expect) {
  std::vector<std::pair<unsigned, int>> const table{
      {200, 0}, {400, 3},  {401, 16}, {404, 5},  {408, 4}, {409, 6}, {413, 8},
      {429, 8}, {500, 13}, {501, 12}, {503, 14}, {504, 4}, {418, 13}};
  for (auto const& [status, code] : table) EXPECT_EQ(grpc_code_of(status), code) << status;
}

}  // namespace
}  // namespace sluice::server
