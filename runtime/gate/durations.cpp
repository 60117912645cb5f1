#include "runtime/gate/durations.hpp"

#include <algorithm>

namespace sluice::gate {
namespace {

/// The first measurements may have met something else on the device: the shortest of them counts.
constexpr std::uint32_t first_measurements = 4;
/// Weight of a later one, 1/4, and how much longer than the mean it may be taken to be: what a kernel
/// takes changes with clocks and neighbours.
constexpr std::int64_t weight_of_the_old = 3;
constexpr std::int64_t most_times_the_mean = 2;
constexpr std::uint32_t most_measured = 0xffff;

constexpr durations::estimate unpack(std::uint64_t value) noexcept {
  return {std::chrono::nanoseconds{static_cast<std::int64_t>(value >> 16U)},
          static_cast<std::uint32_t>(value & most_measured)};
}

}  // namespace

template <typename Places>
auto durations::find(Places& places, work_key key) noexcept -> decltype(places.data()) {
  for (std::size_t i = 0; i < reach; ++i) {
    auto& here = places[(first(key) + i) % size];
    work_key const found = here.key.load(std::memory_order_acquire);
    if (found == key || found == 0) {
      return &here;
    }
  }
  return nullptr;
}

durations::estimate durations::of(work_key key) const noexcept {
  place const* const here = find(places_, key);
  return here != nullptr && here->key.load(std::memory_order_acquire) == key
             ? unpack(here->value.load(std::memory_order_acquire))
             : estimate{std::chrono::nanoseconds::zero(), 0};
}

bool durations::has_place(work_key key) const noexcept {
  return find(places_, key) != nullptr;
}

void durations::learn(work_key key, std::chrono::nanoseconds took) noexcept {
  place* here = nullptr;
  for (work_key found = 0; found != key;) {
    here = find(places_, key);
    if (here == nullptr) {
      return;
    }
    found = here->key.load(std::memory_order_acquire);
    if (found == 0 && here->key.compare_exchange_strong(found, key, std::memory_order_acq_rel)) {
      found = key;
    }
  }
  estimate const known = unpack(here->value.load(std::memory_order_acquire));
  std::int64_t const fresh = std::max<std::int64_t>(1, took.count());
  std::int64_t const old = known.mean.count();
  std::int64_t mean = fresh;
  if (known.measured >= first_measurements) {
    std::int64_t const believed = std::min(fresh, most_times_the_mean * old);
    mean = (weight_of_the_old * old + believed) / (weight_of_the_old + 1);
  } else if (known.measured > 0) {
    mean = std::min(old, fresh);
  }
  std::uint64_t const count = std::min(known.measured + 1, most_measured);
  here->value.store(static_cast<std::uint64_t>(mean) << 16U | count, std::memory_order_release);
}

}  // namespace sluice::gate
