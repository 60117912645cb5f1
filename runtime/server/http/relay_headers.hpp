/// What passes of the head of a request to an engine, and of its answer to the client. Pure.
///
/// Fields that are about one connection end there: those of RFC 9110 section 7.6.1, and all that `Connection` names. The engine
/// hears who the client is by X-Forwarded-For, to which its address is added, and X-Forwarded-Proto and -Host, which are set.
#pragma once

#include <boost/beast/http/fields.hpp>
#include <boost/beast/http/message.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice::server {

/// How the length of a body is said.
struct body_framing {
  enum class kind { none, length, chunked, until_end };
  kind is = kind::none;
  std::uint64_t bytes = 0;  ///< with `length`
};

struct relayed_client {
  std::string address;
  bool is_encrypted = false;
  /// The server has asked for a token of its own, which is nobody else's.
  bool has_token = false;
};

/// Whether both sides change to a websocket, if the answer is 101.
[[nodiscard]] bool asks_for_websocket(boost::beast::http::request_header<> const& head);

/// Whether the method may be sent a second time without the client's knowledge (RFC 9110 section 9.2.2).
[[nodiscard]] bool is_idempotent(boost::beast::http::verb method) noexcept;

/// Whether the engine's connection may serve the next request, as far as this one says. Not so with a body that a server might take
/// for the next request: one of a method that has none.
[[nodiscard]] bool may_be_followed(boost::beast::http::request_header<> const& head,
                                   body_framing const& body);

/// Head of the request as the engine gets it, the empty line included. It says that the connection ends, unless it is kept.
[[nodiscard]] std::string request_text(boost::beast::http::request_header<> const& head,
                                       body_framing const& body, relayed_client const& from,
                                       bool is_kept);

/// Whether the answer's body is server-sent events, as they are.
[[nodiscard]] bool comes_in_events(boost::beast::http::response_header<> const& head);

struct answer_form {
  unsigned version = 11;  ///< of HTTP, as the client has it
  body_framing body;
  bool keep_alive = false;
  bool is_websocket = false;
};

/// Head of the answer as the client gets it, the empty line included.
[[nodiscard]] std::string answer_text(boost::beast::http::response_header<> const& head,
                                      answer_form const& form);

/// The fields behind a body in chunks, with the line that ends it: without those that would change what has been said before the body.
[[nodiscard]] std::string last_chunk(boost::beast::http::fields const& trailers);

/// A piece of a body in chunks.
void append_chunk(std::string& to, std::string_view piece);

}  // namespace sluice::server
