#include "runtime/torch/model/detail/computation.hpp"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>

namespace sluice::server::detail {
namespace {

constexpr std::uint64_t first_ones = 4, one_of = 32;

thread_local bool runs = false;
thread_local std::int64_t now = 0, peak = 0;

std::atomic<std::uint64_t> begun{0}, ended{0};

c10::CachingAllocator::Stat allocated(at::Device device) {
  auto const all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return at::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .allocated_bytes.at(all);
}

}  // namespace

computation::computation(at::Device device, activation_peak& most) : device_(device), most_(most) {
  runs = true;
  now = peak = 0;
  auto const number = ++begun;
  auto const of_model = most_.computations++;
  bool const alone = number == ended + 1;
  if (!device_.is_cpu() && alone && (of_model < first_ones || of_model % one_of == 0)) {
    number_ = number;
    at::getDeviceAllocator(device_.type())->resetPeakStats(device_.index());
    before_ = allocated(device_).current;
  }
}

computation::~computation() {
  runs = false;
  if (number_ != 0 && begun == number_) {
    try {
      peak = allocated(device_).peak - before_;
    } catch (...) {  // then this one is not measured
    }
  }
  ++ended;
  auto const bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(peak, 0));
  auto most = most_.bytes.load();
  while (bytes > most && !most_.bytes.compare_exchange_weak(most, bytes)) {
  }
}

bool computation::runs_here() noexcept {
  return runs;
}

void computation::count(std::int64_t bytes) noexcept {
  if (runs) {
    now += bytes;
    peak = std::max(peak, now);
  }
}

}  // namespace sluice::server::detail
