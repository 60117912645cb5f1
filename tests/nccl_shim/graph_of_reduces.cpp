#include "tests/nccl_shim/graph_of_reduces.hpp"

#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "tests/fake_driver/fake_driver.h"

namespace sluice::nccl_shim::testing {
namespace {

std::atomic<int> wrong_counts{0};

/// The kernel around the graph: copies a number, and looks that what has become of a one is what it should be.
struct copied {
  int const* from;
  int* to;
  int const* became;
  int expected;
};

void copy(void** parameters) {
  copied call{};
  std::memcpy(&call, parameters[0], sizeof(call));
  *call.to = *call.from;
  if (call.became != nullptr && *call.became != call.expected) {
    wrong_counts.fetch_add(1);
  }
}

void expect(char const* what, int result) {
  if (result != 0) {
    throw std::runtime_error{std::string{what} + ": " + std::to_string(result)};
  }
}

}  // namespace

graph_of_reduces::graph_of_reduces(graph_of_reduces_needs needs) : needs_{std::move(needs)} {
  auto const make =
      reinterpret_cast<decltype(&fake_register_kernel)>(needs_.gate->real("fake_register_kernel"));
  static std::size_t const size = sizeof(copied);
  copy_ = static_cast<CUfunction>(make(copy, &size, 1, 0));
  auto const begin =
      reinterpret_cast<decltype(&cuStreamBeginCapture)>(needs_.driver("cuStreamBeginCapture_v2"));
  auto const end =
      reinterpret_cast<decltype(&cuStreamEndCapture)>(needs_.driver("cuStreamEndCapture"));
  auto const clone = reinterpret_cast<decltype(&cuGraphClone)>(needs_.driver("cuGraphClone"));
  auto const destroy = reinterpret_cast<decltype(&cuGraphDestroy)>(needs_.driver("cuGraphDestroy"));
  auto const instantiate =
      reinterpret_cast<decltype(&cuGraphInstantiate)>(needs_.driver("cuGraphInstantiateWithFlags"));
  CUgraph captured = nullptr;
  CUgraph cloned = nullptr;
  expect("begin", begin(needs_.where, CU_STREAM_CAPTURE_MODE_RELAXED));
  expect("first", needs_.record(1, from_, to_));
  expect("second", needs_.record(2, one_, became_));
  expect("end", end(needs_.where, &captured));
  expect("clone", clone(&cloned, captured));
  expect("destroy", destroy(captured));
  expect("instantiate", instantiate(&executable_, cloned, 0));
  expect("destroy", destroy(cloned));
}

int graph_of_reduces::reduce(int& from, int& to) {
  auto const launch = reinterpret_cast<decltype(&cuLaunchKernel)>(needs_.driver("cuLaunchKernel"));
  auto const launch_graph =
      reinterpret_cast<decltype(&cuGraphLaunch)>(needs_.driver("cuGraphLaunch"));
  auto const copy_number = [&](copied call) -> int {
    std::array<void*, 1> parameters{&call};
    return launch(copy_, 1, 1, 1, 1, 1, 1, 0, needs_.where, parameters.data(), nullptr);
  };
  int result = copy_number({&from, &from_, nullptr, 0});
  result = result != 0 ? result : launch_graph(executable_, needs_.where);
  return result != 0 ? result : copy_number({&to_, &to, &became_, needs_.of_one});
}

int graph_of_reduces::wrong() {
  return wrong_counts.load();
}

}  // namespace sluice::nccl_shim::testing
