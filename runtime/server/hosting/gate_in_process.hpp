/// The gate's table, where it is preloaded into this process.
#pragma once

#include "abi/gate_api.h"

namespace sluice::server {

/// Null if it is not there, or is older than this program.
[[nodiscard]] sluice_gate_api const* gate_in_process() noexcept;

}  // namespace sluice::server
