/// The tokens that clients show to the endpoint.
///
///   auto const tokens = access_tokens::parse("# of the dashboard\n4f6fa2b1\n");
///   tokens.allow("Bearer 4f6fa2b1");   // true: what a header Authorization has
///
/// Source: RFC 6750 section 2.1. Immutable, so that all threads may ask.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

namespace sluice::server {

class access_tokens {
 public:
  static constexpr std::size_t longest = 256;
  static constexpr std::size_t most = 1024;

  /// One token on each line; what stands behind a # and empty lines are passed over. Throws `invalid_argument` for a text
  /// without tokens and for what can be none, by its line alone.
  [[nodiscard]] static access_tokens parse(std::string_view text);

  /// Takes as long whatever is shown, and whichever of the tokens it is.
  [[nodiscard]] bool allow(std::string_view authorization) const noexcept;

 private:
  /// With zeros behind it, which no token has.
  using padded = std::array<unsigned char, longest>;
  [[nodiscard]] static padded pad(std::string_view token) noexcept;

  std::vector<padded> tokens_;
};

/// For whom is not allowed to ask.
[[nodiscard]] std::string_view refusal_without_token(bool has_shown_one) noexcept;

}  // namespace sluice::server
