/// Where an engine is in its life (engine_host.hpp), and what has become of its requests.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

enum class engine_state { cold, queued, starting, ready, parking, parked, waking, failed };

/// As status and metrics have them, in that order.
inline constexpr std::array<std::string_view, 8> engine_state_names{
    "cold", "queued", "starting", "ready", "parking", "parked", "waking", "failed"};

[[nodiscard]] inline std::string_view to_string(engine_state state) noexcept {
  return engine_state_names[static_cast<std::size_t>(state)];
}

/// Whether it has started, wherever its memory is.
[[nodiscard]] inline bool is_up(engine_state state) noexcept {
  return state == engine_state::ready || state == engine_state::parking ||
         state == engine_state::parked || state == engine_state::waking;
}

/// How many requests have ended in which way.
struct relay_counts {
  std::uint64_t answered = 0, refused = 0, failed = 0, client_left = 0;
  std::uint64_t broken_off = 0;  ///< of the failed ones, those whose answer had begun

  void add(relay_outcome outcome) noexcept {
    switch (outcome) {
      case relay_outcome::answered:
        ++answered;
        break;
      case relay_outcome::refused:
        ++refused;
        break;
      case relay_outcome::failed:
        ++failed;
        break;
      case relay_outcome::client_left:
        ++client_left;
        break;
    }
  }
};

}  // namespace sluice::server
