/// Where an engine is in its life (engine_host.hpp), and what has become of its requests.
#pragma once

#include <cstdint>
#include <string_view>

#include "runtime/server/inference/engine_gateway.hpp"

namespace sluice::server {

enum class engine_state { cold, queued, starting, ready, failed };

/// As status and metrics have it.
[[nodiscard]] inline std::string_view to_string(engine_state state) noexcept {
  switch (state) {
    case engine_state::cold:
      return "cold";
    case engine_state::queued:
      return "queued";
    case engine_state::starting:
      return "starting";
    case engine_state::ready:
      return "ready";
    case engine_state::failed:
      break;
  }
  return "failed";
}

/// How many requests have ended in which way.
struct relay_counts {
  std::uint64_t answered = 0, refused = 0, failed = 0, client_left = 0;

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
