#include "runtime/gate/dynamic_loading.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <string>
#include <string_view>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/find_driver.hpp"

extern "C" {
/// The C library's own functions; dlopen_stubs.S jumps through them after asking
/// `sluice_names_driver`.
[[gnu::visibility("hidden")]] std::atomic<void*> sluice_next_dlopen{nullptr};
[[gnu::visibility("hidden")]] std::atomic<void*> sluice_next_dlmopen{nullptr};
[[gnu::visibility("hidden")]] int sluice_names_driver(char const* name);
[[gnu::visibility("hidden")]] void* sluice_open_itself(char const* name, int flags);
}

namespace sluice::gate {
namespace {

using dlopen_function = void* (*)(char const*, int);

// Not in a constructor: constructors of other libraries call dlopen before ours would run.
void find_next() {
  if (sluice_next_dlmopen.load(std::memory_order_acquire) == nullptr) {
    sluice_next_dlopen.store(::dlsym(RTLD_NEXT, "dlopen"), std::memory_order_release);
    sluice_next_dlmopen.store(::dlsym(RTLD_NEXT, "dlmopen"), std::memory_order_release);
  }
}

dlopen_function next_dlopen() {
  find_next();
  return reinterpret_cast<dlopen_function>(sluice_next_dlopen.load(std::memory_order_acquire));
}

}  // namespace

void* open_past_the_gate(char const* path, int flags) {
  return next_dlopen()(path, flags);
}

}  // namespace sluice::gate

int sluice_names_driver(char const* name) {
  sluice::gate::find_next();
  if (name == nullptr) {
    return 0;
  }
  char const* slash = std::strrchr(name, '/');
  std::string_view const base = slash != nullptr ? slash + 1 : name;
  return static_cast<int>(base == "libcuda.so" || base.starts_with("libcuda.so."));
}

void* sluice_open_itself(char const* name, int flags) {
  using namespace sluice::gate;
  if (std::strchr(name, '/') != nullptr) {
    suggest_driver(name);
  }
  if (!driver_is_open() && driver_candidates().empty()) {
    // The plain name would find this library; a file that is not there fails with the loader's own
    // message.
    return next_dlopen()("/nonexistent/libcuda.so.1", flags);
  }
  return next_dlopen()(own_path().c_str(), flags);
}
