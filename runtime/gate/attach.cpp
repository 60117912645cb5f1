#include "runtime/gate/attach.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "runtime/gate/driver_calls.hpp"
#include "runtime/gate/dynamic_loading.hpp"
#include "runtime/gate/gate.hpp"
#include "runtime/gate/self_test.hpp"

extern "C" sluice_gate_api const* sluice_gate_table();

namespace sluice::gate {
namespace {

constinit std::mutex attaching;
constinit std::atomic<sluice_runtime_api const*> the_runtime{nullptr};
constinit std::atomic<bool> is_offered{false};  ///< the table, by who computes for a server
thread_local constinit bool attaching_here [[gnu::tls_model("initial-exec")]] = false;

using attach_function = decltype(&sluice_runtime_attach);

sluice_runtime_api const* ask_runtime(int device) {
  if (auto const past = way_past_the_gate()) {
    std::fprintf(stderr,
                 "sluice: launches would go past the gate: %s. This process runs without sharing. "
                 "Take out of LD_PRELOAD what comes before the gate.\n",
                 past->c_str());
    return nullptr;
  }
  char const* path = std::getenv("SLUICE_RUNTIME_LIBRARY");
  if (path == nullptr || *path == '\0') {
    std::fprintf(stderr,
                 "sluice: SLUICE_RUN is set but SLUICE_RUNTIME_LIBRARY is not; this process runs "
                 "without sharing. "
                 "Start it with `sluice run`.\n");
    return nullptr;
  }
  void* library = open_past_the_gate(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr,
                 "sluice: cannot open the runtime library; this process runs without sharing: %s\n",
                 ::dlerror());
    return nullptr;
  }
  auto const attach = reinterpret_cast<attach_function>(::dlsym(library, "sluice_runtime_attach"));
  if (attach == nullptr) {
    std::fprintf(stderr,
                 "sluice: %s has no sluice_runtime_attach; this process runs without sharing\n",
                 path);
    return nullptr;
  }
  sluice_runtime_api const* table = attach(sluice_gate_table(), device);
  if (table != nullptr && table->size < sizeof(sluice_runtime_api)) {
    std::fprintf(stderr,
                 "sluice: %s is older than this gate (its table has %zu bytes, %zu are needed); "
                 "this process runs "
                 "without sharing\n",
                 path, table->size, sizeof(sluice_runtime_api));
    return nullptr;
  }
  return table;
}

/// Of a job that is never to train without sharing.
void end_if_pool_is_required() {
  constexpr int exit_code = 125;  // of `sluice run` without a pool
  char const* const required = std::getenv("SLUICE_REQUIRE_POOL");
  if (required != nullptr && std::strcmp(required, "1") == 0) {
    std::fputs(
        "sluice: this process ends, since --require-pool does not let it run without sharing\n",
        stderr);
    ::_exit(exit_code);
  }
}

}  // namespace

bool attach_if_due() {
  gate& at = the_gate();
  at.prepare();
  if (!at.unattached() || attaching_here || this_thread().exempt) {
    return !at.unattached();
  }
  if (driver::current_context() == nullptr) {
    return false;
  }
  std::lock_guard const guard{attaching};
  if (at.unattached()) {
    attaching_here = true;
    the_runtime.store(ask_runtime(driver::current_device()), std::memory_order_release);
    attaching_here = false;
    if (the_runtime.load(std::memory_order_relaxed) == nullptr) {
      end_if_pool_is_required();
    }
    at.attached();
  }
  return true;
}

bool offer_memory(sluice_runtime_api const* of) {
  std::lock_guard const guard{attaching};
  the_gate().prepare();
  if (std::getenv("SLUICE_RUN") != nullptr || of->size < sizeof(sluice_runtime_api) ||
      the_runtime.load(std::memory_order_relaxed) != nullptr) {
    return false;
  }
  is_offered.store(true, std::memory_order_relaxed);
  the_runtime.store(of, std::memory_order_release);
  return true;
}

sluice_runtime_api const* sharing_runtime() {
  gate& at = the_gate();
  if (at.unattached()) {
    attach_if_due();
  }
  return at.inert() || attaching_here ? nullptr : the_runtime.load(std::memory_order_acquire);
}

bool is_pool_memory(std::uint64_t address) {
  sluice_runtime_api const* const found = the_gate().unattached() ? nullptr : sharing_runtime();
  return found != nullptr && found->holds(address) != 0;
}

bool is_mapped_by_runtime(std::uint64_t address) {
  return !is_offered.load(std::memory_order_relaxed) && is_pool_memory(address);
}

void want_launch(symbol held_in, std::int64_t since_ns) {
  sluice_runtime_api const* const found = the_runtime.load(std::memory_order_acquire);
  if (found != nullptr && found->launch_wanted != nullptr) {
    found->launch_wanted();
  }
  if (found != nullptr && found->launch_held != nullptr) {
    found->launch_held(symbols[static_cast<std::size_t>(held_in)].name, since_ns);
  }
}

int sharing_device() {
  return driver::current_device();
}

}  // namespace sluice::gate
