#include "tests/runtime/gate/test_runtime.h"

#include <cuda.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

constexpr std::uint64_t pool_start = 0x7000'0000'0000;
constexpr std::size_t pool_total = std::size_t{1} << 40U;

std::atomic<int> attached{0};
std::atomic<int> attached_device{-1};
std::atomic<int> wanted{0};
std::atomic<sluice_gate_api const*> gate{nullptr};
std::atomic<std::size_t> largest_served{0};
std::atomic<void*> dropped_of{nullptr};
std::atomic<void (*)(void* of, int (*is_running)(void const* which), void const* which)> dropped{
    nullptr};

std::mutex lock;  // guards the rest
std::size_t room_left = 0;
std::uint64_t next_address = pool_start;
std::map<std::uint64_t, std::size_t> allocations;

int allocate(int /*device*/, std::uint64_t* address, std::size_t bytes) {
  if (bytes > largest_served) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  std::lock_guard const guard{lock};
  if (bytes > room_left) {
    return SLUICE_ALLOC_OUT_OF_MEMORY;
  }
  room_left -= bytes;
  *address = next_address;
  next_address += bytes + 4096;
  allocations.emplace(*address, bytes);
  return SLUICE_ALLOC_OK;
}

int release(std::uint64_t address) {
  std::lock_guard const guard{lock};
  auto const found = allocations.find(address);
  if (found == allocations.end()) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  room_left += found->second;
  allocations.erase(found);
  return SLUICE_ALLOC_OK;
}

int info(int /*device*/, std::size_t* free_bytes, std::size_t* total_bytes) {
  std::lock_guard const guard{lock};
  *free_bytes = room_left;
  *total_bytes = pool_total;
  return SLUICE_ALLOC_OK;
}

int range(std::uint64_t address, std::uint64_t* base, std::size_t* bytes) {
  std::lock_guard const guard{lock};
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin() || address - (--next)->first >= next->second) {
    return SLUICE_ALLOC_NOT_OURS;
  }
  *base = next->first;
  *bytes = next->second;
  return SLUICE_ALLOC_OK;
}

int holds(std::uint64_t address) {
  std::uint64_t base = 0;
  std::size_t bytes = 0;
  return range(address, &base, &bytes) == SLUICE_ALLOC_OK ? 1 : 0;
}

void drop_micro_batch(int (*is_running)(void const* which), void const* which) {
  if (auto* const called = dropped.load(); called != nullptr) {
    called(dropped_of, is_running, which);
  }
}

void want_launch() {
  ++wanted;
}

constexpr sluice_runtime_api table{sizeof(sluice_runtime_api),
                                   allocate,
                                   release,
                                   info,
                                   range,
                                   holds,
                                   drop_micro_batch,
                                   want_launch,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr,
                                   nullptr};

}  // namespace

EXPORTED sluice_runtime_api const* sluice_runtime_attach(sluice_gate_api const* offered,
                                                         int device) {
  ++attached;
  attached_device = device;
  gate = offered;
  // A runtime maps memory and clears it here: through the driver's own functions and, in libraries
  // that know nothing of the gate, through the exported ones. Both must come back.
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  auto const ask = reinterpret_cast<decltype(&cuMemGetInfo)>(offered->real("cuMemGetInfo_v2"));
  if (ask == nullptr || ask(&free_bytes, &total_bytes) != CUDA_SUCCESS || offered->close(0) != 0) {
    std::abort();
  }
  offered->open();
  return std::getenv("TEST_RUNTIME_DECLINES") != nullptr ? nullptr : &table;
}

EXPORTED int test_runtime_attached() {
  return attached;
}
EXPORTED int test_runtime_device() {
  return attached_device;
}
EXPORTED sluice_gate_api const* test_runtime_gate() {
  return gate;
}
EXPORTED void test_runtime_serve(std::size_t largest, std::size_t room) {
  std::lock_guard const guard{lock};
  largest_served = largest;
  room_left = room;
}
EXPORTED void test_runtime_on_drop(void (*called)(void* of, int (*is_running)(void const* which),
                                                  void const* which),
                                   void* of) {
  dropped_of = of;
  dropped = called;
}
EXPORTED int test_runtime_wanted() {
  return wanted;
}
EXPORTED int test_runtime_live() {
  std::lock_guard const guard{lock};
  return static_cast<int>(allocations.size());
}
