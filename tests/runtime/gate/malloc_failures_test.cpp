/// Every allocation that the gate makes while the control thread stops launches fails once in turn: the gate is left as it
/// was or opens again, and work that runs is never taken for done.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

extern "C" void* __libc_malloc(std::size_t bytes);

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

/// Of this thread, until the one that fails; 0: none does.
thread_local constinit unsigned allocations_left = 0;

bool is_of_gate(void const* code) noexcept {
  Dl_info where{};
  return ::dladdr(code, &where) != 0 &&
         std::strstr(where.dli_fname, "libsluice_gate.so") != nullptr;
}

constexpr unsigned too_many = 200;

class malloc_failures : public gate_test {};

TEST_F(malloc_failures, leave_nobody_held_and_no_work_forgotten) {
  unsigned which = 1;
  for (bool hit = true; hit && which < too_many && !HasFailure(); ++which) {
    SCOPED_TRACE("allocation " + std::to_string(which));
    gate.set_run_ahead(std::chrono::nanoseconds{10s}.count());
    CUfunction const slow = kernel(2ms);
    std::vector<CUstream> streams;
    for (int i = 0; i < 3; ++i) {  // new ones, for which nothing has been allocated yet
      streams.push_back(stream());
      ASSERT_EQ(launch(slow, streams.back()), CUDA_SUCCESS);
    }

    allocations_left = which;
    bool const closed = gate.close(in(patience)) == 0;
    bool const idle = closed && gate.wait_idle(in(patience)) == 0;
    hit = std::exchange(allocations_left, 0) == 0;

    if (idle) {
      EXPECT_EQ(driver.outstanding(), 0U);
    }
    if (closed) {
      gate.open();
    }
    ASSERT_EQ(gate.close(in(patience)), 0);
    EXPECT_EQ(gate.wait_idle(in(patience)), 0);
    EXPECT_EQ(driver.outstanding(), 0U);
    gate.open();
    for (CUstream each : streams) {
      EXPECT_EQ(cuda.destroy_stream(each), CUDA_SUCCESS);
    }
  }
  std::printf("%u allocations failed\n", which - 2);
  EXPECT_GT(which, 3U) << "the gate allocates nothing";
}

}  // namespace
}  // namespace sluice::gate

/// The gate has a `new` of its own, which comes here like all others.
extern "C" __attribute__((visibility("default"))) void* malloc(std::size_t bytes) {
  if (sluice::gate::allocations_left > 0 && sluice::gate::is_of_gate(__builtin_return_address(0)) &&
      --sluice::gate::allocations_left == 0) {
    return nullptr;
  }
  return __libc_malloc(bytes);
}
