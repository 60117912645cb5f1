/// How much memory of a GPU nobody has, as the driver's management library counts it: this process needs no context for that,
/// so it can be asked before there is one. In memory of the host there is no such number.
#pragma once

#include <cstdint>
#include <optional>

namespace sluice::server {

/// Nothing for a negative ordinal, and where the library is not installed or does not know the device.
[[nodiscard]] std::optional<std::uint64_t> free_device_memory(int cuda_ordinal);

}  // namespace sluice::server
