#include "memhandover/parking/return_estimate.hpp"

#include <algorithm>

namespace sluice::memhandover {

using std::chrono::nanoseconds;

void return_estimate::went(nanoseconds in_all, disk_time written) noexcept {
  going_ = in_all;
  if (written.chunks > 0) {
    writing_ = written.time / written.chunks;
  }
}

void return_estimate::came(nanoseconds in_all, std::uint32_t chunks, disk_time read) noexcept {
  a_chunk_ = std::max(nanoseconds{1}, (in_all - read.time) / std::max(1U, chunks));
  if (read.chunks > 0) {
    reading_ = read.time / read.chunks;
  }
}

nanoseconds return_estimate::expected(std::uint32_t chunks, std::uint32_t on_disk) const noexcept {
  if (a_chunk_ == nanoseconds::zero()) {
    return going_;
  }
  return chunks * a_chunk_ + on_disk * (reading_ > nanoseconds::zero() ? reading_ : writing_);
}

}  // namespace sluice::memhandover
