/// Which of two threads reads from a socket. The one that does may do something else in between, on its own, as long as it
/// takes no longer than `patience`; else the other one reads from then on. Nobody is woken for that: who does not read sleeps until
/// a timer is due that the first one sets, and no more often than once in `patience`.
///
///   void run(reader_role::member me) {
///     while (role.await_turn(me)) {
///       // … reads …
///       if (role.has_deputy(me)) {
///         role.begin(me);
///         // … something else …
///         role.end(me);
///       }
///     }
///   }
///
///   role.close();   // neither waits for its turn any more
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::server::detail {

class reader_role {
 public:
  enum class member : std::uint8_t { first, second };
  using clock = std::chrono::steady_clock;

  static constexpr std::chrono::milliseconds patience{1};

  /// It is the first's. Throws if there are no timers.
  reader_role() = default;

  /// False: it is closed.
  [[nodiscard]] bool await_turn(member me);
  /// To be asked by who reads: whether the other one waits for its turn.
  [[nodiscard]] bool has_deputy(member me) const { return seat_of(other_than(me)).is_taken; }
  void begin(member me);
  /// Whether it still reads.
  bool end(member me);
  /// By who reads, to give the role away.
  void pass(member me);
  void close();

 private:
  /// Who reads, and since when it does something else, in nanoseconds; 0: it does not.
  [[nodiscard]] static std::uint64_t word(member who, std::uint64_t since) noexcept {
    return since << 1U | static_cast<std::uint64_t>(who);
  }
  [[nodiscard]] static member reader_in(std::uint64_t state) noexcept {
    return static_cast<member>(state & 1U);
  }
  [[nodiscard]] static member other_than(member me) noexcept {
    return me == member::first ? member::second : member::first;
  }
  void set_timer(member whose, std::chrono::nanoseconds after) const;
  void look(member me);

  /// In which a member waits.
  struct seat {
    seat();

    memhandover::unique_fd const timer;
    std::atomic<bool> is_set = false, is_taken = false;
  };
  [[nodiscard]] seat& seat_of(member whose) { return seats_.at(static_cast<std::size_t>(whose)); }
  [[nodiscard]] seat const& seat_of(member whose) const {
    return seats_.at(static_cast<std::size_t>(whose));
  }

  std::array<seat, 2> seats_;
  std::atomic<std::uint64_t> state_{0};
  std::atomic<bool> closed_ = false;
};

}  // namespace sluice::server::detail
