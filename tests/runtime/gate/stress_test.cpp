/// Many threads against many closes: after close() has returned, no launch begins. Built twice: as
/// it is, and for a kernel that refuses membarrier. SLUICE_TEST_CLOSES sets how many there are (3000,
/// and a fifteenth of it where run-ahead is bounded).
#include <unistd.h>

#include <array>
#include <atomic>
#include <random>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

#ifdef SLUICE_WITHOUT_MEMBARRIER
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#endif

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

#ifdef SLUICE_WITHOUT_MEMBARRIER
/// From the start of the program on, the kernel answers membarrier with ENOSYS.
bool const membarrier_is_refused = [] {
  std::array<sock_filter, 4> filter{{
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, SYS_membarrier},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | ENOSYS},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
  }};
  sock_fprog const program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}();

TEST(without_membarrier, the_kernel_refuses_it_here) {
  ASSERT_TRUE(membarrier_is_refused);
  EXPECT_EQ(::syscall(SYS_membarrier, 0, 0, 0), -1);
}
#endif

class stress : public gate_test {
 protected:
  static constexpr int thread_count = 16;

  /// Calls of every kind that the threads below make.
  [[nodiscard]] std::uint64_t begun() const {
    return driver.calls("cuLaunchKernel") + driver.calls("cuLaunchKernel_ptsz") +
           driver.calls("cuMemsetD8Async") + driver.calls("cuMemcpyHtoD_v2");
  }
  [[nodiscard]] std::uint64_t inside() const {
    return driver.inside("cuLaunchKernel") + driver.inside("cuLaunchKernel_ptsz") +
           driver.inside("cuMemsetD8Async") + driver.inside("cuMemcpyHtoD_v2");
  }

  void launch_something(std::minstd_rand& random, CUstream own, CUdeviceptr memory,
                        bool may_fail) const {
    static auto const fill = gate_library().get<decltype(&cuMemsetD8Async)>("cuMemsetD8Async");
    std::uint64_t const value = random();
    CUresult result = CUDA_SUCCESS;
    switch (random() % 5) {
      case 0:
        result = launch(nothing, own);
        break;
      case 1:
        result = launch(nothing);
        break;
      case 2:
        result =
            cuda.launch_kernel_per_thread(nothing, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr);
        break;
      case 3:
        result = fill(memory, static_cast<unsigned char>(value), 64, own);
        break;
      default:
        result = cuda.copy_in(memory + 2048, &value,
                              sizeof(value));  // beside what another stream writes
        break;
    }
    EXPECT_TRUE(result == CUDA_SUCCESS || (may_fail && result == CUDA_ERROR_NOT_PERMITTED))
        << result;
  }

  /// Runs `cycle` many times against threads that launch without pause.
  template <typename Cycle>
  void against_launching_threads(int cycles, bool may_fail, Cycle cycle) {
    std::atomic<bool> stop{false};
    std::vector<std::jthread> threads;
    for (int i = 0; i < thread_count; ++i) {
      threads.push_back(thread([&, i] {
        std::minstd_rand random{static_cast<unsigned>(i + 1)};
        CUstream const own = stream();
        CUdeviceptr memory = 0;
        EXPECT_EQ(cuda.allocate(&memory, 4096), CUDA_SUCCESS);
        gate.expendable_thread(may_fail ? 1 : 0);
        while (!stop) {
          launch_something(random, own, memory, may_fail);
        }
        EXPECT_EQ(cuda.free_memory(memory), CUDA_SUCCESS);
      }));
    }
    std::uint64_t const before = gate.launches();
    EXPECT_TRUE(eventually([&] { return gate.launches() > before; }));
    for (int i = 0; i < cycles; ++i) {
      cycle(i);
      if (i % 4 == 0) {  // closes are to meet launching threads, not threads that never get to run
        std::uint64_t const seen = gate.launches();
        EXPECT_TRUE(eventually([&] { return gate.launches() > seen; }));
      }
    }
    stop = true;
  }

  void expect_nothing_begins() const {
    std::uint64_t const then = begun();
    ASSERT_EQ(inside(), 0U);
    for (int i = 0; i < 20; ++i) {
      std::this_thread::yield();
    }
    ASSERT_EQ(begun(), then);
  }

  CUfunction nothing = kernel(0ns);
};

TEST_F(stress, no_launch_begins_after_close_has_returned) {
  int const closes = static_cast<int>(from_environment("SLUICE_TEST_CLOSES", 3000));
  std::uint64_t const launched = gate.launches();
  against_launching_threads(closes, false, [this](int i) {
    ASSERT_EQ(gate.close(in(patience)), 0);
    expect_nothing_begins();
    if (i % 50 == 0) {
      ASSERT_EQ(gate.wait_idle(in(patience)), 0);
    }
    gate.open();
    if (i % 8 == 0) {
      std::this_thread::yield();
    }
  });
  std::printf("%llu launches against %d closes\n",
              static_cast<unsigned long long>(gate.launches() - launched), closes);
}

/// Whether calls that find no room are left to the submitter.
class bounded_stress : public stress, public ::testing::WithParamInterface<bool> {};

TEST_P(bounded_stress, the_same_with_bounded_run_ahead_pauses_and_aborts) {
  static std::uint64_t volatile word = 0;
  gate.set_deferred(GetParam() ? 1 : 0);
  gate.set_pause_word(&word);
  gate.set_run_ahead(100'000);
  auto const closes = static_cast<int>(from_environment("SLUICE_TEST_CLOSES", 3000) / 15);
  std::uint64_t const launched = gate.launches();
  against_launching_threads(closes, true, [this](int i) {
    if (i % 10 == 0) {
      __atomic_store_n(&word, static_cast<std::uint64_t>(in(200us)), __ATOMIC_RELEASE);
    }
    ASSERT_EQ(gate.close(in(patience)), 0);
    expect_nothing_begins();
    if (i % 3 == 0) {
      gate.abort_begin();
    }
    gate.open();
    if (i % 3 == 0) {
      std::this_thread::yield();
      gate.abort_end();
    }
    gate.set_run_ahead(i % 4 * 50'000);
  });
  gate.set_pause_word(nullptr);
  std::printf("%llu launches against %d closes\n",
              static_cast<unsigned long long>(gate.launches() - launched), closes);
}

INSTANTIATE_TEST_SUITE_P(, bounded_stress, ::testing::Bool(),
                         [](auto const& chosen) { return chosen.param ? "deferred" : "waiting"; });

}  // namespace
}  // namespace sluice::gate
