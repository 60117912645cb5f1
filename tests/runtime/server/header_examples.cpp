/// The examples in the headers of runtime/server/http/ and runtime/server/repository/, word for word: compiled, never run.
#include <spdlog/spdlog.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/server/http/access_tokens.hpp"
#include "runtime/server/http/api.hpp"
#include "runtime/server/http/content_coding.hpp"
#include "runtime/server/http/endpoint.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "runtime/server/http/json_list.hpp"
#include "runtime/server/http/json_number.hpp"
#include "runtime/server/http/list_nesting.hpp"
#include "runtime/server/http/model_search.hpp"
#include "runtime/server/http/named_body.hpp"
#include "runtime/server/http/oip_codec.hpp"
#include "runtime/server/http/openai_form.hpp"
#include "runtime/server/http/passing_body.hpp"
#include "runtime/server/http/raw_tail.hpp"
#include "runtime/server/http/routes.hpp"
#include "runtime/server/http/tcp_progress.hpp"
#include "runtime/server/http/token_events.hpp"
#include "runtime/server/http/triton_settings.hpp"
#include "runtime/server/inference/datatypes.hpp"
#include "runtime/server/inference/tensor_bytes.hpp"
#include "runtime/server/repository/model_config.hpp"
#include "runtime/server/repository/model_repository.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"

namespace sluice::server::header_examples {

using namespace std::chrono_literals;

void of_api(oip_api const& api) {
  auto outcome = api.handle({.method = "GET", .target = "/v2/health/ready"});
}

void of_content_coding(std::string_view body, std::span<tensor_bytes const> tensors) {
  auto coding = coding_of("gzip");
  auto text = decompressed(body, *coding, 1024);
  auto best = accepted_coding("gzip;q=0.5, *");
  auto sent = compressed(*text, tensors, best);
}

void of_datatypes() {
  datatype_name(datatype::fp16);
  datatype_from_name("INT64");
  half_from_double(1.0);
}

void of_endpoint(inference_service& service) {
  endpoint_options options;
  endpoint http{options, service};
  spdlog::info("listening address={}", http.address());
  http.stop(10s);
}

void of_json_list(std::string_view text, char const* at, datatype type) {
  json_document document{"the body", text};
  auto list = find_list(document, at, 64, "input 'x'");
  auto read = read_list(document, list, type, 4, "input 'x'");
  read.nesting.size();
}

void of_json_number(char const* at, char const* end) {
  json_number number;
  if (auto const* const rest = scan_number(at, end, number)) {
    float_of(number);
    number.is_integer;
  }
}

void of_access_tokens() {
  auto const tokens = access_tokens::parse("# of the dashboard\n4f6fa2b1\n");
  tokens.allow("Bearer 4f6fa2b1");
}

void of_endpoint_security(inference_service& service) {
  endpoint_options options;
  options.security =
      std::make_shared<endpoint_security>(security_files{.tokens = "/etc/sluice/tokens"});
  endpoint http{options, service};
  options.security->reload();
}

void of_list_nesting() {
  list_nesting list;
  list.open();
  list.open();
  list.add(2);
  list.close();
  list.close();
  list.extents();
  list.problem();
}

void of_model_search(model_search::head_parser&& parser, boost::beast::flat_buffer& buffer) {
  model_search search{std::move(parser)};
  search.take(buffer);
  search.model();
}

void of_named_body() {
  named_body body;
  body.take(R"({"messages": [{"model": "x"}], "mod)");
  body.model();
  body.take(R"(el": "chat"})");
  body.model();
  body.finish();
}

void of_openai_form() {
  openai_resource_of("/v1/models/org%2Fname");
  openai_failure(400, "…", {.param = "model"});
}

void of_passing_body(relay::request_parser& parser, boost::beast::flat_buffer& buffer,
                     boost::system::error_code& failure, std::string& to, std::size_t enough) {
  take_pieces(parser, buffer, failure,
              [&](std::string const& piece) { return to.append(piece).size() < enough; });
}

void of_token_events() {
  token_events events;
  events.take("data: {\"choices\": [{\"delta\": {\"content\": \"\"}}]}\n\n");
  events.take("data: {\"choices\": [{\"delta\": {\"content\": \"He\"}}]}\n\ndata: {");
}

void of_oip_codec(std::string_view body, inference_service const& service,
                  infer_response const& response) {
  auto request = decode_infer_request(body, service.metadata("add", ""));
  auto answer = encode_infer_response(response, request.form);
}

void of_raw_tail(std::span<std::byte> bytes, std::shared_ptr<void const> body,
                 raw_tensor const& raw) {
  raw_tail tail{bytes, body};
  auto first = tail.take(raw);
  tail.expect_end();
}

void of_tensor_bytes() {
  tensor_bytes own{std::vector<std::byte>(8)};
  auto body = std::make_shared<std::vector<std::byte>>(100);
  tensor_bytes part{body, std::span{*body}.subspan(20, 8)};
}

void of_routes() {
  auto found = parse_target("/v2/models/a%2Fb/versions/3/infer");
  found->what;
  found->model;
  found->version;
}

void of_tcp_progress(int socket) {
  auto const before = acknowledged_bytes(socket);
  acknowledged_bytes(socket) == before;
}

void of_triton_settings() {
  using nlohmann::json;
  log_settings();
  update_log_settings(json::parse(R"({"log_info": false})"));
  update_trace_settings(json::parse(R"({"trace_level": ["OFF"]})"));
}

void of_model_config(std::string_view text) {
  auto config = read_model_config(text, "/models/add/config.pbtxt");
  config.inputs[0].shape;
}

void of_model_repository() {
  auto const found = read_repository({"/models"});
  for (auto const& entry : found.models) {
    std::cout << entry.metadata.name << ": " << entry.file << '\n';
  }
  for (auto const& each : found.unservable) {
    std::cout << each.name << ": " << each.reason.what() << '\n';
  }
}

}  // namespace sluice::server::header_examples

#pragma GCC diagnostic pop
