#include "runtime/gate/driver.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "runtime/gate/dynamic_loading.hpp"
#include "runtime/gate/find_driver.hpp"
#include "runtime/gate/gate.hpp"

namespace sluice::gate {

constinit std::array<symbol_info, symbol_count> const symbols{{
#define SLUICE_DRIVER_SYMBOL(name, kind) {#name, symbol_class::kind},
#include "driver_symbols.inc"
}};

namespace {

std::atomic<void*> driver_handle{nullptr};

CUresult no_driver() {
  return CUDA_ERROR_NOT_INITIALIZED;
}

void* open_first_that_loads() {
  std::string failures;
  for (std::string const& path : driver_candidates()) {
    if (void* handle = open_past_the_gate(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return handle;
    }
    failures += std::string{"\n  "} + ::dlerror();
  }
  if (!failures.empty()) {
    std::fprintf(stderr,
                 "sluice: found the CUDA driver but could not load it; going on without:%s\n",
                 failures.c_str());
  }
  return nullptr;
}

}  // namespace

extern "C" {
[[gnu::visibility("hidden")]] void sluice_fill_driver_table(std::uint32_t symbol_index);
[[gnu::visibility("hidden")]] void sluice_missing();
}

/// Called by first-call code, with the caller's arguments saved.
void sluice_fill_driver_table(std::uint32_t /*symbol_index*/) {
  the_gate().prepare();
}

void open_driver() {
  void* handle = open_first_that_loads();
  driver_handle.store(handle, std::memory_order_release);
  for (std::size_t i = 0; i < symbol_count; ++i) {
    void* function = handle != nullptr ? ::dlsym(handle, symbols[i].name) : nullptr;
    if (function == nullptr) {
      function = handle != nullptr ? reinterpret_cast<void*>(&sluice_missing)
                                   : reinterpret_cast<void*>(&no_driver);
    }
    sluice_driver_table[i].store(function, std::memory_order_release);
  }
}

bool driver_is_open() noexcept {
  return driver_handle.load(std::memory_order_acquire) != nullptr;
}

void* driver_function(char const* name) noexcept {
  void* handle = driver_handle.load(std::memory_order_acquire);
  return handle != nullptr ? ::dlsym(handle, name) : nullptr;
}

}  // namespace sluice::gate
