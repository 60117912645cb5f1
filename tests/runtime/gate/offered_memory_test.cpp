/// Memory that a process which computes for a server has the gate answer with. It is offered once, for as long as the process
/// lives.
#include <atomic>
#include <cerrno>
#include <string_view>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {
namespace {

constexpr std::uint64_t first_address = 0x7000'0000'0000, size = 1000;

std::atomic<int> made{0}, freed{0}, wanted{0};
std::atomic<char const*> held_in{""};
std::atomic<std::int64_t> held_since_ns{0};

sluice_runtime_api const& memory() {
  static sluice_runtime_api const table{
      .size = sizeof(sluice_runtime_api),
      .mem_alloc = [](int /*device*/, std::uint64_t* address, std::size_t bytes) -> int {
        if (bytes > size) {
          return bytes > 2 * size ? SLUICE_ALLOC_NOT_OURS : SLUICE_ALLOC_OUT_OF_MEMORY;
        }
        ++made;
        *address = first_address;
        return SLUICE_ALLOC_OK;
      },
      .mem_free = [](std::uint64_t address) -> int {
        freed += address == first_address ? 1 : 0;
        return address == first_address ? SLUICE_ALLOC_OK : SLUICE_ALLOC_NOT_OURS;
      },
      .mem_info = [](int /*device*/, std::size_t* free_bytes, std::size_t* total_bytes) -> int {
        *free_bytes = 5;
        *total_bytes = 7;
        return SLUICE_ALLOC_OK;
      },
      .address_range = [](std::uint64_t address, std::uint64_t* base, std::size_t* bytes) -> int {
        if (address < first_address || address >= first_address + size) {
          return SLUICE_ALLOC_NOT_OURS;
        }
        *base = first_address;
        *bytes = size;
        return SLUICE_ALLOC_OK;
      },
      .holds = [](std::uint64_t address) -> int {
        return address >= first_address && address < first_address + size ? 1 : 0;
      },
      .micro_batch_dropped = nullptr,
      .launch_wanted = [] { ++wanted; },
      .launch_held =
          [](char const* call, std::int64_t since_ns) {
            held_in = call;
            held_since_ns = since_ns;
          },
      .piece_make = nullptr,
      .piece_move = nullptr,
      .piece_free = nullptr,
      .chunk_bytes = nullptr};
  return table;
}

class offered_memory : public gate_test {
 protected:
  offered_memory() {
    static int const offered = gate.offer_memory(&memory());
    EXPECT_EQ(offered, 0);
  }
};

TEST_F(offered_memory, answers_allocations) {
  auto const asked = driver.calls("cuMemAlloc_v2");
  CUdeviceptr at = 0;
  EXPECT_EQ(cuda.allocate(&at, size), CUDA_SUCCESS);
  EXPECT_EQ(at, first_address);
  EXPECT_EQ(gate.holds(at), 1);
  EXPECT_EQ(cuda.allocate(&at, size + 1), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(driver.calls("cuMemAlloc_v2"), asked);
  EXPECT_EQ(made, 1);
}

TEST_F(offered_memory, leaves_the_rest_to_the_driver) {
  auto const asked = driver.calls("cuMemAlloc_v2");
  CUdeviceptr at = 0;
  EXPECT_EQ(cuda.allocate(&at, 2 * size + 1), CUDA_SUCCESS);
  EXPECT_EQ(driver.calls("cuMemAlloc_v2"), asked + 1);
  EXPECT_EQ(gate.holds(at), 0);
  EXPECT_EQ(cuda.free_memory(at), CUDA_SUCCESS);
}

TEST_F(offered_memory, is_freed_when_the_device_has_done_what_was_launched) {
  static std::atomic<bool> done{false};
  done = false;
  EXPECT_EQ(launch(kernel(std::chrono::milliseconds{2}, [](void**) { done = true; })),
            CUDA_SUCCESS);
  auto const before = freed.load();
  EXPECT_EQ(cuda.free_memory(first_address), CUDA_SUCCESS);
  EXPECT_TRUE(done);
  EXPECT_EQ(freed, before + 1);
  EXPECT_EQ(cuda.free_memory(first_address + 1), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(offered_memory, says_what_there_is) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  EXPECT_EQ(cuda.memory_info(&free_bytes, &total_bytes), CUDA_SUCCESS);
  EXPECT_EQ(free_bytes, 5U);
  EXPECT_EQ(total_bytes, 7U);
  CUdeviceptr base = 0;
  std::size_t bytes = 0;
  EXPECT_EQ(cuda.address_range(&base, &bytes, first_address + 10), CUDA_SUCCESS);
  EXPECT_EQ(base, first_address);
  EXPECT_EQ(bytes, size);
}

TEST_F(offered_memory, has_no_handle_and_is_mapped_by_who_offers_it) {
  auto const retained = driver.calls("cuMemRetainAllocationHandle");
  auto const unmapped = driver.calls("cuMemUnmap");
  CUmemGenericAllocationHandle handle = 0;
  auto* const inside = reinterpret_cast<void*>(first_address + 1);
  EXPECT_EQ(cuda.retain_handle(&handle, inside), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(driver.calls("cuMemRetainAllocationHandle"), retained);
  (void)cuda.unmap(first_address, size);
  EXPECT_EQ(driver.calls("cuMemUnmap"), unmapped + 1);
}

TEST_F(offered_memory, who_is_held_while_it_is_not_there_wants_it_back) {
  wanted = 0;
  held_since_ns = 0;
  auto const before_ns = in(std::chrono::seconds{0});
  ASSERT_EQ(gate.close(in(std::chrono::seconds{1})), 0);
  std::atomic<bool> done{false};
  auto const other = thread([&] {
    EXPECT_EQ(launch(kernel(std::chrono::microseconds{10}, {})), CUDA_SUCCESS);
    done = true;
  });
  let_others_run();
  EXPECT_EQ(wanted, 0) << "it is all there: the gate is closed for a moment";
  gate.set_parked(1);
  EXPECT_TRUE(eventually([] { return held_since_ns.load() > 0; })) << "who was held before, too";
  EXPECT_GT(wanted, 0);
  EXPECT_STREQ(held_in, "cuLaunchKernel");
  EXPECT_LE(held_since_ns, in(std::chrono::seconds{0}));
  EXPECT_GE(held_since_ns, before_ns);
  EXPECT_FALSE(done);
  gate.set_parked(0);
  gate.open();
  EXPECT_TRUE(eventually([&] { return done.load(); }));
  auto const before = wanted.load();
  EXPECT_EQ(launch(kernel(std::chrono::microseconds{10}, {})), CUDA_SUCCESS);
  EXPECT_EQ(wanted, before);
}

/// All that name memory of the device, those that make and change graphs among them.
std::vector<char const*> names_of_what_asks() {
  struct listed {
    char const* name;
    std::string_view kind;
  };
  constexpr listed all[] = {
#define SLUICE_DRIVER_SYMBOL(name, of) {#name, #of},
#include "driver_symbols.inc"
  };
  std::vector<char const*> found;
  for (auto const& [name, kind] : all) {
    std::string_view const of{name};
    bool const makes_graph = of.starts_with("cuGraphInstantiate") ||
                             of.starts_with("cuGraphExecUpdate") || of == "cuGraphAddNode_v2";
    if (kind == "asks" || (kind == "carries" && makes_graph)) {
      found.push_back(name);
    }
  }
  return found;
}

TEST_F(offered_memory, what_names_memory_is_held_while_it_is_not_there_and_wants_it_back) {
  using any_function =
      CUresult (*)(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                   std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                   std::uint64_t, std::uint64_t, std::uint64_t);
  auto const names = names_of_what_asks();
  EXPECT_GT(names.size(), 50U);
  for (char const* const name : names) {
    driver.fail(name, CUDA_ERROR_LAUNCH_FAILED, 0);  // the zeros of the parameters go no further
    auto const before = driver.calls(name);
    wanted = 0;
    ASSERT_EQ(gate.close(in(std::chrono::seconds{1})), 0);
    gate.set_parked(1);
    auto other = thread([&] {
      auto const call = reinterpret_cast<any_function>(gate_library().find(name));
      EXPECT_EQ(call(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), CUDA_ERROR_LAUNCH_FAILED) << name;
    });
    EXPECT_TRUE(eventually([&] { return std::string_view{held_in} == name; })) << name;
    EXPECT_GT(wanted, 0);
    EXPECT_EQ(driver.calls(name), before) << name;
    gate.set_parked(0);
    gate.open();
    other.join();
    EXPECT_EQ(driver.calls(name), before + 1) << name;
    driver.fail(name, 0, 0);
  }
}

TEST_F(offered_memory, does_not_go_before_what_names_it_has_ended) {
  driver.delay("cuGraphInstantiateWithFlags",
               std::chrono::nanoseconds{std::chrono::seconds{2}}.count());
  auto const inside = [this] { return driver.inside("cuGraphInstantiateWithFlags"); };
  auto const other = thread([this] {
    CUgraphExec graph = nullptr;
    EXPECT_EQ(cuda.instantiate(&graph, nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  });
  ASSERT_TRUE(eventually([&] { return inside() == 1; }));
  ASSERT_EQ(gate.close(in(std::chrono::seconds{10})), 0);
  EXPECT_EQ(inside(), 1U) << "it puts nothing on the device, so that nothing else waits for it";
  EXPECT_EQ(gate.close_all(in(std::chrono::milliseconds{1})), ETIMEDOUT);
  std::atomic<bool> launched{false};
  auto const launcher = thread([&] {
    EXPECT_EQ(launch(kernel(std::chrono::microseconds{10}, {})), CUDA_SUCCESS);
    launched = true;
  });
  let_others_run();
  EXPECT_FALSE(launched) << "it is closed, as it was before";
  EXPECT_EQ(gate.close_all(in(std::chrono::seconds{10})), 0);
  EXPECT_EQ(inside(), 0U);
  gate.open();
  driver.delay("cuGraphInstantiateWithFlags", 0);
}

TEST_F(offered_memory, is_offered_once) {
  EXPECT_EQ(gate.offer_memory(&memory()), -1);
}

}  // namespace
}  // namespace sluice::gate
