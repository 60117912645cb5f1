#include "runtime/step/rank_absence.hpp"

#include <spdlog/spdlog.h>

#include <cstdint>

#include "memhandover/base/numbers.hpp"
#include "memhandover/base/shared_text.hpp"

namespace sluice::step {
namespace {

std::chrono::seconds timeout_in(std::string const& text) {
  constexpr auto longest = std::chrono::seconds{longest_collective_timeout}.count();
  auto const found = parse_number<std::int64_t>(text);
  if (found && *found >= 1 && *found <= longest) {
    return std::chrono::seconds{*found};
  }
  if (!text.empty()) {
    spdlog::warn(
        "SLUICE_COLLECTIVE_TIMEOUT_S is {}, must be a number of seconds from 1 to {}; {} are taken",
        memhandover::readable_text(text), longest,
        std::chrono::seconds{usual_collective_timeout}.count());
  }
  return usual_collective_timeout;
}

}  // namespace

std::optional<std::chrono::nanoseconds> longest_absence(std::string const& ranks,
                                                        std::string const& timeout) {
  if (parse_number<std::int64_t>(ranks).value_or(1) <= 1) {
    return std::nullopt;
  }
  return std::chrono::nanoseconds{timeout_in(timeout)} / 2;
}

}  // namespace sluice::step
