#include "nccl_shim/calls/surroundings.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "abi/nccl_abi.hpp"

namespace sluice::nccl_shim {
namespace {

thread_local constinit int inside [[gnu::tls_model("initial-exec")]] = 0;

/// Threads that wait for what was left to the gate.
constinit std::atomic<unsigned> flushing{0};

}  // namespace

void* real_function(char const* name) noexcept {
  // By its handle, since libraries that are opened locally are in nobody else's scope.
  void* const library = ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return ::dlsym(RTLD_NEXT, name);
  }
  void* const found = ::dlsym(library, name);
  ::dlclose(library);  // one reference less; it stays for those who have it loaded
  return found;
}

[[gnu::hot]] sluice_gate_api const* gate() noexcept {
  static sluice_gate_api const* const found = []() -> sluice_gate_api const* {
    char const* const run = std::getenv("SLUICE_RUN");
    auto* const table =
        reinterpret_cast<sluice_gate_api const* (*)()>(::dlsym(RTLD_DEFAULT, "sluice_gate_table"));
    if (run == nullptr || *run == '\0' || table == nullptr) {
      return nullptr;
    }
    auto const* const offered = table();
    constexpr auto needed = offsetof(sluice_gate_api, leave) + sizeof(void*);
    return offered->size >= needed ? offered : nullptr;
  }();
  return found;
}

[[gnu::hot]] board* the_board() noexcept {
  static board* const one = []() -> board* {
    char const* const folder = std::getenv("SLUICE_RUNTIME_DIR");
    return folder != nullptr && *folder != '\0' ? board::open(folder).release() : nullptr;
  }();  // threads call until the end
  return one;
}

[[gnu::hot]] bool is_watching() noexcept {
  return !inside_nccl::here() && gate() != nullptr;
}

bool holds(void const* address) noexcept {
  return gate()->holds(reinterpret_cast<std::uint64_t>(address)) != 0;
}

void flush() noexcept {
  flushing.fetch_add(1, std::memory_order_seq_cst);
  gate()->flush();
  flushing.fetch_sub(1, std::memory_order_seq_cst);
}

bool is_flushing() noexcept {
  return flushing.load(std::memory_order_seq_cst) != 0;
}

inside_nccl::inside_nccl() noexcept {
  ++inside;
}
inside_nccl::~inside_nccl() {
  --inside;
}
bool inside_nccl::here() noexcept {
  return inside != 0;
}

}  // namespace sluice::nccl_shim
