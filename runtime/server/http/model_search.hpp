/// Reads the body of a request until the model that it names is known, and keeps what it has read: it belongs to that model's engine.
/// Inside of connection.hpp, which reads the client.
///
///   model_search search{std::move(parser)};   // which has read a head
///   search.take(buffer);                      // until there is a model
///   search.model();
#pragma once

#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <memory>
#include <string>
#include <utility>

#include "runtime/server/http/named_body.hpp"
#include "runtime/server/http/relay.hpp"

namespace sluice::server {

class model_search {
 public:
  using head_parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  explicit model_search(head_parser&& parser)
      : parser_(std::make_unique<relay::request_parser>(std::move(parser))) {}

  /// All that belongs to the body. Throws `invalid_argument` for a body that nobody may read; returns what is wrong with it as HTTP has it.
  [[nodiscard]] boost::system::error_code take(boost::beast::flat_buffer& from);
  /// Null until it has come.
  [[nodiscard]] std::string const* model() const noexcept { return body_.model(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return begun_.size(); }

  /// Of what has been read, and reads the rest.
  [[nodiscard]] std::string& begun() noexcept { return begun_; }
  [[nodiscard]] named_body& body() noexcept { return body_; }
  [[nodiscard]] std::unique_ptr<relay::request_parser>& parser() noexcept { return parser_; }

 private:
  std::unique_ptr<relay::request_parser> parser_;
  named_body body_;
  std::string begun_;
};

}  // namespace sluice::server
