#include "runtime/server/hosting/compute_lease.hpp"

#include <algorithm>
#include <utility>

namespace sluice::server {
namespace {

unsigned bit_of(compute_lease::worker who) {
  return 1U << static_cast<unsigned>(who);
}

}  // namespace

compute_lease::compute_lease(std::shared_ptr<memhandover::serving_pool> pool, double min_share,
                             nanoseconds change, std::function<clock::time_point()> now)
    : now_(std::move(now)),
      pool_(std::move(pool)),
      pause_(pool_, min_share, now_),
      before_waiting_(change),
      before_nothing_(change),
      after_dry_(change) {}

void compute_lease::announce(worker who) {
  std::lock_guard const lock{mutex_};
  if (works_ != 0) {
    return;  // the device is claimed, and will be held on for it
  }
  auto& expected = expected_.at(static_cast<std::size_t>(who));
  expected.announced = expected.announced.value_or(now_());
  ++announcements_;
  // Half as much again, so that most come before training takes it for nothing.
  pool_->announce_compute(expected.to_launch * 3 / 2);
}

void compute_lease::begins(worker who) {
  bool early = false;
  {
    std::lock_guard const lock{mutex_};
    early = begin(who);
  }
  wake_if(early);
}

void compute_lease::drained(bool waited, worker who) {
  std::lock_guard const lock{mutex_};
  end(waited, who);
}

bool compute_lease::begins_here() {
  std::lock_guard const lock{mutex_};
  return begin(worker::models);
}

/// Whether whoever attends has to sooner.
bool compute_lease::begin(worker who) {
  if (std::exchange(works_, works_ | bit_of(who)) != 0) {
    return false;
  }
  auto const now = now_();
  auto const gap = now - drained_;
  if (after_ != nullptr) {
    after_->add(gap);
  }
  busy_from_ = after_ != nullptr && gap < joined_gap ? drained_ : now;
  auto& expected = expected_.at(static_cast<std::size_t>(who));
  if (expected.announced) {
    constexpr int fading = 8;
    expected.to_launch +=
        (std::min<nanoseconds>(now - *expected.announced, expected.longest) - expected.to_launch) /
        fading;
    expected.announced.reset();
  }
  return want_pause();
}

void compute_lease::end(bool waited, worker who) {
  if ((works_ & bit_of(who)) == 0) {
    return;
  }
  works_ &= ~bit_of(who);
  if (works_ != 0) {
    return;
  }
  drained_ = now_();
  busy_ += drained_ - busy_from_;
  after_ = !waited ? &after_dry_ : more_waits_ ? &before_waiting_ : &before_nothing_;
  if (auto const hold = after_->hold(); hold > nanoseconds::zero()) {
    pause_.release_at(drained_ + hold);
  } else {
    pause_.release();
  }
}

bool compute_lease::want_pause() {
  pause_.want();
  return pause_.next_event() < attended_;
}

bool compute_lease::want() {
  std::lock_guard const lock{mutex_};
  return want_pause();
}

void compute_lease::release() {
  std::lock_guard const lock{mutex_};
  pause_.release();
}

bool compute_lease::wanted() const {
  std::lock_guard const lock{mutex_};
  return pause_.wanted();
}

void compute_lease::attend() {
  std::lock_guard const lock{mutex_};
  pause_.attend();
}

compute_lease::clock::time_point compute_lease::attended_by(clock::time_point otherwise) {
  std::lock_guard const lock{mutex_};
  attended_ = std::min(otherwise, pause_.next_event());
  return attended_;
}

void compute_lease::set_waker(std::function<void()> waker) {
  std::lock_guard const lock{waking_};
  waker_ = std::move(waker);
}

void compute_lease::wake_if(bool early) {
  if (!early) {
    return;
  }
  std::lock_guard const lock{waking_};
  if (waker_) {
    waker_();
  }
}

pause_counts compute_lease::counts() const {
  std::lock_guard const lock{mutex_};
  auto result = pause_.counts();
  result.announced = announcements_;
  result.busy = busy_ + (works_ != 0 ? now_() - busy_from_ : nanoseconds::zero());
  return result;
}

}  // namespace sluice::server
