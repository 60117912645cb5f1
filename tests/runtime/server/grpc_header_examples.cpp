/// The examples in the headers of runtime/server/grpc/, word for word: compiled, never run.
#include <spdlog/spdlog.h>

#include <chrono>
#include <string_view>
#include <vector>

#include "runtime/server/grpc/calls.hpp"
#include "runtime/server/grpc/grpc_endpoint.hpp"
#include "runtime/server/grpc/inference.pb.h"
#include "runtime/server/grpc/message_codec.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-value"

namespace sluice::server::header_examples {

using namespace std::chrono_literals;

void of_calls(oip_api const& api, std::string_view message) {
  auto const reply = answer_call(api, "ModelReady", message);
  reply.status;
  reply.message;
}

void of_grpc_endpoint(inference_service& service) {
  grpc_options options;
  grpc_endpoint rpc{options, service};
  spdlog::info("listening address={}", rpc.address());
  rpc.stop(10s);
}

void of_message_codec(std::vector<std::string_view> const& parts, inference_service const& service,
                      infer_response const& response) {
  auto const asked = read_infer_request(parts);
  auto request = decode_infer_request(asked, service.metadata(asked->model_name(), ""));
  auto const message = encode_infer_message(response);
}

}  // namespace sluice::server::header_examples

#pragma GCC diagnostic pop
