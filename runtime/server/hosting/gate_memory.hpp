/// Has the gate answer this process's allocations on a GPU out of the pool: torch's allocator, and libraries', ask the driver
/// as ever.
///
///   if (answer_from_pool(memory)) {
///     // … what is allocated on the pool's GPU from here on is the pool's …
///   }
#pragma once

#include <memory>

#include "runtime/server/hosting/activation_memory.hpp"

namespace sluice::server {

/// Once in a process, and for as long as it lives. False if the gate is not in it: the log says so, and the driver
/// answers out of what the pool has left of the device.
[[nodiscard]] bool answer_from_pool(std::shared_ptr<activation_memory> memory);

}  // namespace sluice::server
