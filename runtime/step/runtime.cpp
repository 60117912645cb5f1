#include <dlfcn.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "memhandover/bytes.hpp"
#include "memhandover/cuda_driver.hpp"
#include "memhandover/error.hpp"
#include "memhandover/shared_text.hpp"
#include "runtime/gate/gate_api.h"
#include "runtime/step/c_api.h"
#include "runtime/step/driver_gate.hpp"
#include "runtime/step/run_ahead_choice.hpp"
#include "runtime/step/training_memory.hpp"
#include "runtime/telemetry/logging.hpp"
#include "scheduler/batch_planner.hpp"

namespace sluice::step {
namespace {

using memhandover::backend_kind;
using memhandover::monotonic_ns;

thread_local std::string last_error_text;
thread_local bool thread_in_arena = false;
/// Operators that this thread is in, one within the other, and whether the outermost holds the arena.
thread_local int operators_here = 0;
thread_local bool operator_in_arena = false;
/// Until it has been said, or somebody else says it.
std::atomic<bool> says_shortages{true};

std::string environment(char const* name) {
  char const* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// What this process has of the pool. Set once, then constant; never destroyed, since threads use
/// it until the end.
struct process_state {
  backend_kind backend = backend_kind::host;
  int device = -1;
  sluice_gate_api const* gate_table = nullptr;
  std::uint32_t samples_in_commit = 0;  // of the thread that commits alone
  std::unique_ptr<driver_gate> gate;
  std::shared_ptr<memhandover::cuda_driver const> driver;
  std::unique_ptr<training_memory> memory;
  std::mutex planner_mutex;
  std::unique_ptr<scheduler::batch_planner> planner;
  std::mutex run_ahead_mutex;
  std::chrono::nanoseconds run_ahead{};  ///< as the gate has it; guarded by run_ahead_mutex
};

std::atomic<process_state*> shared_state{nullptr};
/// A forked child has the memory but no thread and no place in the pool.
std::atomic<bool> in_child{false};

/// Whether launches that find no room are left to a thread of the gate's, or wait for it.
bool defers_submission() {
  auto const text = environment("SLUICE_SUBMISSION");
  if (!text.empty() && text != "direct" && text != "deferred") {
    spdlog::warn("SLUICE_SUBMISSION is {}, must be direct or deferred; deferred is used",
                 memhandover::readable_text(text));
  }
  return text != "direct";
}

process_state* sharing() noexcept {
  return in_child.load(std::memory_order_relaxed) ? nullptr
                                                  : shared_state.load(std::memory_order_acquire);
}

memhandover::broker_options broker_from_environment() {
  memhandover::broker_options options;
  options.runtime_dir = environment("SLUICE_RUNTIME_DIR");
  options.backend = environment("SLUICE_BACKEND");
  if (auto const device = environment("SLUICE_DEVICE"); !device.empty()) {
    options.device = std::atoi(device.c_str());
  }
  options.pool_bytes = std::strtoull(environment("SLUICE_POOL_BYTES").c_str(), nullptr, 10);
  return options;
}

std::string job_name() {
  auto const name = environment("SLUICE_NAME");
  return name.empty() ? "training" : name;
}

/// Before anything of ours can log: standard output belongs to the user's program.
void set_up_logging_once() {
  static std::once_flag once;
  std::call_once(once, [] { telemetry::set_up_logging("sluice-training", "warn"); });
}

/// Runs `work`; an exception becomes a status and a sentence.
template <typename Work>
int guarded(Work&& work) noexcept {
  try {
    work();
    return SLUICE_OK;
  } catch (error const& why) {
    last_error_text = why.what();
    switch (why.kind()) {
      case error_kind::cancelled:
        return SLUICE_CANCELLED;
      case error_kind::out_of_memory:
        return SLUICE_OUT_OF_MEMORY;
      default:
        return SLUICE_FAILED;
    }
  } catch (std::exception const& why) {
    last_error_text = why.what();
    return SLUICE_FAILED;
  }
}

void say(std::string const& text) {
  std::fprintf(stderr, "sluice: %s\n", text.c_str());
}

// --- the driver's memory calls, for the gate ---

bool on_pool_device(process_state const& state, int device) {
  return state.memory != nullptr && device == state.device;
}

int driver_mem_alloc(int device, std::uint64_t* address, std::size_t bytes) {
  auto* const state = sharing();
  if (state == nullptr || !on_pool_device(*state, device)) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  std::byte* where = nullptr;
  switch (guarded([&] { where = state->memory->allocate_persistent(bytes); })) {
    case SLUICE_OK:
      *address = reinterpret_cast<std::uint64_t>(where);
      return SLUICE_ALLOC_OK;
    case SLUICE_OUT_OF_MEMORY:
      if (says_shortages.exchange(false)) {
        say(last_error_text);
      }
      return SLUICE_ALLOC_OUT_OF_MEMORY;
    default:
      return SLUICE_ALLOC_NOT_OURS;
  }
}

/// The driver's own free waits for the device, and its callers rely on that.
void wait_for_device(process_state const& state) {
  using synchronize = CUresult (*)();
  state.gate_table->flush();
  reinterpret_cast<synchronize>(state.gate_table->real("cuCtxSynchronize"))();
}

int driver_mem_free(std::uint64_t address) {
  auto* const state = sharing();
  auto* const where = reinterpret_cast<std::byte*>(address);
  if (state == nullptr || state->memory->persistent_range(where).first != where) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  wait_for_device(*state);
  return state->memory->free(where) ? SLUICE_ALLOC_OK : SLUICE_ALLOC_NOT_OURS;
}

int driver_mem_info(int device, std::size_t* free_bytes, std::size_t* total_bytes) {
  auto* const state = sharing();
  if (state == nullptr || !on_pool_device(*state, device)) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  *free_bytes = state->memory->persistent_free_bytes();
  *total_bytes = state->memory->client().view().shape().bytes();
  return SLUICE_ALLOC_OK;
}

int driver_address_range(std::uint64_t address, std::uint64_t* base, std::size_t* bytes) {
  auto* const state = sharing();
  if (state == nullptr) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  auto const [start, size] = state->memory->persistent_range(reinterpret_cast<std::byte*>(address));
  if (start == nullptr) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  *base = reinterpret_cast<std::uint64_t>(start);
  *bytes = size;
  return SLUICE_ALLOC_OK;
}

int driver_holds(std::uint64_t address) {
  auto* const state = sharing();
  return state != nullptr && state->memory->owns(reinterpret_cast<void const*>(address)) ? 1 : 0;
}

constexpr sluice_runtime_api driver_table{
    sizeof(sluice_runtime_api), driver_mem_alloc, driver_mem_free, driver_mem_info,
    driver_address_range,       driver_holds};

// --- fork ---

void before_fork() {
  if (auto* const state = sharing(); state != nullptr && state->backend == backend_kind::host) {
    state->memory->before_fork();
  }
}

void after_fork_in_parent() {
  if (auto* const state = sharing(); state != nullptr && state->backend == backend_kind::host) {
    state->memory->after_fork_in_parent();
  }
}

void after_fork_in_child() {
  if (auto* const state = sharing(); state != nullptr && state->backend == backend_kind::host) {
    state->memory->after_fork_in_child();
  }
  in_child.store(true);
}

/// A short queue on the device is what makes a pause short.
void bound_run_ahead(process_state& state) {
  static auto const own = run_ahead_of_job(environment("SLUICE_RUN_AHEAD_US"));
  auto const& client = state.memory->client();
  auto const wanted = choose_run_ahead(client.view().header(), own);
  std::lock_guard const lock{state.run_ahead_mutex};
  if (wanted == state.run_ahead) {
    return;
  }
  state.run_ahead = wanted;
  client.mailbox().run_ahead_ns.store(static_cast<std::uint64_t>(wanted.count()),
                                      std::memory_order_relaxed);
  if (state.gate_table != nullptr) {
    state.gate_table->set_run_ahead(wanted.count());
  }
}

/// Shows what takes the device longer than the bound.
void publish_long_units(process_state& state) {
  auto const bound = [&state] {
    std::lock_guard const lock{state.run_ahead_mutex};
    return state.run_ahead;
  }();
  std::size_t used = 0;
  auto& places = state.memory->client().mailbox().long_units;
  if (state.gate_table != nullptr && bound.count() > 0) {
    sluice_gate_long_unit unit{};
    for (; used < std::size(places) && state.gate_table->long_unit(used, &unit) != 0 &&
           unit.nanoseconds > bound.count();
         ++used) {
      auto& place = places[used];
      memhandover::store_text(place.name, unit.name);
      place.nanoseconds.store(static_cast<std::uint64_t>(unit.nanoseconds));
      place.times.store(unit.times);
    }
  }
  for (; used < std::size(places); ++used) {
    places[used].times.store(0);
  }
}

void publish_state(std::unique_ptr<process_state> state) {
  static std::once_flag once;
  std::call_once(once,
                 [] { ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); });
  auto* const kept = state.release();
  shared_state.store(kept, std::memory_order_release);
  // A job that knows nothing of micro-batches is bounded as well.
  kept->memory->client().watch(
      [kept] {
        bound_run_ahead(*kept);
        publish_long_units(*kept);
      },
      std::chrono::milliseconds{100});
}

/// On the host: a compute pause holds the thread here.
void await_pause_end(process_state const& state) {
  auto const& until = state.memory->client().view().header().pause_until_ns;
  auto held = [&] {
    auto const limit = until.load(std::memory_order_acquire);
    return limit != 0 && monotonic_ns() < static_cast<std::int64_t>(limit) &&
           !(training_memory::committing() && state.memory->urgent());
  };
  while (held()) {
    timespec const slice{0, 50'000};
    ::nanosleep(&slice, nullptr);
  }
}

/// Whether what this thread launches may be dropped with the micro-batch.
void set_expendable(process_state const& state, bool expendable) {
  if (state.gate_table != nullptr) {
    state.gate_table->expendable_thread(expendable ? 1 : 0);
  }
}

}  // namespace
}  // namespace sluice::step

using namespace sluice::step;

extern "C" {

char const* sluice_last_error(void) {
  return last_error_text.c_str();
}

SLUICE_EXPORT sluice_runtime_api const* sluice_runtime_attach(sluice_gate_api const* gate,
                                                              int device) {
  if (sharing() != nullptr || in_child.load()) {
    return nullptr;
  }
  int const status = guarded([&] {
    set_up_logging_once();
    auto state = std::make_unique<process_state>();
    state->backend = sluice::memhandover::backend_kind::cuda;
    state->device = device;
    state->gate_table = gate;
    state->gate = std::make_unique<driver_gate>(*gate);
    state->driver = sluice::memhandover::cuda_driver::load(
        [gate](char const* name) { return gate->real(name); });
    training_memory::options options;
    options.broker = broker_from_environment();
    if (options.broker.device.value_or(device) != device) {
      throw sluice::error{
          sluice::error_kind::unsupported,
          "GPU " + std::to_string(*options.broker.device) +
              " is to be shared (--device, SLUICE_DEVICE), and this process uses GPU " +
              std::to_string(device)};
    }
    // Each process of a job has the pool of the GPU that it uses.
    options.broker.device = device;
    options.broker.backend = "cuda";
    options.name = job_name();
    options.alignment = 512;
    options.driver = state->driver;
    options.gate = state->gate.get();
    state->memory = std::make_unique<training_memory>(std::move(options));
    gate->set_deferred(defers_submission() ? 1 : 0);
    gate->set_pause_word(reinterpret_cast<std::uint64_t const volatile*>(
        &state->memory->client().view().header().pause_until_ns));
    auto const& client = state->memory->client();
    gate->set_demand_word(reinterpret_cast<std::uint64_t const volatile*>(
        &client.view().controls()[client.slot()].demand));
    publish_state(std::move(state));
  });
  if (status != SLUICE_OK) {
    say("this process trains without sharing: " + last_error_text);
    return nullptr;
  }
  return &driver_table;
}

int sluice_join_host(void) {
  if (sharing() != nullptr) {
    return SLUICE_OK;
  }
  return guarded([] {
    if (in_child.load()) {
      throw sluice::error{sluice::error_kind::unsupported,
                          "a forked child of a training process cannot train in the pool"};
    }
    set_up_logging_once();
    auto state = std::make_unique<process_state>();
    training_memory::options options;
    options.broker = broker_from_environment();
    options.broker.backend = "host";
    options.name = job_name();
    options.grow_by = 8;
    options.persistent = sluice::memhandover::chunk_space::backing::process;
    state->memory = std::make_unique<training_memory>(std::move(options));
    publish_state(std::move(state));
  });
}

int sluice_backend(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : static_cast<int>(state->backend);
}

int sluice_begin(uint32_t micro_batch, uint32_t global_batch) {
  auto* const state = sharing();
  if (state == nullptr) {
    return SLUICE_FAILED;
  }
  auto& box = state->memory->client().mailbox();
  box.micro_batch.store(micro_batch, std::memory_order_relaxed);
  box.global_batch.store(global_batch, std::memory_order_relaxed);
  bound_run_ahead(*state);
  int const status = guarded([&] { state->memory->begin(); });
  set_expendable(*state, true);
  return status;
}

uint64_t sluice_generation(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->generation();
}

int sluice_arena_state(void) {
  auto* const state = sharing();
  return state == nullptr ? SLUICE_ARENA_SOUND : static_cast<int>(state->memory->state());
}

int sluice_commit_begin(int may_defer) {
  auto* const state = sharing();
  using sluice::step::commit_start;
  auto const start =
      state == nullptr ? commit_start::taken_away : state->memory->commit_begin(may_defer != 0);
  if (start == commit_start::taken_away) {
    return 0;
  }
  set_expendable(*state, false);
  if (state->gate_table != nullptr) {
    state->gate_table->protect_thread(1);
  }
  return start == commit_start::begun ? 1 : 2;
}

void sluice_commit_end(uint32_t samples, int outlived) {
  auto* const state = sharing();
  if (state == nullptr) {
    return;
  }
  state->samples_in_commit = samples;
  (void)guarded([&] { state->memory->commit_end(outlived != 0); });
  if (state->gate_table != nullptr) {
    state->gate_table->protect_thread(0);
  }
}

int sluice_commit_settle(uint32_t timeout_ms) {
  auto* const state = sharing();
  if (state == nullptr) {
    return 0;
  }
  if (state->gate_table != nullptr) {
    state->gate_table->protect_thread(0);
  }
  std::chrono::nanoseconds const patience = std::chrono::milliseconds{timeout_ms};
  auto const made =
      state->memory->commit_settle(sluice::memhandover::monotonic_ns() + patience.count());
  if (!made.value_or(false)) {
    return made.has_value() ? 0 : -1;
  }
  auto& box = state->memory->client().mailbox();
  box.samples.fetch_add(state->samples_in_commit, std::memory_order_relaxed);
  box.commits.fetch_add(1, std::memory_order_relaxed);
  return 1;
}

void sluice_discard(void) {
  auto* const state = sharing();
  if (state == nullptr) {
    return;
  }
  set_expendable(*state, false);
  state->memory->client().mailbox().discards.fetch_add(1, std::memory_order_relaxed);
  (void)guarded([&] { state->memory->discard(); });
}

uint64_t sluice_discarded_ns(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->client().mailbox().discarded_ns.load();
}

int64_t sluice_reopened_ns(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->reopened_ns();
}

uint64_t sluice_survivors(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->survivors();
}

void sluice_enter(int enter) {
  thread_in_arena = enter != 0;
}

uint64_t sluice_arena_capacity(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->capacity_bytes();
}

uint64_t sluice_arena_peak(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->peak_bytes();
}

uint64_t sluice_pool_bytes(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->client().view().shape().bytes();
}

uint64_t sluice_reachable_bytes(void) {
  auto* const state = sharing();
  return state == nullptr ? 0 : state->memory->reachable_bytes();
}

char const* sluice_shortage(void) {
  static thread_local std::string text;
  auto* const state = sharing();
  if (state == nullptr || guarded([&] { text = state->memory->shortage(); }) != SLUICE_OK) {
    text.clear();
  }
  return text.c_str();
}

void sluice_say_shortages(int say_them) {
  says_shortages.store(say_them != 0);
}

int sluice_wait_memory(uint64_t bytes, uint32_t timeout_ms) {
  auto* const state = sharing();
  return state != nullptr &&
                 state->memory->wait_capacity(bytes, std::chrono::milliseconds{timeout_ms})
             ? 1
             : 0;
}

int sluice_plan_start(uint32_t largest, int fixed) {
  auto* const state = sharing();
  if (state == nullptr) {
    return SLUICE_FAILED;
  }
  return guarded([&] {
    std::lock_guard const lock{state->planner_mutex};
    state->planner = std::make_unique<sluice::scheduler::batch_planner>(
        sluice::scheduler::batch_planner::settings{largest, fixed != 0});
  });
}

uint32_t sluice_plan_next(uint32_t remaining, uint64_t* needed_bytes) {
  auto* const state = sharing();
  *needed_bytes = 0;
  if (state == nullptr || state->planner == nullptr) {
    return remaining;
  }
  std::lock_guard const lock{state->planner_mutex};
  auto const next = state->planner->plan({remaining, state->memory->capacity_bytes()});
  *needed_bytes = next.needed_bytes;
  return next.wait ? 0 : static_cast<uint32_t>(next.samples);
}

void sluice_plan_committed(uint32_t samples, uint64_t peak_bytes, double seconds) {
  auto* const state = sharing();
  if (state != nullptr && state->planner != nullptr) {
    std::lock_guard const lock{state->planner_mutex};
    state->planner->committed(samples, peak_bytes, sluice::scheduler::seconds{seconds});
  }
}

void sluice_plan_discarded(uint32_t samples, int arena_state) {
  auto* const state = sharing();
  if (state != nullptr && state->planner != nullptr) {
    std::lock_guard const lock{state->planner_mutex};
    if (arena_state == SLUICE_ARENA_STARVED) {
      state->planner->out_of_memory(samples, state->memory->starved_bytes());
    } else {
      state->planner->discarded(samples);
    }
  }
}

void* sluice_arena_alloc(ssize_t bytes, int /*device*/, void* /*stream*/) {
  auto* const state = sharing();
  if (state == nullptr) {
    return nullptr;
  }
  std::byte* where = nullptr;
  (void)guarded([&] { where = state->memory->allocate_arena(static_cast<std::size_t>(bytes)); });
  return where;
}

void sluice_arena_free(void* address, ssize_t /*bytes*/, int /*device*/, void* /*stream*/) {
  if (auto* const state = sharing()) {
    // What is freed of the arena stays mapped for the next micro-batch. Of a former one it may be
    // unmapped.
    if (state->gate_table != nullptr && state->memory->is_former(address)) {
      wait_for_device(*state);
    }
    (void)guarded([&] { state->memory->free(static_cast<std::byte*>(address)); });
  }
}

int sluice_host_alloc(void** address, size_t bytes) {
  // Small blocks stay with the system's allocator: they are many, and together they are little.
  constexpr std::size_t smallest_in_arena = 4096;
  constexpr std::size_t smallest_persistent = 65536;
  auto* const state = sharing();
  if (state == nullptr || bytes < (thread_in_arena ? smallest_in_arena : smallest_persistent)) {
    return SLUICE_FAILED;
  }
  return guarded([&] {
    *address = thread_in_arena ? state->memory->allocate_arena(bytes)
                               : state->memory->allocate_persistent(bytes);
  });
}

int sluice_host_free(void* address) {
  auto* const state = shared_state.load(std::memory_order_acquire);
  if (state == nullptr) {
    return 0;
  }
  if (in_child.load(std::memory_order_relaxed)) {
    return state->memory->owns(address)
               ? 1
               : 0;  // what was inherited stays as it is until the child ends
  }
  int freed = 0;
  (void)guarded([&] { freed = state->memory->free(static_cast<std::byte*>(address)) ? 1 : 0; });
  return freed;
}

void sluice_host_boundary(void) {
  if (auto* const state = sharing()) {
    await_pause_end(*state);
  }
}

void sluice_host_operator_begin(void) {
  auto* const state = sharing();
  if (operators_here++ > 0 || state == nullptr) {
    return;
  }
  await_pause_end(*state);
  if (thread_in_arena) {
    state->memory->operators().operator_begin();
    operator_in_arena = true;
  }
}

void sluice_host_operator_end(void) {
  operators_here = std::max(operators_here, 1) - 1;  // one may have begun before anybody looked
  if (operators_here == 0 && operator_in_arena) {
    operator_in_arena = false;
    if (auto* const state = sharing()) {
      state->memory->operators().operator_end();
    }
  }
}

}  // extern "C"
