#include "nccl_shim/calls/known_communicator.hpp"

#include <chrono>
#include <cstdio>

#include "nccl_shim/agreement/clock.hpp"
#include "nccl_shim/calls/collective.hpp"

namespace sluice::nccl_shim {

void known_communicator::fail_by_difference() noexcept {
  auto const found = ranks->agreement().difference();
  if (fail(invalid_usage) && found) {
    std::fprintf(
        stderr, "sluice: ranks differ in collective %llu: rank %u calls %s, rank %u calls %s\n",
        static_cast<unsigned long long>(found->number), found->ranks[0],
        to_text(found->calls[0]).c_str(), found->ranks[1], to_text(found->calls[1]).c_str());
  }
}

bool known_communicator::may_look_around() noexcept {
  constexpr std::chrono::nanoseconds between = std::chrono::milliseconds{5};
  std::int64_t const now = monotonic_ns();
  std::int64_t last = looked_around_ns.load(std::memory_order_relaxed);
  return now - last >= between.count() &&
         looked_around_ns.compare_exchange_strong(last, now, std::memory_order_relaxed);
}

}  // namespace sluice::nccl_shim
