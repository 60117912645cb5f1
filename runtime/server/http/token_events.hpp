/// Which server-sent events of an answer bring tokens, seen while they pass: those of OpenAI's APIs whose JSON has a text, or a part
/// of a call, that is not empty. What only says who speaks, how many tokens there were, or that it is over, brings none.
///
///   token_events events;
///   events.take("data: {\"choices\": [{\"delta\": {\"content\": \"\"}}]}\n\n");           // 0
///   events.take("data: {\"choices\": [{\"delta\": {\"content\": \"He\"}}]}\n\ndata: {");  // 1
///
/// Nothing of them is kept. An event that is not JSON brings none. Parsed by Boost.JSON.
///
/// Source: OpenAI's API reference, "Streaming" of completions ("text"), chat completions ("delta" of a choice) and responses ("delta");
/// HTML, "Server-sent events", section 9.2.6.
///
/// Not thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

namespace sluice::server {

class token_events {
 public:
  token_events();
  ~token_events();
  token_events(token_events&&) noexcept;
  token_events& operator=(token_events&&) noexcept;
  token_events(token_events const&) = delete;
  token_events& operator=(token_events const&) = delete;

  /// The next piece of the body, however it is cut. How many events that bring tokens have ended in it.
  [[nodiscard]] std::size_t take(std::string_view piece);
  /// Whether all that has been taken is whole events, so that another one may follow.
  [[nodiscard]] bool is_between_events() const;

 private:
  class handler;
  struct reading;
  std::unique_ptr<reading> reading_;
};

}  // namespace sluice::server
