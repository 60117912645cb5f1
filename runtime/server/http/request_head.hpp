/// What is known of a request before its body: whether it is refused for that, and what of it the API needs.
#pragma once

#include <boost/beast/core/string_type.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/system/error_code.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/server/http/access_tokens.hpp"
#include "runtime/server/http/api.hpp"
#include "runtime/server/http/endpoint.hpp"

namespace sluice::server {

using request_head = boost::beast::http::request_header<>;

/// To a client that waits for it, and to see whether somebody is there.
inline constexpr std::string_view continue_line{"HTTP/1.1 100 Continue\r\n\r\n"};

[[nodiscard]] inline std::string_view std_view(boost::beast::string_view text) noexcept {
  return {text.data(), text.size()};
}

/// As the API takes it; it refers to `head`. A body may become so long if it is decompressed.
[[nodiscard]] http_request view_of(request_head const& head,
                                   std::shared_ptr<std::string> const& body,
                                   std::size_t max_body_bytes = 0);

/// For what HTTP itself asks of a header.
[[nodiscard]] std::optional<http_reply> refuse_header(request_head const& head);

/// For whom is not allowed to ask; health is for everybody, without a body.
[[nodiscard]] std::optional<http_reply> refuse_stranger(request_head const& head, bool has_body,
                                                        access_tokens const& tokens);

/// The answer to what could not be read; none: nobody is there to take it.
[[nodiscard]] std::optional<http_reply> refuse_unread(boost::system::error_code failure,
                                                      endpoint_options const& options);

}  // namespace sluice::server
