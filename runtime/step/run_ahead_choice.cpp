#include "runtime/step/run_ahead_choice.hpp"

#include <spdlog/spdlog.h>

#include <cstdint>

#include "memhandover/base/numbers.hpp"
#include "memhandover/base/shared_text.hpp"

namespace sluice::step {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

std::optional<nanoseconds> run_ahead_of_job(std::string const& text) {
  if (text.empty()) {
    return std::nullopt;
  }
  constexpr auto longest = microseconds{memhandover::longest_run_ahead}.count();
  auto const wanted = parse_number<std::int64_t>(text);
  if (!wanted || *wanted < 1 || *wanted > longest) {
    spdlog::warn(
        "SLUICE_RUN_AHEAD_US is {}, must be a number of microseconds from 1 to {}; it is ignored",
        memhandover::readable_text(text), longest);
    return std::nullopt;
  }
  return microseconds{*wanted};
}

nanoseconds choose_run_ahead(memhandover::ledger_header const& header,
                             std::optional<nanoseconds> own) noexcept {
  if (header.serving_now.load() == 0) {
    return nanoseconds::zero();
  }
  return own ? *own : memhandover::published_run_ahead(header).value_or(default_run_ahead);
}

}  // namespace sluice::step
