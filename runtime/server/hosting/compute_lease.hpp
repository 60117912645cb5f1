/// How inference claims the device from training, by what it does there and not by what it has been asked to do.
///
///   free ──begins──► claimed ──drained──► held on ──until its end──► free
///                        ▲                   └──begins──┐
///                        └──────────────────────────────┘
///
/// Work begins with the first launch and is drained when the device has done all of it. How long the claim outlasts it
/// follows from the gaps that there were (scheduler/hold_choice.hpp), apart for work that somebody has waited for, as for a
/// request's, with another request waiting or without, and for a device that has run dry under somebody who launches slowly.
/// Training's share limits all of it (detail/compute_pause.hpp).
///
/// What is about to come is announced to training, with the time that it usually takes from there to the first launch.
///
///   compute_lease lease{pool, 0.05, compute_lease::change_on_gpu};
///   lease.begins();
///   lease.drained(true);
///
/// A claim can be held for other reasons as well: see `want`.
///
/// Thread-safety: all members may be called from any thread; none waits for a device.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "memhandover/client/serving_pool.hpp"
#include "runtime/server/hosting/detail/compute_pause.hpp"
#include "scheduler/hold_choice.hpp"

namespace sluice::server {

class compute_lease {
 public:
  using clock = std::chrono::steady_clock;
  using nanoseconds = std::chrono::nanoseconds;

  /// What it costs to give the device to training and to have it back: training's start, and the wait for what it has put
  /// there. On the host that is an operator, which is not interrupted.
  static constexpr nanoseconds change_on_gpu{250'000}, change_on_host{5'000'000};
  /// Bursts of work with shorter gaps between them count as one (`pause_counts::busy`).
  static constexpr nanoseconds joined_gap{200'000};

  /// Throws `invalid_argument` unless `min_share` is in [0, 1].
  compute_lease(std::shared_ptr<memhandover::serving_pool> pool, double min_share,
                nanoseconds change, std::function<clock::time_point()> now = clock::now);

  /// Who has the device do something. It is claimed as long as one of them does; gaps are those in which none does.
  enum class worker : std::uint8_t { models, engines };

  /// The device has something to do again; nothing happens if it has. Throws what claiming throws: training then goes on
  /// beside it.
  void begins(worker who = worker::models);
  /// The same by whoever attends: whether that has to be earlier than was said, since the waker is not called.
  [[nodiscard]] bool begins_here();
  /// Something has come that will be launched soon.
  void announce(worker who = worker::models);
  /// Whether something waits for what works now to end.
  void set_more_waits(bool more) noexcept { more_waits_ = more; }
  /// It has done all of theirs. `waited`: somebody has waited for it, so that the next work is a matter of what is asked for.
  void drained(bool waited, worker who = worker::models);

  /// A claim for another reason than work, until it is released; then work plays no part. Whether `attend` has to be
  /// called earlier than was said: the waker is not. As of `compute_pause`.
  [[nodiscard]] bool want();
  void release();
  [[nodiscard]] bool wanted() const;

  /// Ends what is over, and begins again what training's share had ended.
  void attend();
  /// `attend` will be called then, or at `otherwise`, if that is earlier: the return value. If it has to be earlier
  /// because something begins, `waker` is called.
  [[nodiscard]] clock::time_point attended_by(clock::time_point otherwise);
  void set_waker(std::function<void()> waker);

  [[nodiscard]] pause_counts counts() const;

 private:
  [[nodiscard]] bool begin(worker who);
  void end(bool waited, worker who);
  [[nodiscard]] bool want_pause();
  void wake_if(bool early);

  /// From an announcement to the first launch, of late.
  struct expectation {
    std::optional<clock::time_point> announced;
    nanoseconds longest;
    nanoseconds to_launch = first_expected;
  };

  static constexpr nanoseconds first_expected{500'000};

  std::function<clock::time_point()> const now_;
  std::shared_ptr<memhandover::serving_pool> const pool_;
  std::atomic<bool> more_waits_{false};
  std::mutex waking_;  ///< before mutex_
  std::function<void()> waker_;
  mutable std::mutex mutex_;  ///< guards the rest
  detail::compute_pause pause_;
  scheduler::hold_choice before_waiting_, before_nothing_, after_dry_;
  scheduler::hold_choice* after_ = nullptr;  ///< whose gap it is now; null before the first work
  clock::time_point drained_, busy_from_, attended_;
  nanoseconds busy_{};
  /// By worker. An engine is another process, which reads the request first.
  std::array<expectation, 2> expected_{expectation{{}, nanoseconds{2'000'000}},
                                       expectation{{}, nanoseconds{50'000'000}}};
  std::uint64_t announcements_ = 0;
  unsigned works_ = 0;  ///< for whom: a bit each
};

}  // namespace sluice::server
