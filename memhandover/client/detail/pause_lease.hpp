/// The pause word of a ledger, kept for as long as somebody claims the compute units.
///
/// The word is the instant until which training holds its launches: never further ahead than the
/// lease, so that a server that dies or hangs leaves nobody held, and never beyond the last instant
/// that a claim asks for, so that a claim ends on time whether or not its owner is awake then.
///
///   pause_lease lease{header.pause_until_ns, 100ms};
///   auto const claim = lease.add(steady_clock::now() + 800ms);   // held from here on
///   lease.renew();                                               // before the lease has run out
///   lease.drop(claim);
///
/// Thread-safety: none; the owner serialises calls.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>

namespace sluice::memhandover::detail {

class pause_lease {
 public:
  /// CLOCK_MONOTONIC nanoseconds until which each holds.
  using claims = std::multiset<std::int64_t>;
  using claim = claims::const_iterator;

  /// `word` must outlive this object.
  pause_lease(std::atomic<std::uint64_t>& word, std::chrono::nanoseconds length)
      : word_(word), length_(length) {}

  /// Holds until `until` at most; `time_point::max()`: until it is dropped.
  [[nodiscard]] claim add(std::chrono::steady_clock::time_point until);
  void drop(claim which);
  void renew();
  [[nodiscard]] bool claimed() const noexcept { return !claims_.empty(); }

 private:
  std::atomic<std::uint64_t>& word_;
  std::chrono::nanoseconds length_;
  claims claims_;
};

}  // namespace sluice::memhandover::detail
