/// Reading fields out of messages, and refusing them, for the broker's side of a conversation.
#pragma once

#include <string>

#include "memhandover/error.hpp"
#include "memhandover/wire.hpp"

namespace sluice::memhandover::detail {

/// One field of a message. `missing` counts where there is none; throws `invalid_argument` for one of
/// another type.
template <typename T>
[[nodiscard]] T field(nlohmann::json const& body, char const* name, T missing) {
  auto const found = body.find(name);
  if (found == body.end()) {
    return missing;
  }
  try {
    return found->get<T>();
  } catch (nlohmann::json::exception const&) {
    throw error{error_kind::invalid_argument,
                std::string{"the field "} + name + " of a message has the wrong type"};
  }
}

/// The answer that tells an error.
[[nodiscard]] inline nlohmann::json refusal(error const& why) {
  return {{"type", "error"}, {"kind", static_cast<int>(why.kind())}, {"message", why.what()}};
}

}  // namespace sluice::memhandover::detail
