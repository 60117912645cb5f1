#include "runtime/server/hosting/detail/compute_pause.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "memhandover/base/error.hpp"

namespace sluice::server::detail {
namespace {

scheduler::pause_budget budget_of(double min_share) {
  try {
    return scheduler::pause_budget{min_share};
  } catch (std::invalid_argument const& refused) {
    throw error{error_kind::invalid_argument, refused.what()};
  }
}

}  // namespace

compute_pause::compute_pause(std::shared_ptr<memhandover::serving_pool> pool, double min_share,
                             std::function<clock::time_point()> now)
    : pool_(std::move(pool)),
      min_share_(min_share),
      now_(std::move(now)),
      budget_(budget_of(min_share)) {}

void compute_pause::want() {
  auto const now = now_();
  end_on_time(now);
  if (!wanted()) {
    hold(now);
  } else if (end_ != clock::time_point::max()) {
    claim_ = pool_->claim_compute(limit_);
    end_ = clock::time_point::max();
  }
}

void compute_pause::release() {
  claim_.reset();
  // What the budget counts ends when launches are free again, not before.
  auto const now = now_();
  end_on_time(now);
  budget_.end(now);
  enter(state::open, now);
}

void compute_pause::release_at(clock::time_point end) {
  end_on_time(now_());
  if (state_ != state::held) {
    release();
    return;
  }
  claim_ = pool_->claim_compute(std::min(end, limit_));
  end_ = end;
}

void compute_pause::attend() {
  auto const now = now_();
  end_on_time(now);
  if (state_ == state::spent && now >= budget_.next_begin()) {
    hold(now);
  }
}

compute_pause::clock::time_point compute_pause::next_event() const {
  switch (state_) {
    case state::held:
      return limit_;
    case state::spent:
      return budget_.next_begin();
    case state::open:
      break;
  }
  return clock::time_point::max();
}

/// What has ended by itself.
void compute_pause::end_on_time(clock::time_point now) {
  if (state_ != state::held || now < std::min(end_, limit_)) {
    return;
  }
  claim_.reset();
  if (end_ <= limit_) {
    budget_.end(end_);
    enter(state::open, end_);
  } else {
    budget_.end(limit_);
    ++cut_short_;
    enter(state::spent, limit_);
  }
}

/// The budget counts from `now` on, which is before launches are really held.
void compute_pause::hold(clock::time_point now) {
  auto const limit = budget_.begin(now);
  if (limit <= now) {
    enter(state::spent, now);
    return;
  }
  try {
    claim_ = pool_->claim_compute(limit);
  } catch (...) {
    budget_.end(now);
    enter(state::open, now);
    throw;
  }
  limit_ = limit;
  ++pauses_;
  enter(state::held, now);
}

void compute_pause::enter(state next, clock::time_point now) {
  if (state_ == state::held) {
    held_ += now - since_;
  } else if (state_ == state::spent) {
    withheld_ += now - since_;
  }
  state_ = next;
  since_ = now;
  end_ = clock::time_point::max();
}

pause_counts compute_pause::counts() const {
  auto const now = now_();
  auto const lasts = [&](state which) {
    auto const end = which == state::held ? std::min({now, limit_, end_}) : now;
    return state_ == which ? end - since_ : clock::duration::zero();
  };
  return {.min_share = min_share_,
          .pauses = pauses_,
          .cut_short = cut_short_,
          .held = held_ + lasts(state::held),
          .withheld = withheld_ + lasts(state::spent),
          .window = budget_.window(),
          .held_in_window = budget_.held_in_window(now)};
}

}  // namespace sluice::server::detail
