#include "runtime/server/hosting/gate_in_process.hpp"

#include <dlfcn.h>

namespace sluice::server {

sluice_gate_api const* gate_in_process() noexcept {
  auto const table =
      reinterpret_cast<sluice_gate_api const* (*)()>(::dlsym(RTLD_DEFAULT, "sluice_gate_table"));
  auto const* const gate = table == nullptr ? nullptr : table();
  return gate == nullptr || gate->size < sizeof(sluice_gate_api) ? nullptr : gate;
}

}  // namespace sluice::server
