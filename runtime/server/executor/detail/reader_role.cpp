#include "runtime/server/executor/detail/reader_role.hpp"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>

#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::server::detail {
namespace {

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds{reader_role::clock::now().time_since_epoch()}.count());
}

}  // namespace

reader_role::seat::seat()
    : timer(memhandover::beside_standard_streams(
          memhandover::unique_fd{::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC)})) {
  if (!timer) {
    throw memhandover::system_error("cannot make a timer");
  }
}

bool reader_role::await_turn(member me) {
  while (!closed_ && reader_in(state_) != me) {
    seat_of(me).is_taken = true;
    std::uint64_t fired = 0;
    (void)!::read(seat_of(me).timer.get(), &fired, sizeof fired);
    if (!closed_) {
      look(me);
    }
    seat_of(me).is_taken = false;
  }
  return !closed_;
}

void reader_role::look(member me) {
  seat_of(me).is_set = false;
  auto seen = state_.load();
  auto const since = seen >> 1U;
  if (since == 0 || reader_in(seen) == me) {
    return;  // who begins after this sets the timer
  }
  std::chrono::nanoseconds const left =
      patience - std::chrono::nanoseconds{static_cast<std::int64_t>(now_ns() - since)};
  if (left.count() <= 0) {
    state_.compare_exchange_strong(seen, word(me, 0));  // unless it has just ended
  } else if (!seat_of(me).is_set.exchange(true)) {
    set_timer(me, left);
  }
}

void reader_role::begin(member me) {
  state_ = word(me, now_ns());
  auto const other = other_than(me);
  if (!seat_of(other).is_set.exchange(true)) {
    set_timer(other, patience);
  }
}

bool reader_role::end(member me) {
  auto seen = state_.load();
  return reader_in(seen) == me && state_.compare_exchange_strong(seen, word(me, 0));
}

void reader_role::pass(member me) {
  auto const other = other_than(me);
  state_ = word(other, 0);
  set_timer(other, std::chrono::nanoseconds{1});
}

void reader_role::close() {
  closed_ = true;
  set_timer(member::first, std::chrono::nanoseconds{1});
  set_timer(member::second, std::chrono::nanoseconds{1});
}

void reader_role::set_timer(member whose, std::chrono::nanoseconds after) const {
  itimerspec const once{.it_interval = {0, 0}, .it_value = {0, static_cast<long>(after.count())}};
  (void)::timerfd_settime(seat_of(whose).timer.get(), 0, &once, nullptr);
}

}  // namespace sluice::server::detail
