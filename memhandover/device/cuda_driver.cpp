#include "memhandover/device/cuda_driver.hpp"

#include <dlfcn.h>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {

std::shared_ptr<cuda_driver const> cuda_driver::load(
    std::function<void*(char const*)> const& resolve) {
  auto driver = std::make_shared<cuda_driver>();
// Two steps, so that the version macros of cuda.h are expanded before the name becomes a string.
#define SLUICE_TEXT(name) #name
#define SLUICE_LOAD(name)                                                                \
  driver->name = reinterpret_cast<decltype(driver->name)>(resolve(SLUICE_TEXT(name)));   \
  if (driver->name == nullptr) {                                                         \
    throw error{error_kind::unsupported,                                                 \
                "the CUDA driver has no " SLUICE_TEXT(name) "; install a newer driver"}; \
  }
  SLUICE_CUDA_FUNCTIONS(SLUICE_LOAD)
#undef SLUICE_LOAD
#undef SLUICE_TEXT
  return driver;
}

std::shared_ptr<cuda_driver const> cuda_driver::open() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw error{error_kind::unsupported, "this machine has no CUDA driver (libcuda.so.1)"};
  }
  auto driver = load([library](char const* name) { return ::dlsym(library, name); });
  driver->check(driver->cuInit(0), "cannot start the CUDA driver");
  return driver;
}

void cuda_driver::fail(CUresult result, std::string const& doing) const {
  char const* text = nullptr;
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) {
    text = "unknown error";
  }
  auto const kind = result == CUDA_ERROR_OUT_OF_MEMORY ? error_kind::out_of_memory
                    : result == CUDA_ERROR_NO_DEVICE   ? error_kind::unsupported
                                                       : error_kind::internal;
  throw error{
      kind, doing + ": " + text + " (CUDA error " + std::to_string(static_cast<int>(result)) + ")"};
}

bool cuda_available() noexcept {
  try {
    auto const driver = cuda_driver::open();
    int count = 0;
    return driver->cuDeviceGetCount(&count) == CUDA_SUCCESS && count > 0;
  } catch (std::exception const&) {
    return false;
  }
}

}  // namespace sluice::memhandover
