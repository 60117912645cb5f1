/// Calls about functions, and about the modules and libraries that they belong to.
#include "runtime/gate/dispatch.hpp"
#include "runtime/gate/kernel_layouts.hpp"

using namespace sluice::gate;

namespace {

/// Libraries set an attribute before every launch that needs it. To set what is set already changes
/// nothing for launches that lie in a queue, so it does not wait for them.
template <typename Get>
void flush_if_it_changes(symbol which, int wanted, Get const& get) {
  int value = 0;
  if (the_gate().deferring() && (get(&value) != CUDA_SUCCESS || value != wanted)) {
    flush_submissions(which);
  }
}

/// Kernels of a module or library have gone.
CUresult unload(CUresult result) {
  forget_layouts();
  forget_kinds_of_calls();
  return result;
}

}  // namespace

SLUICE_DRIVER_CALL CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which,
                                               int value) {
  flush_if_it_changes(symbol::of_cuFuncSetAttribute, value, [&](int* found) {
    using driver_function = CUresult (*)(int*, CUfunction_attribute, CUfunction);
    return real<driver_function>(symbol::of_cuFuncGetAttribute)(found, which, function);
  });
  using driver_function = CUresult (*)(CUfunction, CUfunction_attribute, int);
  return real<driver_function>(symbol::of_cuFuncSetAttribute)(function, which, value);
}

SLUICE_DRIVER_CALL CUresult cuKernelSetAttribute(CUfunction_attribute which, int value,
                                                 CUkernel kernel, CUdevice device) {
  flush_if_it_changes(symbol::of_cuKernelSetAttribute, value, [&](int* found) {
    using driver_function = CUresult (*)(int*, CUfunction_attribute, CUkernel, CUdevice);
    return real<driver_function>(symbol::of_cuKernelGetAttribute)(found, which, kernel, device);
  });
  using driver_function = CUresult (*)(CUfunction_attribute, int, CUkernel, CUdevice);
  return real<driver_function>(symbol::of_cuKernelSetAttribute)(which, value, kernel, device);
}

SLUICE_DRIVER_CALL CUresult cuModuleUnload(CUmodule module) {
  flush_if_deferring(symbol::of_cuModuleUnload);
  return unload(real<CUresult (*)(CUmodule)>(symbol::of_cuModuleUnload)(module));
}

SLUICE_DRIVER_CALL CUresult cuLibraryUnload(CUlibrary library) {
  flush_if_deferring(symbol::of_cuLibraryUnload);
  return unload(real<CUresult (*)(CUlibrary)>(symbol::of_cuLibraryUnload)(library));
}
