/// Memory of the fake driver: what it has handed out.
#pragma once

#include "tests/fake_driver/fake_core.hpp"

namespace sluice::fake {

/// Whether an address is neither device memory nor pinned host memory.
[[nodiscard]] bool is_pageable(void const* address);

}  // namespace sluice::fake
