#pragma once

#include <chrono>

namespace sluice {

/// For what another thread or process brings about. What never comes fails a test, and what comes late does not: a machine that does
/// other work beside the tests takes several times as long for everything, and stands still for seconds.
inline constexpr std::chrono::seconds patience{120};

}  // namespace sluice
