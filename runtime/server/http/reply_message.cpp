#include "runtime/server/http/reply_message.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <array>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <ctime>
#include <string>
#include <utility>

#include "runtime/server/http/reply_body.hpp"

namespace sluice::server {

namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

/// RFC 9110 section 5.6.7. Written by hand, because strftime's names follow the locale.
std::string date_text(std::time_t now) {
  constexpr std::array<char const*, 7> days{"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  constexpr std::array<char const*, 12> months{"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                               "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  auto const utc = fmt::gmtime(now);
  return fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT",
                     days.at(static_cast<std::size_t>(utc.tm_wday)), utc.tm_mday,
                     months.at(static_cast<std::size_t>(utc.tm_mon)), utc.tm_year + 1900,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

/// Of this second, in which there may be many.
std::string const& http_date() {
  thread_local std::time_t of = -1;
  thread_local std::string text;
  if (auto const now = std::time(nullptr); now != of) {
    text = date_text(now);
    of = now;
  }
  return text;
}

template <typename Body>
void set_headers(http::response<Body>& response, http_reply const& answer, bool keep_alive) {
  response.set(http::field::server, "sluice");
  response.set(http::field::date, http_date());
  if (!answer.binary_header_length) {
    response.set(http::field::content_type,
                 beast::string_view{answer.content_type.data(), answer.content_type.size()});
  } else {
    response.set(http::field::content_type, "application/octet-stream");
    response.set("Inference-Header-Content-Length", std::to_string(*answer.binary_header_length));
  }
  if (answer.coding != content_coding::identity) {
    response.set(http::field::content_encoding, std::string{coding_name(answer.coding)});
  }
  if (answer.varies) response.set(http::field::vary, "Accept-Encoding");
  if (answer.lists_codings) {
    response.set(http::field::accept_encoding, std::string{known_codings});
  }
  if (!answer.allow.empty()) {
    response.set(http::field::allow, beast::string_view{answer.allow.data(), answer.allow.size()});
  }
  if (answer.status == 401) response.set(http::field::www_authenticate, "Bearer");
  if (answer.retry_after.count() > 0) {
    response.set(http::field::retry_after, std::to_string(answer.retry_after.count()));
  }
  auto bytes = answer.body.size();
  for (auto const& each : answer.tensors) bytes += each.size();
  response.content_length(bytes);
  response.keep_alive(keep_alive);
}

}  // namespace

bool is_large(infer_result const& result, output_form const& form) {
  auto const* const response = std::get_if<infer_response>(&result);
  std::size_t bytes = 0;
  if (response != nullptr) {
    for (auto const& each : response->outputs) {
      bool const is_looked_through = each.type == datatype::bytes || each.type == datatype::boolean;
      bool const is_sent_as_it_is = form.is_binary(each.name) && !is_looked_through &&
                                    form.coding == content_coding::identity;
      bytes += is_sent_as_it_is ? 0 : each.data.size();
    }
  }
  return bytes > small_body / 8;  // in JSON a number is several times as long
}

http::message_generator message_of(http_reply answer, message_form const& form) {
  auto const status = static_cast<http::status>(answer.status);
  if (form.is_head) {
    http::response<http::empty_body> response{status, form.version};
    set_headers(response, answer, form.keep_alive);
    return response;
  }
  http::response<reply_body> response{status, form.version};
  set_headers(response, answer, form.keep_alive);
  response.body() = {std::move(answer.body), std::move(answer.tensors)};
  return response;
}

}  // namespace sluice::server
