/// Calls that other processes must agree to before they are made: see `sluice_agreed_call`.
#pragma once

#include <cstdint>

#include "runtime/gate/gate_api.h"

namespace sluice::gate {

/// As `sluice_gate_api` says of it.
[[nodiscard]] int make_agreed(sluice_agreed_call const& call) noexcept;
/// A moment, shorter when the waiting has begun only lately.
void wait_for_others(std::int64_t since) noexcept;

}  // namespace sluice::gate
