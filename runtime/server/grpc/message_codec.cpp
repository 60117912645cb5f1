#include "runtime/server/grpc/message_codec.hpp"

#include <fmt/format.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <google/protobuf/wire_format_lite.h>
#if __has_include( \
    <google/protobuf/stubs/logging.h>)  // later releases write with Abseil, and not of this
#include <google/protobuf/stubs/logging.h>
#endif

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <span>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/grpc/inference.pb.h"
#include "runtime/server/grpc/typed_contents.hpp"
#include "runtime/server/http/elements.hpp"
#include "runtime/server/http/request_checks.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

namespace pb_io = google::protobuf::io;
using google::protobuf::internal::WireFormatLite;
using nlohmann::json;

// Numbers of length-delimited fields, as they stand in front of their bytes.
constexpr std::uint8_t raw_output_contents_tag = 6U << 3U | 2U;
constexpr std::uint8_t infer_response_tag = 2U << 3U | 2U;

constexpr int most_tensors = 1024;  // as in JSON: of each kind

template <typename... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw error{error_kind::invalid_argument, fmt::format(format, std::forward<Args>(args)...)};
}

/// False for what is no message at all. Each field is looked at, and nothing kept.
bool has_few_tensors(pb_io::ZeroCopyInputStream& bytes) {
  using message = inference::ModelInferRequest;
  std::map<int, int> counts{{message::kInputsFieldNumber, 0},
                            {message::kOutputsFieldNumber, 0},
                            {message::kRawInputContentsFieldNumber, 0}};
  pb_io::CodedInputStream fields{&bytes};
  while (auto const tag = fields.ReadTag()) {
    auto const counted = counts.find(WireFormatLite::GetTagFieldNumber(tag));
    if (counted != counts.end() && ++counted->second > most_tensors) {
      invalid("there are more than {} inputs or outputs", most_tensors);
    }
    if (!WireFormatLite::SkipField(&fields, tag)) return false;
  }
  return fields.ConsumedEntireMessage();
}

/// In front of the `size` bytes of a field.
tensor_bytes prefix(std::uint8_t tag, std::uint64_t size) {
  std::array<std::uint8_t, 16> text{tag};
  auto const* const end = pb_io::CodedOutputStream::WriteVarint64ToArray(size, &text[1]);
  auto piece = tensor_bytes::unwritten(static_cast<std::size_t>(end - text.data()));
  std::memcpy(piece.data(), text.data(), piece.size());
  return piece;
}

json value_of(inference::InferParameter const& parameter, std::string const& name) {
  using choice = inference::InferParameter::ChoiceCase;
  switch (parameter.choice_case()) {
    case choice::kBoolParam:
      return parameter.bool_param();
    case choice::kInt64Param:
      // As JSON's reader has it: what is not negative is a natural number.
      if (parameter.int64_param() >= 0) {
        return static_cast<std::uint64_t>(parameter.int64_param());
      }
      return parameter.int64_param();
    case choice::kStringParam:
      return parameter.string_param();
    case choice::kDoubleParam:
      return parameter.double_param();
    case choice::kUint64Param:
      return parameter.uint64_param();
    case choice::CHOICE_NOT_SET:
      break;
  }
  invalid("the parameter '{}' has no value; it takes a string, a number or a boolean", name);
}

template <typename Map>
raw_parameters parameters_of(Map const& given) {
  raw_parameters result;
  for (auto const& [name, value] : given) result.emplace(name, value_of(value, name));
  return result;
}

raw_tensor described(std::string_view kind, std::string const& name, raw_parameters parameters) {
  raw_tensor result;
  result.label = fmt::format("{} '{}'", kind, name);
  result.name = name;
  result.parameters = std::move(parameters);
  return result;
}

raw_request raw_request_of(inference::ModelInferRequest const& asked) {
  raw_request result;
  result.id = asked.id();
  result.parameters = parameters_of(asked.parameters());
  auto& inputs = result.inputs.emplace();
  for (auto const& each : asked.inputs()) {
    auto input = described("input", each.name(), parameters_of(each.parameters()));
    input.type = each.datatype();
    auto& shape = input.shape.emplace();
    shape.rank = static_cast<std::size_t>(each.shape_size());
    for (auto const extent : each.shape()) {
      if (shape.extents.size() == max_rank) break;
      shape.extents.emplace_back(extent);
    }
    inputs.push_back(std::move(input));
  }
  if (asked.outputs_size() == 0) return result;
  auto& outputs = result.outputs.emplace();
  for (auto const& each : asked.outputs()) {
    outputs.push_back(described("output", each.name(), parameters_of(each.parameters())));
  }
  return result;
}

/// Of input `index` of those that come as bytes.
tensor_bytes raw_bytes(infer_message const& asked, int index, std::string const& label) {
  if (index >= asked->raw_input_contents_size()) {
    invalid(
        "{} has nothing in raw_input_contents, which has {} for {} inputs; give all of them there, "
        "in the order of the inputs",
        label, asked->raw_input_contents_size(), asked->inputs_size());
  }
  if (asked->inputs(index).has_contents()) {
    invalid("{} has contents, and the request raw_input_contents; give one of them", label);
  }
  auto* const bytes = asked->mutable_raw_input_contents(index);
  return {asked, std::as_writable_bytes(std::span{*bytes})};
}

