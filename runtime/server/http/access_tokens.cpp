#include "runtime/server/http/access_tokens.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

constexpr std::string_view blanks{" \t\r"};

std::string_view trimmed(std::string_view text) {
  auto const begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

/// RFC 6750's b64token.
bool is_token(std::string_view text) {
  auto const end = text.find_last_not_of('=');
  auto const is_character = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           std::string_view{"-._~+/"}.find(c) != std::string_view::npos;
  };
  return end != std::string_view::npos &&
         std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end) + 1,
                     is_character);
}

/// What stands behind "Bearer ", whose letters may be small; empty: it is something else.
std::string_view bearer_of(std::string_view authorization) {
  constexpr std::string_view scheme{"bearer "};
  if (authorization.size() < scheme.size()) return {};
  auto const is_same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; };
  auto const given = authorization.substr(0, scheme.size());
  if (!std::equal(given.begin(), given.end(), scheme.begin(), is_same)) return {};
  return trimmed(authorization.substr(scheme.size()));
}

}  // namespace

access_tokens::padded access_tokens::pad(std::string_view token) noexcept {
  padded result{};
  std::copy_n(token.begin(), std::min(token.size(), longest), result.begin());
  return result;
}

access_tokens access_tokens::parse(std::string_view text) {
  access_tokens result;
  for (std::size_t line = 1; !text.empty(); ++line) {
    auto const end = std::min(text.find('\n'), text.size());
    auto const token = trimmed(text.substr(0, std::min(text.find('#'), end)));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (token.empty()) continue;
    auto const refuse = [line](std::string const& why) {
      throw error{error_kind::invalid_argument, fmt::format("line {} {}", line, why)};
    };
    if (token.size() > longest) {
      refuse(fmt::format("has {} characters, a token has at most {}", token.size(), longest));
    }
    if (!is_token(token)) {
      refuse(
          "is no token: one stands on each line, of letters, digits, \"-._~+/\" and \"=\" at its "
          "end");
    }
    if (result.tokens_.size() == most) refuse(fmt::format("is one token more than {}", most));
    result.tokens_.push_back(pad(token));
  }
  if (result.tokens_.empty()) {
    throw error{error_kind::invalid_argument,
                "there is no token in it; write one, such as `openssl rand -hex 32` makes"};
  }
  return result;
}

bool access_tokens::allow(std::string_view authorization) const noexcept {
  auto const token = bearer_of(authorization);
  auto const shown = pad(token);
  unsigned found = 0;
  for (auto const& each : tokens_) {
    unsigned difference = 0;
    for (std::size_t i = 0; i < longest; ++i) {
      difference |= static_cast<unsigned>(shown[i] ^ each[i]);
    }
    found |= static_cast<unsigned>(difference == 0);
  }
  return found != 0 && is_token(token) && token.size() <= longest;
}

std::string_view refusal_without_token(bool has_shown_one) noexcept {
  return has_shown_one ? "this server does not know that token; send one of those in its "
                         "server.token_file as Authorization: Bearer TOKEN"
                       : "this server asks for a token; send it as Authorization: Bearer TOKEN";
}

}  // namespace sluice::server
