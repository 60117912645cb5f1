/// The C boundary, CUDA: the driver's memory calls, which the gate hands over, are answered from the
/// pool.
#include <atomic>
#include <cstddef>
#include <string>

#include "runtime/step/process_state.hpp"

namespace sluice::step {
namespace {

/// Until it has been said, or somebody else says it.
std::atomic<bool> says_shortages{true};

bool on_pool_device(process_state const& state, int device) {
  return state.memory != nullptr && device == state.device;
}

/// What the gate answers to what the pool did, whose shortages are said once.
int alloc_status_of(int status) {
  switch (status) {
    case SLUICE_OK:
      return SLUICE_ALLOC_OK;
    case SLUICE_OUT_OF_MEMORY:
      if (says_shortages.exchange(false)) {
        say(last_error());
      }
      return SLUICE_ALLOC_OUT_OF_MEMORY;
    default:
      return SLUICE_ALLOC_NOT_OURS;
  }
}

int driver_mem_alloc(int device, std::uint64_t* address, std::size_t bytes) {
  auto* const state = sharing();
  if (state == nullptr || !on_pool_device(*state, device)) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  std::byte* where = nullptr;
  int const status =
      alloc_status_of(guarded([&] { where = state->memory->allocate_persistent(bytes); }));
  if (status == SLUICE_ALLOC_OK) {
    *address = reinterpret_cast<std::uint64_t>(where);
  }
  return status;
}

int driver_mem_free(std::uint64_t address) {
  auto* const state = sharing();
  auto* const where = reinterpret_cast<std::byte*>(address);
  if (state == nullptr || state->memory->persistent_range(where).first != where) {
    return SLUICE_ALLOC_NOT_OURS;
  }
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

void driver_micro_batch_dropped(int (*is_running)(void const* which), void const* which) {
  if (auto* const state = sharing(); state != nullptr) {
    state->memory->drop_micro_batch([&] { return is_running(which) != 0; });
  }
}

void driver_launch_wanted() {
  if (auto* const state = sharing(); state != nullptr) {
    state->memory->want_parked();
  }
}

void driver_launch_held(char const* call, std::int64_t since_ns) {
  if (auto* const state = sharing(); state != nullptr) {
    state->memory->note_held(call, since_ns);
  }
}

int driver_piece_make(int device, std::uint64_t* piece, std::size_t bytes) {
  auto* const state = sharing();
  if (state == nullptr || !on_pool_device(*state, device)) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  return alloc_status_of(guarded([&] { *piece = state->memory->make_piece(bytes); }));
}

int driver_piece_move(std::uint64_t piece, std::uint64_t address) {
  auto* const state = sharing();
  auto* const to = reinterpret_cast<std::byte*>(address);
  return state != nullptr && guarded([&] { state->memory->move_piece(piece, to); }) == SLUICE_OK
             ? SLUICE_ALLOC_OK
             : SLUICE_ALLOC_NOT_OURS;
}

void driver_piece_free(std::uint64_t piece) {
  if (auto* const state = sharing(); state != nullptr) {
    (void)guarded([&] { state->memory->free_piece(piece); });
  }
}

std::size_t driver_chunk_bytes(int device) {
  auto* const state = sharing();
  return state != nullptr && on_pool_device(*state, device)
             ? state->memory->client().view().shape().chunk_bytes
             : 0;
}

constexpr sluice_runtime_api driver_table{sizeof(sluice_runtime_api),
                                          driver_mem_alloc,
                                          driver_mem_free,
                                          driver_mem_info,
                                          driver_address_range,
                                          driver_holds,
                                          driver_micro_batch_dropped,
                                          driver_launch_wanted,
                                          driver_launch_held,
                                          driver_piece_make,
                                          driver_piece_move,
                                          driver_piece_free,
                                          driver_chunk_bytes};

}  // namespace
}  // namespace sluice::step

using namespace sluice::step;

extern "C" {

SLUICE_EXPORT sluice_runtime_api const* sluice_runtime_attach(sluice_gate_api const* gate,
                                                              int device) {
  if (sharing() != nullptr || inherited() != nullptr) {
    return nullptr;
  }
  int const status = guarded([&] {
    auto options = options_of_job("cuda");
    auto state = std::make_unique<process_state>();
    state->backend = sluice::memhandover::backend_kind::cuda;
    state->device = device;
    state->gate_table = gate;
    state->gate = std::make_unique<driver_gate>(*gate);
    state->driver = sluice::memhandover::cuda_driver::load(
        [gate](char const* name) { return gate->real(name); });
    refuse_other_gpu(options.broker, device);
    // Each process of a job has the pool of the GPU that it uses.
    options.broker.device = device;
    options.alignment = 512;
    options.driver = state->driver;
    options.gate = state->gate.get();
    state->memory = std::make_unique<training_memory>(std::move(options));
    gate->set_deferred(environment_says("SLUICE_SUBMISSION", "direct", "deferred") ? 0 : 1);
    auto const& client = state->memory->client();
    auto& asked_by_server = client.view().header();
    if (!is_engine(*state)) {
      gate->set_pause_word(
          reinterpret_cast<std::uint64_t const volatile*>(&asked_by_server.pause_until_ns));
      gate->set_announcement_word(
          reinterpret_cast<std::uint64_t const volatile*>(&asked_by_server.announced_until_ns));
    }
    gate->set_demand_word(reinterpret_cast<std::uint64_t const volatile*>(
        &client.view().controls()[client.slot()].demand));
    share(std::move(state));
  });
  if (status != SLUICE_OK) {
    say("this process trains without sharing: " + last_error());
    return nullptr;
  }
  return &driver_table;
}

void sluice_say_shortages(int say_them) {
  says_shortages.store(say_them != 0);
}
}
