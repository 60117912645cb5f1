/// How long one of several ranks may be away, parked: others wait for it in a collective, until their watchdog ends them all.
///
/// Half of what they wait for it is the rank's own, computing and what it says to them; PyTorch's watchdog waits for ten minutes
/// unless the program says otherwise.
///
///   options.longest_absence = longest_absence(environment("WORLD_SIZE"), timeout);
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace sluice::step {

/// As torch.distributed has it for NCCL.
inline constexpr std::chrono::minutes usual_collective_timeout{10};
inline constexpr std::chrono::hours longest_collective_timeout{24};

/// `ranks`: how many there are, as torchrun says it; a text that is no number above 1 means one. `timeout`: a number of seconds, empty for
/// the usual one; another text is logged, and counts as the usual one.
[[nodiscard]] std::optional<std::chrono::nanoseconds> longest_absence(std::string const& ranks,
                                                                      std::string const& timeout);

}  // namespace sluice::step
