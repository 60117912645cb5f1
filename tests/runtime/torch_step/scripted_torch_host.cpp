/// Stands in for the glue between torch's CPU allocator and the runtime: leaves torch as it is.
#include "abi/step_api.h"

extern "C" SLUICE_EXPORT int sluice_torch_host_install(void) {
  return 0;
}
