#include "benchmarks/driver_function.hpp"

#include <dlfcn.h>

#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::bench {

void* find_driver_function(char const* name) {
  // Never closed: the driver does not unload.
  static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  auto* const found = library != nullptr ? ::dlsym(library, name) : nullptr;
  if (found == nullptr) {
    throw error{error_kind::unsupported, library != nullptr
                                             ? std::string{"the CUDA driver has no "} + name
                                             : "this machine has no CUDA driver (libcuda.so.1)"};
  }
  return found;
}

}  // namespace sluice::bench
