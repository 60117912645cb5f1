/// What the driver says of an address in memory of the pool, also where that is parked at the moment: the same as ever. It
/// knows none of addresses without memory behind them, so who asks waits until the memory is there.
#include <cstdint>

#include "runtime/gate/attach.hpp"
#include "runtime/gate/dispatch.hpp"

using namespace sluice::gate;

namespace {

/// Calls `ask`, again if memory at `address` may have gone meanwhile.
template <typename Ask>
CUresult ask_while_there(symbol which, CUdeviceptr address, Ask const& ask) {
  gate& at = the_gate();
  for (;;) {
    auto const seen = at.departures();
    CUresult const answer = ask();
    if ((!at.is_parked() && at.departures() == seen) || this_thread().exempt || at.inert() ||
        !is_pool_memory(address)) {
      return answer;
    }
    at.await_return(which);
  }
}

}  // namespace

SLUICE_DRIVER_CALL CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                                  CUdeviceptr address) {
  using driver_function = CUresult (*)(void*, CUpointer_attribute, CUdeviceptr);
  return ask_while_there(symbol::of_cuPointerGetAttribute, address, [&] {
    return real<driver_function>(symbol::of_cuPointerGetAttribute)(data, attribute, address);
  });
}

SLUICE_DRIVER_CALL CUresult cuPointerGetAttributes(unsigned int count,
                                                   CUpointer_attribute* attributes, void** data,
                                                   CUdeviceptr address) {
  using driver_function = CUresult (*)(unsigned int, CUpointer_attribute*, void**, CUdeviceptr);
  return ask_while_there(symbol::of_cuPointerGetAttributes, address, [&] {
    return real<driver_function>(symbol::of_cuPointerGetAttributes)(count, attributes, data,
                                                                    address);
  });
}

SLUICE_DRIVER_CALL CUresult cuPointerSetAttribute(void const* value, CUpointer_attribute attribute,
                                                  CUdeviceptr address) {
  flush_if_deferring(symbol::of_cuPointerSetAttribute);
  using driver_function = CUresult (*)(void const*, CUpointer_attribute, CUdeviceptr);
  return ask_while_there(symbol::of_cuPointerSetAttribute, address, [&] {
    return real<driver_function>(symbol::of_cuPointerSetAttribute)(value, attribute, address);
  });
}
