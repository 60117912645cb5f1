/// Settings of torch's CUDA allocator with which a job's memory would not be the pool's.
#pragma once

#include <optional>
#include <string>

#include "runtime/launcher/environment.hpp"

namespace sluice::launcher {

/// What in PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF makes torch take memory past the pool, as
/// a sentence that says what to do instead; nothing if nothing does.
[[nodiscard]] std::optional<std::string> memory_outside_pool(environment const& env);

}  // namespace sluice::launcher
