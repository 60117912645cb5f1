/// The real driver behind the gate: where it is, and the table through which every call reaches it.
///
/// A slot of the table goes through these values, and never back:
///
///   first-call code  ──open_driver()──►  the driver's function
///                                   ──►  CUDA_ERROR_NOT_FOUND: this driver has no such symbol
///                                   ──►  CUDA_ERROR_NOT_INITIALIZED: there is no driver
///
/// First-call code opens the driver and jumps again, so a slot may be called at any time and from
/// any thread. Entry points are named by enumerators `symbol::of_<name>`, because cuda.h turns many
/// plain names into macros.
#pragma once

// Every variant of every function gets declared, so that the compiler checks the wrappers against
// the header.
#define __CUDA_API_VERSION_INTERNAL  // NOLINT: the name is cuda.h's
#include <cuda.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace sluice::gate {

enum class symbol : std::uint16_t {
#define SLUICE_DRIVER_SYMBOL(name, kind) of_##name,
#include "driver_symbols.inc"
};

inline constexpr std::size_t symbol_count = 0
#define SLUICE_DRIVER_SYMBOL(name, kind) +1
#include "driver_symbols.inc"
    ;

/// What the gate does with an entry point; generate.py decides by rule.
enum class symbol_class : std::uint8_t {
  deferred,
  gated,
  special,
  ordered,
  refused,
  carries,
  asks,
  passed,
  drains
};

struct symbol_info {
  char const* name;
  symbol_class kind;
};

/// All entry points, in the order of the enumerators and of both tables.
extern std::array<symbol_info, symbol_count> const symbols;

extern "C" {
/// Where calls go. Written by `open_driver` alone.
extern std::atomic<void*> sluice_driver_table[];
/// What this library exports under the same names.
extern void* const sluice_own_table[];
}

/// The driver's function for an entry point of type `Function`; callable also when the driver lacks
/// it.
template <typename Function>
[[nodiscard]] Function real(symbol which) noexcept {
  return reinterpret_cast<Function>(
      sluice_driver_table[static_cast<std::size_t>(which)].load(std::memory_order_relaxed));
}

/// Opens the driver and fills the table, once. Afterwards `driver_is_open` tells whether there is
/// one.
void open_driver();
[[nodiscard]] bool driver_is_open() noexcept;

/// The driver's own function of that exact name; nullptr without a driver or if it has none.
[[nodiscard]] void* driver_function(char const* name) noexcept;

}  // namespace sluice::gate
