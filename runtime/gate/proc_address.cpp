/// cuGetProcAddress: the driver says which of its functions answers for a name, a version and the
/// default-stream flag; who asked gets our function of the same ABI instead.
///
/// The driver's answer is recognised by its address, so whatever rule it used to choose among the
/// variants is followed. A launch whose address is none that we know fails closed: it is reported
/// as missing rather than let past the gate.
#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>
#include <unordered_map>

#include "runtime/gate/dispatch.hpp"

using namespace sluice::gate;

namespace {

constexpr std::string_view launch_words[] =
#define SLUICE_LAUNCH_WORDS(...) {__VA_ARGS__};
#include "driver_symbols.inc"

    constexpr std::string_view describing_words[] =
#define SLUICE_DESCRIBING_WORDS(...) {__VA_ARGS__};
#include "driver_symbols.inc"

        bool looks_like_launch(std::string_view name) {
  auto const contained = [name](std::string_view word) {
    return name.find(word) != std::string_view::npos;
  };
  return std::any_of(std::begin(launch_words), std::end(launch_words), contained) &&
         std::none_of(std::begin(describing_words), std::end(describing_words), contained);
}

/// Our functions by the address of the driver's.
using substitutes = std::unordered_multimap<void*, std::size_t>;

substitutes const& known_substitutes() {
  static substitutes const all = [] {
    substitutes found;
    for (std::size_t i = 0; i < symbol_count; ++i) {
      if (symbols[i].kind != symbol_class::passed) {
        found.emplace(sluice_driver_table[i].load(std::memory_order_acquire), i);
      }
    }
    return found;
  }();
  return all;
}

/// Our function for the driver's; the driver's own if the gate has nothing to say to it; nullptr if
/// it must not be used.
void* substitute(std::string_view name, void* function) {
  auto const [begin, end] = known_substitutes().equal_range(function);
  void* ours = nullptr;
  for (auto one = begin; one != end; ++one) {
    // Two names may share one function in the driver: prefer the one that was asked for.
    if (ours == nullptr || std::string_view{symbols[one->second].name}.starts_with(name)) {
      ours = sluice_own_table[one->second];
    }
  }
  if (ours == nullptr && looks_like_launch(name)) {
    std::fprintf(
        stderr,
        "sluice: this driver answers for %.*s with a function that the gate does not know; the "
        "call is "
        "reported as missing. Build Sluice against the headers of this driver's CUDA version.\n",
        static_cast<int>(name.size()), name.data());
    return nullptr;
  }
  return ours != nullptr ? ours : function;
}

CUresult replace(char const* name, void** function, CUdriverProcAddressQueryResult* status) {
  *function = substitute(name, *function);
  if (*function != nullptr) {
    return CUDA_SUCCESS;
  }
  if (status != nullptr) {
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return CUDA_ERROR_NOT_FOUND;
}

bool nothing_to_replace(CUresult result, char const* name, void* const* function) {
  return result != CUDA_SUCCESS || name == nullptr || function == nullptr || *function == nullptr ||
         !driver_is_open();
}

}  // namespace

SLUICE_DRIVER_CALL CUresult cuGetProcAddress(char const* name, void** function, int version,
                                             cuuint64_t flags) {
  the_gate().prepare();
  using driver_function = CUresult (*)(char const*, void**, int, cuuint64_t);
  CUresult const result =
      real<driver_function>(symbol::of_cuGetProcAddress)(name, function, version, flags);
  return nothing_to_replace(result, name, function) ? result : replace(name, function, nullptr);
}

SLUICE_DRIVER_CALL CUresult cuGetProcAddress_v2(char const* name, void** function, int version,
                                                cuuint64_t flags,
                                                CUdriverProcAddressQueryResult* status) {
  the_gate().prepare();
  using driver_function =
      CUresult (*)(char const*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  CUresult const result =
      real<driver_function>(symbol::of_cuGetProcAddress_v2)(name, function, version, flags, status);
  return nothing_to_replace(result, name, function) ? result : replace(name, function, status);
}
