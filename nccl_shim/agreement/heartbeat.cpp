#include "nccl_shim/agreement/heartbeat.hpp"

#include <array>
#include <chrono>
#include <span>
#include <string_view>
#include <utility>

#include "nccl_shim/agreement/clock.hpp"

namespace sluice::nccl_shim {
namespace {

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
      silences_{ranks, in.at().patience, monotonic_ns()} {
  for (unsigned of = 0; of < ranks; ++of) {
    keys_.push_back(beat_key(prefix, of));
  }
  thread_ = std::jthread{[this](std::stop_token const& ends) { run(ends); }};
}

heartbeat::~heartbeat() {
  thread_.request_stop();
  thread_.join();
  std::string_view const says = silences::has_left;
  std::array const left{
      store::written{keys_[rank_], std::as_bytes(std::span{says.data(), says.size()})}};
  in_.set(left);
}

void heartbeat::run(std::stop_token const& ends) {
  std::unique_lock guard{lock_};
  while (!ends.stop_requested() && in_.add(keys_[rank_], 1)) {
    look();
    ended_.wait_for(guard, ends, in_.at().patience / silences::looks, [] { return false; });
  }
}

void heartbeat::look() {
  std::vector<beat> found(keys_.size(), beat{});
  auto const now = monotonic_ns();
  if (!in_.get(keys_, std::as_writable_bytes(std::span{found}))) {
    return;
  }
  for (unsigned const rank : silences_.look(found, now)) {
    lost_(rank);
  }
}

}  // namespace sluice::nccl_shim
