#include "tests/runtime/step/run_ahead_role.hpp"

#include <dlfcn.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "abi/gate_api.h"
#include "abi/step_api.h"
#include "memhandover/base/error.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "tests/runtime/gate/built_files.hpp"

namespace sluice::test {
namespace {

void* driver = nullptr;

void tell(std::string const& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

/// Lets everything through.
constexpr sluice_gate_api open_gate{
    .size = sizeof(sluice_gate_api),
    .real = [](char const* symbol) { return ::dlsym(driver, symbol); },
    .close = [](std::int64_t) { return 0; },
    .wait_idle = [](std::int64_t) { return 0; },
    .open = [] {},
    .abort_begin = [] {},
    .abort_end = [] {},
    .exempt_thread = [](int) {},
    .protect_thread = [](int) {},
    .set_pause_word = [](std::uint64_t const volatile*) {},
    .set_urgent = [](int) {},
    .set_run_ahead = [](std::int64_t bound) { tell("bound " + std::to_string(bound)); },
    .launches = []() -> std::uint64_t { return 0; },
    .expendable_thread = [](int) {},
    .unit_ended = []() -> std::int64_t { return 0; },
    .set_demand_word = [](std::uint64_t const volatile*) {},
    .demand_answered = [](std::uint64_t) {},
    .demand_seen = []() -> std::int64_t { return 0; },
    .set_deferred = [](int) {},
    .flush = [] {},
    .deferred = []() -> std::uint64_t { return 0; },
    .flushes = [](std::size_t, sluice_gate_flushes*) { return 0; },
    .commit_begin = [](int (*)(void*), void*) { return 0; },
    .commit_end = [](void (*)(void*), void*) {},
    .commit_resolve = [](std::int64_t) { return 1; },
    .mark_units = [](std::int64_t) {},
    .long_unit = [](std::size_t index, sluice_gate_long_unit* of) -> int {
      *of = {"void attend<bfloat16>(float*)", index == 0 ? 400'000 : 200'000, index + 5};
      return index < 2 ? 1 : 0;
    },
    .commit_made = [](std::int64_t) { return 1; },
    .make_agreed = [](sluice_agreed_call const*) { return 1; },
    .make_agreed_now = [](sluice_agreed_call const*) { return 1; },
    .micro_batch = []() -> std::uint64_t { return 0; },
    .set_agreement = [](sluice_agreement const*) {},
    .agreement = []() -> sluice_agreement const* { return nullptr; },
    .holds = [](std::uint64_t) { return 0; },
    .attach_to_capture = [](void*, void*) { return 0; },
    .enter_at_once = [] { return 0; },
    .leave = [] {},
    .wait_launched = [] {},
    .watch_launches = [](sluice_launch_watcher const*) { return -1; },
    .set_announcement_word = [](std::uint64_t const volatile*) {},
    .offer_memory = [](sluice_runtime_api const*) { return -1; },
    .set_parked = [](int) {},
    .close_all = [](std::int64_t) { return 0; },
};

template <typename Function>
Function* function_in(void* library, char const* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

/// With a context current, as the gate calls it.
bool attach(void* runtime) {
  void* context = nullptr;
  function_in<int(unsigned)>(driver, "cuInit")(0);
  function_in<int(void**, int)>(driver, "cuDevicePrimaryCtxRetain")(&context, 0);
  function_in<int(void*)>(driver, "cuCtxSetCurrent")(context);
  return function_in<decltype(sluice_runtime_attach)>(runtime, "sluice_runtime_attach")(
             &open_gate, 0) != nullptr;
}

}  // namespace

int bounded_role(std::vector<std::string> const& arguments) {
  (void)::setenv("SLUICE_RUNTIME_DIR", arguments.at(0).c_str(), 1);
  driver = ::dlopen(gate::fake_driver_path().c_str(), RTLD_NOW | RTLD_GLOBAL);
  auto* const runtime = ::dlopen(gate::built("lib/libsluice_runtime.so").c_str(), RTLD_NOW);
  if (driver == nullptr || runtime == nullptr || !attach(runtime)) {
    tell("error: the runtime library has not attached");
    return 1;
  }
  tell("joined");
  while (arguments.size() > 1) {
    ::pause();
  }
  auto* const begin = function_in<decltype(sluice_begin)>(runtime, "sluice_begin");
  auto* const commit_begin =
      function_in<decltype(sluice_commit_begin)>(runtime, "sluice_commit_begin");
  auto* const commit_end = function_in<decltype(sluice_commit_end)>(runtime, "sluice_commit_end");
  auto* const discard = function_in<decltype(sluice_discard)>(runtime, "sluice_discard");
  for (;;) {
    (void)begin(1, 1);
    ::poll(nullptr, 0, 1);
    commit_begin(0) == 1 ? commit_end(1, 0) : discard();
  }
}

int publisher_role(std::vector<std::string> const& arguments) {
  memhandover::serving_pool::options options;
  options.runtime_dir = arguments.at(0);
  options.backend = "cuda";
  try {
    auto const pool = memhandover::serving_pool::join(options);
    pool->set_run_ahead(std::chrono::microseconds{std::stoll(arguments.at(1))});
    tell("joined");
    for (;;) {
      ::pause();
    }
  } catch (error const& why) {
    tell(std::string{"error: "} + why.what());
  }
  return 0;
}

}  // namespace sluice::test
