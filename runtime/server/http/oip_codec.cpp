#include "runtime/server/http/oip_codec.hpp"

#include <fmt/format.h>

#include <iterator>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/elements.hpp"
#include "runtime/server/http/oip_reader.hpp"
#include "runtime/server/http/raw_tail.hpp"
#include "runtime/server/http/request_checks.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;

/// Throws where data is not JSON, whatever it is for.
void check_data(raw_request const& raw) {
  if (!raw.inputs) return;
  for (auto const& each : *raw.inputs) {
    if (!each.data) continue;
    static_cast<void>(read_list(raw.document, *each.data, datatype::fp64, 0, each.label));
  }
}

void append_tensor(encoded_response& into, tensor const& output, bool is_binary) {
  auto const count = count_of_output(output);
  auto& out = into.json;
  fmt::format_to(std::back_inserter(out), R"({{"name":{},"datatype":"{}","shape":[{}],)",
                 json(output.name).dump(), datatype_name(output.type),
                 fmt::join(output.shape, ","));
  if (!is_binary) {
    out += R"("data":[)";
    append_elements(out, output, count);
    out += "]}";
    return;
  }
  check_binary_output(output, count);
  fmt::format_to(std::back_inserter(out), R"("parameters":{{"binary_data_size":{}}}}})",
                 output.data.size());
  into.tensors.push_back(output.data);
}

}  // namespace

bool output_form::is_binary(std::string const& output) const {
  auto const found = by_output.find(output);
  return found == by_output.end() ? binary : found->second;
}

decoded_request decode_infer_request(infer_body const& body, model_metadata const& metadata) {
  auto const raw = read_raw_request(
      body.json, body.has_length
                     ? fmt::format("what Inference-Header-Content-Length says is JSON, the first "
                                   "{} bytes of the body,",
                                   body.json.size())
                     : "the body");
  raw_tail tail{body.raw, body.keeper};
  try {
    return check_request(raw, metadata,
                         {[&tail](raw_tensor const& input) { return tail.take(input); },
                          [&tail] { tail.expect_end(); }});
  } catch (error const&) {
    // What is not JSON is said first, also of data that nobody has come to.
    check_data(raw);
    throw;
  }
}

encoded_response encode_infer_response(infer_response const& response, output_form const& form) {
  encoded_response made;
  auto& out = made.json;
  out = fmt::format(R"({{"model_name":{})", json(response.model).dump());
  if (!response.version.empty()) {
    out += fmt::format(R"(,"model_version":{})", json(response.version).dump());
  }
  if (!response.id.empty()) out += fmt::format(R"(,"id":{})", json(response.id).dump());
  out += R"(,"outputs":[)";
  for (std::size_t i = 0; i < response.outputs.size(); ++i) {
    if (i > 0) out += ',';
    append_tensor(made, response.outputs[i], form.is_binary(response.outputs[i].name));
  }
  out += "]}";
  return made;
}

json encode_model_metadata(model_metadata const& metadata) {
  auto const describe = [](std::vector<tensor_spec> const& specs) {
    json result = json::array();
    for (auto const& spec : specs) {
      result.push_back(
          {{"name", spec.name}, {"datatype", datatype_name(spec.type)}, {"shape", spec.shape}});
    }
    return result;
  };
  return {{"name", metadata.name},
          {"versions", metadata.versions},
          {"platform", metadata.platform},
          {"inputs", describe(metadata.inputs)},
          {"outputs", describe(metadata.outputs)}};
}

std::string encode_error(std::string_view message) {
  constexpr std::size_t longest = 5120;  // 4 KiB of a model's words, and what stands around them
  std::string text{message.substr(0, longest)};
  if (message.size() > longest) text += " …";
  return json{{"error", text}}.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace sluice::server
