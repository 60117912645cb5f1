#include "nccl_shim/heartbeat.hpp"

#include <chrono>
#include <span>
#include <string_view>
#include <utility>

#include "nccl_shim/clock.hpp"

namespace sluice::nccl_shim {
namespace {

/// So many beats are missed before a rank is lost.
constexpr int missed_beats = 10;
constexpr std::string_view has_left = "left";

std::string beat_key(std::string const& prefix, unsigned rank) {
  return prefix + "beat/" + std::to_string(rank);
}

}  // namespace

void heartbeat::make(store& in, std::string const& prefix, unsigned rank) {
  static_cast<void>(in.add(beat_key(prefix, rank), 0));
}

void heartbeat::remove(store& in, std::string const& prefix, unsigned ranks) {
  for (unsigned rank = 0; rank < ranks; ++rank) {
    in.remove(beat_key(prefix, rank));
  }
}

heartbeat::heartbeat(store& in, std::string const& prefix, unsigned rank, unsigned ranks,
                     std::function<void(unsigned rank)> lost)
    : in_{in},
      rank_{rank},
      lost_{std::move(lost)},
      seen_(ranks, beat{}),
      since_(ranks, monotonic_ns()) {
  for (unsigned of = 0; of < ranks; ++of) {
    keys_.push_back(beat_key(prefix, of));
  }
  thread_ = std::jthread{[this](std::stop_token const& ends) { run(ends); }};
}

heartbeat::~heartbeat() {
  thread_.request_stop();
  thread_.join();
  std::array const left{
      store::written{keys_[rank_], std::as_bytes(std::span{has_left.data(), has_left.size()})}};
  in_.set(left);
}

void heartbeat::run(std::stop_token const& ends) {
  std::unique_lock guard{lock_};
  while (!ends.stop_requested() && in_.add(keys_[rank_], 1)) {
    look(monotonic_ns());
    ended_.wait_for(guard, ends, in_.at().patience / missed_beats, [] { return false; });
  }
}

/// `now` is before the others' are read: if this process has been stopped since, it is not their silence.
void heartbeat::look(std::int64_t now) {
  std::vector<beat> found(keys_.size(), beat{});
  if (!in_.get(keys_, std::as_writable_bytes(std::span{found}))) {
    return;
  }
  for (unsigned rank = 0; rank < found.size(); ++rank) {
    if (found[rank] != std::exchange(seen_[rank], found[rank])) {
      since_[rank] = now;
    } else if (std::string_view{found[rank].data()} != has_left &&
               now - since_[rank] > std::chrono::nanoseconds{in_.at().patience}.count()) {
      lost_(rank);
    }
  }
}

}  // namespace sluice::nccl_shim
