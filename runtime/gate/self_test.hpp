/// Whether what looks for the driver's functions finds the gate's, by whichever way it looks. A
/// launch that goes past the gate could not be held, and memory would be taken from under it.
#pragma once

#include <optional>
#include <string>

namespace sluice::gate {

/// A way that does not lead here, in words: the dynamic linker's global scope, libcuda opened by name
/// or by its path, or cuGetProcAddress. Nothing if all do, and where this library was opened by a
/// program that knows it instead of being preloaded. The driver must be open.
[[nodiscard]] std::optional<std::string> way_past_the_gate();

}  // namespace sluice::gate
