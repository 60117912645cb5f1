// Bytes as messages of gRPC's calls. The first byte of an input says which call's message the rest is, the second where it is cut.

#include <array>
#include <string>
#include <utility>

#include "runtime/server/grpc/calls.hpp"
#include "runtime/server/grpc/inference.pb.h"
#include "runtime/server/grpc/message_codec.hpp"
#include "tests/runtime/server_fuzz/echo_service.hpp"
#include "tests/runtime/server_fuzz/fuzz_target.hpp"

namespace sluice::server::fuzzing {
namespace {

constexpr std::array<std::string_view, 19> calls{"ServerLive",
                                                 "ServerReady",
                                                 "ModelReady",
                                                 "ServerMetadata",
                                                 "ModelMetadata",
                                                 "ModelConfig",
                                                 "ModelStatistics",
                                                 "RepositoryIndex",
                                                 "LogSettings",
                                                 "TraceSetting",
                                                 "RepositoryModelLoad",
                                                 "RepositoryModelUnload",
                                                 "SystemSharedMemoryStatus",
                                                 "SystemSharedMemoryRegister",
                                                 "SystemSharedMemoryUnregister",
                                                 "CudaSharedMemoryStatus",
                                                 "CudaSharedMemoryRegister",
                                                 "CudaSharedMemoryUnregister",
                                                 "NoSuchCall"};

std::string joined(message_pieces const& pieces) {
  std::string text;
  for (auto const& each : pieces) {
    text.append(reinterpret_cast<char const*>(each.data()), each.size());
  }
  return text;
}

void infer(std::string_view message, std::size_t cut) {
  echo_service service;
  try {
    auto const asked = read_infer_request({message.substr(0, cut), message.substr(cut)});
    auto decoded = decode_infer_request(asked, echo_service::all());
    infer_response const response{"all", "1", decoded.id, std::move(decoded.inputs)};
    inference::ModelInferResponse answer;
    auto const text = joined(encode_infer_message(response));
    require(answer.ParseFromString(text), "an answer is a message");
    require(answer.outputs_size() == answer.raw_output_contents_size(), "all outputs have bytes");
    for (int i = 0; i < answer.outputs_size(); ++i) {
      auto const& bytes = response.outputs.at(static_cast<std::size_t>(i)).data;
      require(answer.raw_output_contents(i).size() == bytes.size(), "an output is whole");
    }
    inference::ModelStreamInferResponse element;
    require(element.ParseFromString(joined(encode_stream_message(response))),
            "so is one of a stream");
  } catch (error const& refusal) {
    require(
        refusal.kind() == error_kind::invalid_argument || refusal.kind() == error_kind::unsupported,
        "a message is refused for what it says", refusal.what());
    inference::ModelStreamInferResponse element;
    require(element.ParseFromString(joined(encode_stream_error(refusal.what(), "7"))),
            "a refusal is one of a stream", refusal.what());
  }
}

}  // namespace

std::vector<std::string> seeds() {
  std::vector<std::string> made;
  auto const add = [&](std::size_t call, std::string const& message) {
    made.push_back(std::string{static_cast<char>(call), '\x20'} + message);
  };
  inference::ModelInferRequest asked;
  asked.set_model_name("all");
  asked.set_id("7");
  (*asked.mutable_parameters())["timeout"].set_int64_param(5000);
  (*asked.mutable_parameters())["priority"].set_uint64_param(2);
  auto const input = [&](char const* name, char const* type, std::vector<int> const& shape) {
    auto& each = *asked.add_inputs();
    each.set_name(name);
    each.set_datatype(type);
    for (auto const extent : shape) each.add_shape(extent);
    return each.mutable_contents();
  };
  auto* const f = input("f", "FP32", {1, 2});
  f->add_fp32_contents(1.5F);
  f->add_fp32_contents(-2);
  input("i", "INT64", {1})->add_int64_contents(INT64_MIN);
  input("s", "BYTES", {1})->add_bytes_contents("text");
  input("h", "FP16", {2});
  input("o", "BOOL", {1})->add_bool_contents(true);
  asked.add_outputs()->set_name("f");
  add(calls.size(), asked.SerializeAsString());
  for (auto& each : *asked.mutable_inputs()) each.clear_contents();
  for (auto const size : {8U, 8U, 8U, 4U, 1U})
    asked.add_raw_input_contents(std::string(size, '\0'));
  *asked.mutable_raw_input_contents(2) = std::string{"\4\0\0\0text", 8};
  add(calls.size(), asked.SerializeAsString());
  inference::ModelQuestion named;
  named.set_name("all");
  named.set_version("1");
  for (std::size_t call = 0; call < calls.size(); ++call) {
    add(call, "");
    add(call, named.SerializeAsString());
  }
  return made;
}

void run_one(std::string_view input) {
  if (input.size() < 2) return;
  silence_protobuf();
  auto const which = static_cast<unsigned char>(input[0]);
  auto const message = input.substr(2);
  auto const cut = message.size() * static_cast<unsigned char>(input[1]) / 256;
  if (which >= calls.size()) return infer(message, cut);
  static echo_service service;
  static oip_api const api{service};
  auto const reply = answer_call(api, calls.at(which), message);
  require(reply.status == 200 || !reply.reason.empty(), "a refusal says why", calls.at(which));
  require(reply.status != 500, "no message is a fault of the server", reply.reason);
}

}  // namespace sluice::server::fuzzing
