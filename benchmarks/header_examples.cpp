/// The examples in the headers of the benchmarks, word for word: compiled, never run.
#include <chrono>
#include <cstddef>
#include <memory>

#include "benchmarks/isolation_roles.hpp"
#include "benchmarks/isolation_watch.hpp"
#include "benchmarks/pool_device.hpp"
#include "benchmarks/pool_engine.hpp"
#include "benchmarks/pool_training.hpp"

namespace sluice::bench {
namespace {

using namespace std::chrono_literals;
using memhandover::backend_kind;

[[maybe_unused]] void of_isolation_watch(isolation_counts& counts) {
  role_watch watch{"server", counts.doing[0], 60s};
  watch.doing(activity::acquiring);
  watch.got_on();
}

[[maybe_unused]] void of_pool_device(std::byte* where, std::size_t bytes) {
  auto device = open_pool_device(backend_kind::host, 0);
  if (!device->fill(where, bytes, 0x5a)) {
  }
}

[[maybe_unused]] void of_pool_engine(memhandover::broker_options const& broker,
                                     std::chrono::steady_clock::time_point deadline,
                                     std::unique_ptr<pool_device> const& device,
                                     pool_engine::use const& first_look,
                                     pool_engine::use const& use) {
  pool_engine engine{broker, "engine", device->driver()};
  engine.grow(16, deadline, "weights", [&](std::byte* where) { first_look(where); });
  engine.visit([&](std::byte* where) { use(where); });
  engine.shrink(3);
}

[[maybe_unused]] void of_pool_training(memhandover::broker_options const& broker,
                                       std::size_t bytes) {
  pool_training job{backend_kind::cuda, 0, {.broker = broker, .name = "job"}};
  auto* const block = job.memory().allocate_arena(bytes);
  job.pass([&] { (void)job.device().fill(block, bytes, 1); });
}

}  // namespace
}  // namespace sluice::bench
