/// What an engine's processes have the device do, as they say it in their mailboxes: the server holds training for just so long.
///
///   work_report report{client.mailbox(), client.files().doorbell.get()};
///   report.begins();        // the device gets something to do
///   report.renew();         // while that lasts, again and again, at least every `lasts` / 2
///   report.drained(true);   // it has done all, which somebody has waited for
///
///   // the server, whenever it is rung, and when that has passed
///   if (auto const seen = work_of_engines(view, monotonic_ns()); seen.works) {
///     // … is held until seen.until_ns …
///   }
///
/// One that is killed or stopped meanwhile is taken to work for `lasts` at most.
///
/// Thread-safety: `begins` and `drained` one at a time; `renew` and `work_of_engines` any thread.
#pragma once

#include <chrono>
#include <cstdint>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

class work_report {
 public:
  /// What is said counts for so long.
  static constexpr std::chrono::milliseconds lasts{1000};

  /// The doorbell is the writer's. Both must outlive this object.
  work_report(client_report& says, int doorbell) noexcept : says_(says), doorbell_(doorbell) {}

  /// Neither waits for anybody.
  void begins() noexcept;
  /// `waited`: somebody has waited for its end, so that the next work is a matter of what is asked for.
  void drained(bool waited) noexcept;
  void renew() noexcept;

 private:
  client_report& says_;
  int doorbell_;
};

struct work_seen {
  bool works = false;   ///< the device does something for one of them
  bool waited = false;  ///< if none: what ended last had been waited for
  std::int64_t until_ns =
      0;  ///< CLOCK_MONOTONIC; if one does: it is to be looked at again then, unless it is rung
};

/// Of all engines of the pool together. What a damaged mailbox says counts for `lasts` at most.
[[nodiscard]] work_seen work_of_engines(ledger_view const& view, std::int64_t now_ns) noexcept;

}  // namespace sluice::memhandover
