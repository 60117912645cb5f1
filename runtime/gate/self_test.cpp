#include "runtime/gate/self_test.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "runtime/gate/driver.hpp"
#include "runtime/gate/dynamic_loading.hpp"

extern "C" struct sluice_gate_api const* sluice_gate_table();

namespace sluice::gate {
namespace {

Dl_info image_of(void* function) {
  Dl_info found{};
  return function != nullptr && ::dladdr(function, &found) != 0 ? found : Dl_info{};
}

bool is_ours(void* function) {
  static void* const own = image_of(reinterpret_cast<void*>(&sluice_gate_table)).dli_fbase;
  return image_of(function).dli_fbase == own;
}

/// Where everybody else's names are bound. RTLD_DEFAULT is not that here: this library is linked so
/// that its own symbols come first.
void* global_scope() {
  return open_past_the_gate(nullptr, RTLD_LAZY);
}

template <typename Function>
Function in_global_scope(char const* name) {
  return reinterpret_cast<Function>(::dlsym(global_scope(), name));
}

/// "cuLaunchKernel, as …, is …'s".
std::optional<std::string> complaint(std::string_view name, char const* way, void* function) {
  if (function == nullptr || is_ours(function)) {
    return std::nullopt;
  }
  auto const* const file = image_of(function).dli_fname;
  return std::string{name} + ", " + way + ", is that of " +
         (file != nullptr ? file : "an unknown library");
}

/// The names of the functions that are of one of these classes.
std::vector<char const*> names_of(std::initializer_list<symbol_class> classes) {
  std::vector<char const*> names;
  for (symbol_info const& one : symbols) {
    if (std::find(classes.begin(), classes.end(), one.kind) != classes.end()) {
      names.push_back(one.name);
    }
  }
  return names;
}

std::optional<std::string> past_symbols(void* library, char const* way) {
  for (char const* const name : names_of({symbol_class::deferred, symbol_class::gated})) {
    if (auto found = complaint(name, way, ::dlsym(library, name))) {
      return found;
    }
  }
  return std::nullopt;
}

std::optional<std::string> past_dlopen(char const* path, char const* way) {
  auto const open = in_global_scope<decltype(&::dlopen)>("dlopen");
  void* const library = open(path, RTLD_LAZY | RTLD_LOCAL);
  return library != nullptr ? past_symbols(library, way) : std::nullopt;
}

/// Asks as a program that was built with the gate's headers, or the driver's if that is older.
std::optional<std::string> past_proc_address() {
  using get_version = CUresult (*)(int*);
  using ask_driver =
      CUresult (*)(char const*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  auto const ask = in_global_scope<ask_driver>("cuGetProcAddress_v2");
  int version = 0;
  if (ask == nullptr ||
      real<get_version>(symbol::of_cuDriverGetVersion)(&version) != CUDA_SUCCESS) {
    return std::nullopt;
  }
  version = std::min(version, CUDA_VERSION);
  for (std::string_view const name : names_of({symbol_class::deferred})) {
    std::string const plain{name.substr(0, name.find('_'))};  // what follows names a variant
    for (auto const variant : {CU_GET_PROC_ADDRESS_DEFAULT, CU_GET_PROC_ADDRESS_LEGACY_STREAM,
                               CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM}) {
      void* function = nullptr;
      CUdriverProcAddressQueryResult status{};
      if (ask(plain.c_str(), &function, version, variant, &status) != CUDA_SUCCESS) {
        continue;
      }
      if (auto found = complaint(plain, "from cuGetProcAddress", function)) {
        return found;
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> way_past_the_gate() {
  auto const table = in_global_scope<decltype(&sluice_gate_table)>("sluice_gate_table");
  if (table == nullptr || !is_ours(reinterpret_cast<void*>(table))) {
    return std::nullopt;
  }
  if (auto found = past_symbols(global_scope(), "as libraries are linked to it")) {
    return found;
  }
  if (auto found = past_dlopen("libcuda.so.1", "in libcuda.so.1 opened by name")) {
    return found;
  }
  if (auto const* const path = image_of(real<void*>(symbol::of_cuInit)).dli_fname) {
    if (auto found = past_dlopen(path, "in libcuda.so.1 opened by its path")) {
      return found;
    }
  }
  return past_proc_address();
}

}  // namespace sluice::gate
