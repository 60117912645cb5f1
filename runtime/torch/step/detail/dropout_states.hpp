/// What cuDNN draws the dropout of recurrent layers from. Torch makes it at a layer's first run, and
/// again after a generator has got another state, and keeps it where nobody can ask for it; each run of
/// a layer changes it.
///
/// Thread-safety: any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace sluice::detail {

/// From the first call on they are seen as they are made, and made outside of a micro-batch's memory.
void look_for_dropout_states();

/// How many have been made.
[[nodiscard]] std::uint64_t dropout_states_made();

/// Each that lives, and a copy of it.
[[nodiscard]] std::vector<std::pair<at::Tensor, at::Tensor>> copies_of_dropout_states();

}  // namespace sluice::detail