tensor_bytes typed_bytes(infer_message const& asked, int index, raw_tensor const& input) {
  auto const& given = asked->inputs(index);
  auto const type = datatype_from_name(given.datatype());
  if (!type) return {};  // which is refused when it is checked
  return bytes_of_contents(given.contents(), *type, input.label);
}

message_pieces joined(inference::ModelInferResponse const& head,
                      std::vector<tensor> const& outputs) {
  auto pieces = pieces_of(head.SerializeAsString());
  for (auto const& each : outputs) {
    pieces.push_back(prefix(raw_output_contents_tag, each.data.size()));
    if (!each.data.empty()) pieces.push_back(each.data);
  }
  return pieces;
}

std::uint64_t size_of(message_pieces const& pieces) {
  return std::accumulate(
      pieces.begin(), pieces.end(), std::uint64_t{0},
      [](std::uint64_t sum, tensor_bytes const& each) { return sum + each.size(); });
}

message_pieces encoded(infer_response const& response, bool is_of_stream) {
  inference::ModelInferResponse head;
  head.set_model_name(response.model);
  head.set_model_version(response.version);
  head.set_id(response.id);
  if (is_of_stream) (*head.mutable_parameters())["triton_final_response"].set_bool_param(true);
  for (auto const& each : response.outputs) {
    check_binary_output(each, count_of_output(each));
    auto& output = *head.add_outputs();
    output.set_name(each.name);
    output.set_datatype(std::string{datatype_name(each.type)});
    output.mutable_shape()->Assign(each.shape.begin(), each.shape.end());
  }
  auto pieces = joined(head, response.outputs);
  constexpr std::uint64_t around = 16;  // of a stream's element
  if (auto const size = size_of(pieces); size > largest_message - around) {
    throw error{
        error_kind::unsupported,
        fmt::format("the answer has {} bytes, more than a message of gRPC can have; ask for "
                    "fewer outputs at once, or over HTTP",
                    size)};
  }
  return pieces;
}

}  // namespace

void silence_protobuf() {
#if __has_include(<google/protobuf/stubs/logging.h>)
  static google::protobuf::LogSilencer const for_good;
#endif
}

infer_message read_infer_request(std::vector<std::string_view> const& parts) {
  auto const read = [&](auto const& with) {
    std::deque<pb_io::ArrayInputStream> arrays;
    std::vector<pb_io::ZeroCopyInputStream*> all;
    all.reserve(parts.size());
    for (auto const& each : parts) {
      all.push_back(&arrays.emplace_back(each.data(), static_cast<int>(each.size())));
    }
    pb_io::ConcatenatingInputStream joined{all.data(), static_cast<int>(all.size())};
    return with(joined);
  };
  auto result = std::make_shared<inference::ModelInferRequest>();
  bool const is_whole = read([](auto& bytes) { return has_few_tensors(bytes); }) &&
                        read([&](auto& bytes) { return result->ParseFromZeroCopyStream(&bytes); });
  if (!is_whole) invalid("the message is no ModelInferRequest");
  return result;
}

decoded_request decode_infer_request(infer_message const& asked, model_metadata const& metadata) {
  auto const raw = raw_request_of(*asked);
  bool const is_raw = asked->raw_input_contents_size() > 0;
  byte_source const bytes{[&](raw_tensor const& input) -> std::optional<tensor_bytes> {
                            auto const index = static_cast<int>(&input - raw.inputs->data());
                            return is_raw ? raw_bytes(asked, index, input.label)
                                          : typed_bytes(asked, index, input);
                          },
                          [&] {
                            if (asked->raw_input_contents_size() <= asked->inputs_size()) return;
                            invalid("raw_input_contents has {} for {} inputs; give one for each",
                                    asked->raw_input_contents_size(), asked->inputs_size());
                          }};
  auto request = check_request(raw, metadata, bytes);
  request.version = asked->model_version();
  return request;
}

message_pieces encode_infer_message(infer_response const& response) {
  return encoded(response, false);
}

message_pieces encode_stream_message(infer_response const& response) {
  auto pieces = encoded(response, true);
  pieces.insert(pieces.begin(), prefix(infer_response_tag, size_of(pieces)));
  return pieces;
}

message_pieces encode_stream_error(std::string_view message, std::string_view id) {
  inference::ModelStreamInferResponse answer;
  answer.set_error_message(std::string{message});
  answer.mutable_infer_response()->set_id(std::string{id});
  return pieces_of(answer.SerializeAsString());
}

message_pieces pieces_of(std::string_view bytes) {
  auto piece = tensor_bytes::unwritten(bytes.size());
  if (!bytes.empty()) std::memcpy(piece.data(), bytes.data(), bytes.size());
  message_pieces result;
  result.push_back(std::move(piece));
  return result;
}

}  // namespace sluice::server
