#include "runtime/server/hosting/gate_memory.hpp"

#include <spdlog/spdlog.h>

#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/hosting/gate_in_process.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// For as long as the process lives; libraries free memory until its end.
std::shared_ptr<activation_memory>& the_memory() {
  static auto& one = *std::make_unique<std::shared_ptr<activation_memory>>().release();
  return one;
}

std::byte* pointer_to(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr): the driver's
}

bool is_of_pool(int device) {
  return the_memory()->pool().shape().device == device;
}

int allocate(int device, std::uint64_t* address, std::size_t bytes) {
  if (!is_of_pool(device)) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  try {
    *address = reinterpret_cast<std::uint64_t>(the_memory()->allocate(bytes));
    return SLUICE_ALLOC_OK;
  } catch (...) {  // who asked may have a cache to empty, and ask again
    spdlog::debug("no memory for a computation bytes={} reason={}", bytes,
                  telemetry::quoted(caught_error().what()));
    return SLUICE_ALLOC_OUT_OF_MEMORY;
  }
}

int free_it(std::uint64_t address) {
  return the_memory()->free(pointer_to(address)) ? SLUICE_ALLOC_OK : SLUICE_ALLOC_NOT_OURS;
}

int info(int device, std::size_t* free_bytes, std::size_t* total_bytes) {
  if (!is_of_pool(device)) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  auto const usage = the_memory()->pool().usage();
  *free_bytes = usage.free_bytes + usage.tenant_bytes() - usage.kept_bytes;
  *total_bytes = usage.total_bytes;
  return SLUICE_ALLOC_OK;
}

int address_range(std::uint64_t address, std::uint64_t* base, std::size_t* bytes) {
  auto const found = the_memory()->containing(pointer_to(address));
  if (!found) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  *base = reinterpret_cast<std::uint64_t>(found->base);
  *bytes = found->bytes;
  return SLUICE_ALLOC_OK;
}

int holds(std::uint64_t address) {
  return the_memory()->containing(pointer_to(address)) ? 1 : 0;
}

}  // namespace

bool answer_from_pool(std::shared_ptr<activation_memory> memory) {
  auto const* const gate = gate_in_process();
  if (gate == nullptr) {
    spdlog::warn(
        "the gate is not in this process, so what computations need comes from outside the pool; "
        "something has cleared LD_PRELOAD");
    return false;
  }
  static sluice_runtime_api const table{.size = sizeof(sluice_runtime_api),
                                        .mem_alloc = &allocate,
                                        .mem_free = &free_it,
                                        .mem_info = &info,
                                        .address_range = &address_range,
                                        .holds = &holds,
                                        .micro_batch_dropped = nullptr,
                                        .launch_wanted = nullptr,
                                        .launch_held = nullptr,
                                        .piece_make = nullptr,
                                        .piece_move = nullptr,
                                        .piece_free = nullptr,
                                        .chunk_bytes = nullptr};
  the_memory() = std::move(memory);
  return gate->offer_memory(&table) == 0;
}

}  // namespace sluice::server
