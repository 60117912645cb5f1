/// A gate that leaves calls to its submitter, and kernels that write down when they run.
#pragma once

#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {

using namespace std::chrono_literals;

/// What ran, in its order.
struct journal {
  std::mutex lock;
  std::vector<int> entries;
};

inline journal& written() {
  static journal one;
  return one;
}

/// A kernel with one parameter, which it writes down.
inline void write_down(void** parameters) {
  std::lock_guard const guard{written().lock};
  int number = 0;
  std::memcpy(&number, parameters[0], sizeof(number));
  written().entries.push_back(number);
}

inline std::vector<int> take_entries() {
  std::lock_guard const guard{written().lock};
  return std::exchange(written().entries, {});
}

/// Whether so many entries are there, sooner or later.
[[nodiscard]] inline bool eventually_written(std::size_t count) {
  return eventually([count] {
    std::lock_guard const guard{written().lock};
    return written().entries.size() >= count;
  });
}

[[nodiscard]] inline std::vector<int> numbers(int from, int to) {
  std::vector<int> all;
  for (int i = from; i < to; ++i) {
    all.push_back(i);
  }
  return all;
}

class submission : public gate_test {
 protected:
  submission() {
    take_entries();
    gate.set_deferred(1);
    gate.set_run_ahead(std::chrono::nanoseconds{100us}.count());
    note(-1);  // so that this kind of launch is known
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    take_entries();
  }

  void note(int number, CUstream stream = nullptr, unsigned blocks = 1) const {
    std::array<void*, 1> parameters{&number};
    EXPECT_EQ(
        cuda.launch_kernel(noting, blocks, 1, 1, 1, 1, 1, 0, stream, parameters.data(), nullptr),
        CUDA_SUCCESS);
  }
  [[nodiscard]] std::uint64_t begun() const { return driver.calls("cuLaunchKernel"); }
  void close() const { ASSERT_EQ(gate.close(in(10s)), 0); }
  [[nodiscard]] CUevent event() const {
    CUevent made = nullptr;
    EXPECT_EQ(cuda.create_event(&made, 0), CUDA_SUCCESS);
    return made;
  }
  [[nodiscard]] CUdeviceptr memory(std::size_t bytes) const {
    CUdeviceptr made = 0;
    EXPECT_EQ(cuda.allocate(&made, bytes), CUDA_SUCCESS);
    return made;
  }

  std::size_t const one_int = sizeof(int);
  CUfunction noting = static_cast<CUfunction>(driver.register_kernel(write_down, &one_int, 1, 0));
};

}  // namespace sluice::gate
