/// Memory of the fake driver: what it has handed out.
#pragma once

#include "tests/fake_driver/fake_core.hpp"

namespace sluice::fake {

/// Whether an address is neither device memory nor pinned host memory.
[[nodiscard]] bool is_pageable(void const* address);

/// Whether it lies in host memory that was pinned by cuMemHostRegister.
[[nodiscard]] bool is_registered(void const* address);

/// Whether some of these bytes are reserved addresses at which nothing is mapped.
[[nodiscard]] bool is_unmapped(void const* address, std::size_t bytes);

}  // namespace sluice::fake
