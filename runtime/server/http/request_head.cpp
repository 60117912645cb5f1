#include "runtime/server/http/request_head.hpp"

#include <fmt/format.h>

#include <boost/beast/core/string.hpp>
#include <boost/beast/http/error.hpp>
#include <string_view>

namespace sluice::server {

namespace beast = boost::beast;
namespace http = boost::beast::http;

http_request view_of(request_head const& head, std::shared_ptr<std::string> const& body,
                     std::size_t max_body_bytes) {
  auto const header = [&](beast::string_view name) -> std::optional<std::string_view> {
    auto const found = head.find(name);
    if (found == head.end()) return std::nullopt;
    return std_view(found->value());
  };
  return {std_view(head.method_string()),
          std_view(head.target()),
          body ? std::string_view{*body} : std::string_view{},
          header("Content-Encoding"),
          header("Inference-Header-Content-Length"),
          body,
          header("Accept-Encoding"),
          max_body_bytes};
}

std::optional<http_reply> refuse_header(request_head const& request) {
  if (request.version() == 11 && request.count(http::field::host) != 1) {
    return oip_api::failure(400, "an HTTP/1.1 request has one Host header");
  }
  // Beast takes no body for a coding that it does not know: what follows would be read as the next
  // request.
  auto const coding = request[http::field::transfer_encoding];
  bool const chunked =
      beast::iequals(coding, "chunked") && request.count(http::field::transfer_encoding) == 1;
  if (!coding.empty() && !chunked) {
    return oip_api::failure(501, "the only transfer encoding that this server knows is chunked");
  }
  auto const expectation = request[http::field::expect];
  if (!expectation.empty() && !beast::iequals(expectation, "100-continue")) {
    return oip_api::failure(417, "the only expectation that this server meets is 100-continue");
  }
  if (request.count(http::field::content_encoding) > 1) {
    auto answer = oip_api::failure(415, "the body is compressed several times; compress it once");
    answer.lists_codings = true;
    return answer;
  }
  if (request.count("Inference-Header-Content-Length") > 1) {
    return oip_api::failure(400,
                            "Inference-Header-Content-Length is there several times; give it once");
  }
  return std::nullopt;
}

std::optional<http_reply> refuse_stranger(request_head const& head, bool has_body,
                                          access_tokens const& tokens) {
  auto const given = head.count(http::field::authorization);
  if (given == 1 && tokens.allow(std_view(head[http::field::authorization]))) return std::nullopt;
  if (!has_body && oip_api::is_public(view_of(head, nullptr))) return std::nullopt;
  return oip_api::failure(401, refusal_without_token(given != 0));
}

std::optional<http_reply> refuse_unread(boost::system::error_code failure,
                                        endpoint_options const& options) {
  if (failure == http::error::body_limit) {
    return oip_api::failure(
        413, fmt::format("the body is larger than the {} bytes that this server takes",
                         options.max_body_bytes));
  }
  if (failure == http::error::header_limit) {
    return oip_api::failure(
        431, fmt::format("the header is larger than the {} bytes that this server takes",
                         options.max_header_bytes));
  }
  bool const malformed =
      failure.category() == http::make_error_code(http::error::end_of_stream).category();
  if (!malformed || failure == http::error::end_of_stream ||
      failure == http::error::partial_message) {
    return std::nullopt;
  }
  return oip_api::failure(400, fmt::format("the request is not HTTP/1.1: {}", failure.message()));
}

}  // namespace sluice::server
