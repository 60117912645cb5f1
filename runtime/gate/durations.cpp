#include "runtime/gate/durations.hpp"

#include <algorithm>

namespace sluice::gate {
namespace {

/// Weight of a new measurement, 1/4: what a kernel takes changes with clocks and neighbours.
constexpr std::int64_t weight_of_the_old = 3;
constexpr std::uint32_t most_measured = 0xffff;

constexpr durations::estimate unpack(std::uint64_t value) noexcept {
  return {std::chrono::nanoseconds{static_cast<std::int64_t>(value >> 16U)},
          static_cast<std::uint32_t>(value & most_measured)};
}

}  // namespace

durations::estimate durations::of(work_key key) const noexcept {
  for (std::size_t i = 0; i < reach; ++i) {
    place const& here = places_[(first(key) + i) % size];
    work_key const found = here.key.load(std::memory_order_acquire);
    if (found == key) {
      return unpack(here.value.load(std::memory_order_acquire));
    }
    if (found == 0) {
      break;
    }
  }
  return {std::chrono::nanoseconds::zero(), 0};
}

void durations::learn(work_key key, std::chrono::nanoseconds took) noexcept {
  for (std::size_t i = 0; i < reach; ++i) {
    place& here = places_[(first(key) + i) % size];
    work_key found = here.key.load(std::memory_order_acquire);
    if (found == 0 && here.key.compare_exchange_strong(found, key, std::memory_order_acq_rel)) {
      found = key;
    }
    if (found != key) {
      continue;
    }
    estimate const known = unpack(here.value.load(std::memory_order_acquire));
    std::int64_t const fresh = std::max<std::int64_t>(1, took.count());
    std::int64_t const mean =
        known.measured == 0
            ? fresh
            : (weight_of_the_old * known.mean.count() + fresh) / (weight_of_the_old + 1);
    std::uint64_t const count = std::min(known.measured + 1, most_measured);
    here.value.store(static_cast<std::uint64_t>(mean) << 16U | count, std::memory_order_release);
    return;
  }
}

}  // namespace sluice::gate
