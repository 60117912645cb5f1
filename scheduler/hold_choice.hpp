/// How long a claim on the device outlasts the work that it was for.
///
/// The next work comes after a gap that is not known yet. Held for h, a gap g costs the device
///
///   g            if g ≤ h: nobody has used it
///   h + change   else: what was held in vain, and what it costs to change to training and back
///
/// Of the last gaps those who come again are taken to be as they were, and the h is chosen that would have cost least for
/// all of them: the rent-or-buy problem with a known distribution (Karlin, Manasse, McGeoch, Owicki: Competitive randomized
/// algorithms for nonuniform problems, 1994). While none is known h is `change`, which never costs more than twice what
/// would have been best.
///
///   hold_choice after_requests{250us};
///   after_requests.add(40us);          // a gap between work and the next
///   after_requests.hold();
///
/// Pure; one thread at a time.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <vector>

namespace sluice::scheduler {

class hold_choice {
 public:
  using nanoseconds = std::chrono::nanoseconds;

  /// So many of the last gaps count.
  static constexpr std::size_t remembered = 64;

  /// Throws `std::invalid_argument` unless the change takes time.
  explicit hold_choice(nanoseconds change);

  /// A gap has ended; one below zero counts as none.
  void add(nanoseconds gap);
  [[nodiscard]] nanoseconds hold() const noexcept { return hold_; }

 private:
  [[nodiscard]] nanoseconds cheapest() const;

  nanoseconds change_;
  std::deque<nanoseconds> gaps_;     ///< in their order
  std::vector<nanoseconds> sorted_;  ///< the same by length
  nanoseconds hold_;
};

}  // namespace sluice::scheduler
