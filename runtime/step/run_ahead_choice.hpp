/// How much predicted work a training process gives a stream of the device at a time: what the job
/// says of itself (SLUICE_RUN_AHEAD_US), else what the server has published, else 150 µs; without a
/// server there is no bound.
///
///   auto const own = run_ahead_of_job(environment("SLUICE_RUN_AHEAD_US"));
///   gate.set_run_ahead(choose_run_ahead(view.header(), own).count());   // each micro-batch
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::step {

/// A server that does not say what it wants is satisfied with this.
inline constexpr std::chrono::microseconds default_run_ahead{150};

/// From a number of microseconds. Nothing for an empty text, nor for a wrong one, which is logged.
[[nodiscard]] std::optional<std::chrono::nanoseconds> run_ahead_of_job(std::string const& text);

/// Zero: no bound.
[[nodiscard]] std::chrono::nanoseconds choose_run_ahead(
    memhandover::ledger_header const& header, std::optional<std::chrono::nanoseconds> own) noexcept;

}  // namespace sluice::step
