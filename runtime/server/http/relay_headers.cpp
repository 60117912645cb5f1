#include "runtime/server/http/relay_headers.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/rfc7230.hpp>
#include <iterator>

#include "runtime/server/http/request_head.hpp"

namespace sluice::server {

namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

/// Of one connection; beside them those that `Connection` names.
constexpr std::array hop_by_hop{http::field::connection,
                                http::field::keep_alive,
                                http::field::proxy_connection,
                                http::field::transfer_encoding,
                                http::field::upgrade,
                                http::field::te,
                                http::field::trailer,
                                http::field::proxy_authenticate,
                                http::field::proxy_authorization};

/// What the server says itself of every request.
constexpr std::array<std::string_view, 3> said_here{"X-Forwarded-Proto", "X-Forwarded-Host",
                                                    "Forwarded"};
/// What a field behind a body must not change. Source: RFC 9110 section 6.5.1.
constexpr std::array not_behind_body{http::field::content_length, http::field::host,
                                     http::field::authorization,  http::field::cookie,
                                     http::field::set_cookie,     http::field::content_type,
                                     http::field::expect,         http::field::content_encoding,
                                     http::field::content_range};

bool is_named_by_connection(http::fields const& head, beast::string_view name) {
  auto const lines = head.equal_range(http::field::connection);
  return std::any_of(lines.first, lines.second,
                     [&](auto const& line) { return http::token_list{line.value()}.exists(name); });
}

template <typename Names, typename Name>
bool is_one_of(Names const& names, Name name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Whether it ends at this connection.
bool ends_here(http::fields const& head, http::fields::value_type const& field) {
  return is_one_of(hop_by_hop, field.name()) || field.name() == http::field::content_length ||
         is_named_by_connection(head, field.name_string());
}

void append(std::string& to, std::string_view name, std::string_view value) {
  to.append(name).append(": ").append(value).append("\r\n");
}

void append(std::string& to, http::fields::value_type const& field) {
  append(to, std_view(field.name_string()), std_view(field.value()));
}

void append(std::string& to, body_framing const& body) {
  if (body.is == body_framing::kind::length) {
    append(to, "Content-Length", std::to_string(body.bytes));
  } else if (body.is == body_framing::kind::chunked) {
    append(to, "Transfer-Encoding", "chunked");
  }
}

/// Path and query: "http://host/path" says the host a second time.
std::string_view path_of(std::string_view target) {
  if (auto const scheme = target.find("://");
      scheme != std::string_view::npos && !target.starts_with('/')) {
    target.remove_prefix(scheme + 3);
    target.remove_prefix(std::min(target.find('/'), target.size()));
  }
  return target.empty() ? "/" : target;
}

}  // namespace

bool asks_for_websocket(http::request_header<> const& head) {
  return head.version() == 11 && head.method() == http::verb::get &&
         is_named_by_connection(head, "Upgrade") &&
         beast::iequals(head[http::field::upgrade], "websocket");
}

bool is_idempotent(http::verb method) noexcept {
  return is_one_of(std::array{http::verb::get, http::verb::head, http::verb::options,
                              http::verb::put, http::verb::delete_},
                   method);
}

bool may_be_followed(http::request_header<> const& head, body_framing const& body) {
  bool const has_body = body.is != body_framing::kind::none &&
                        !(body.is == body_framing::kind::length && body.bytes == 0);
  // Behind an answer to HEAD stands, of careless servers, the body that it should not have.
  return head.method() != http::verb::head &&
         (!has_body || is_one_of(std::array{http::verb::post, http::verb::put, http::verb::patch},
                                 head.method()));
}

std::string request_text(http::request_header<> const& head, body_framing const& body,
                         relayed_client const& from, bool is_kept) {
  auto made = fmt::format("{} {} HTTP/1.1\r\n", std_view(head.method_string()),
                          path_of(std_view(head.target())));
  std::string forwarded_for;
  for (auto const& field : head) {
    auto const is = [&](std::string_view name) {
      return beast::iequals(field.name_string(), beast::string_view{name.data(), name.size()});
    };
    if (is("X-Forwarded-For") && !is_named_by_connection(head, field.name_string())) {
      forwarded_for.append(std_view(field.value())).append(", ");
      continue;
    }
    bool const is_servers = std::any_of(said_here.begin(), said_here.end(), is) ||
                            field.name() == http::field::expect ||
                            (from.has_token && field.name() == http::field::authorization);
    // What `Connection` names goes, but not what makes a request one.
    if (is_servers || (ends_here(head, field) && field.name() != http::field::host)) continue;
    append(made, field);
  }
  auto const host = std_view(head[http::field::host]);
  if (host.empty() && head.count(http::field::host) == 0) append(made, "Host", "127.0.0.1");
  append(made, "X-Forwarded-For", forwarded_for + from.address);
  append(made, "X-Forwarded-Proto", from.is_encrypted ? "https" : "http");
  if (!host.empty()) append(made, "X-Forwarded-Host", host);
  if (asks_for_websocket(head)) {
    append(made, "Connection", "Upgrade");
    append(made, "Upgrade", "websocket");
  } else if (!is_kept) {
    append(made, "Connection", "close");
  }
  append(made, body);
  return made.append("\r\n");
}

bool comes_in_events(http::response_header<> const& head) {
  auto const type = std_view(head[http::field::content_type]);
  auto const name = type.substr(0, type.find_first_of("; \t"));
  return beast::iequals(name, "text/event-stream") &&
         head.count(http::field::content_encoding) == 0;
}

std::string answer_text(http::response_header<> const& head, answer_form const& form) {
  auto made = fmt::format("HTTP/1.{} {} {}\r\n", form.version % 10, head.result_int(),
                          std_view(head.reason()));
  for (auto const& field : head) {
    if (!ends_here(head, field)) append(made, field);
  }
  append(made, form.body);
  if (form.is_websocket) {
    append(made, "Connection", "Upgrade");
    append(made, "Upgrade", "websocket");
  } else if (!form.keep_alive) {
    append(made, "Connection", "close");
  } else if (form.version == 10) {
    append(made, "Connection", "keep-alive");
  }
  return made.append("\r\n");
}

std::string last_chunk(http::fields const& trailers) {
  std::string made{"0\r\n"};
  for (auto const& field : trailers) {
    if (!ends_here(trailers, field) && !is_one_of(not_behind_body, field.name())) {
      append(made, field);
    }
  }
  return made.append("\r\n");
}

void append_chunk(std::string& to, std::string_view piece) {
  fmt::format_to(std::back_inserter(to), "{:x}\r\n{}\r\n", piece.size(), piece);
}

}  // namespace sluice::server
