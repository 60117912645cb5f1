/// How much a micro-batch could have, and waiting until that is enough.
#include <algorithm>
#include <limits>

#include "runtime/step/training_memory.hpp"

namespace sluice::step {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// In which an earlier job that has waited, too, takes what it has been left.
constexpr std::uint32_t waits_that_let_another_begin = 10;

}  // namespace

std::uint64_t training_memory::capacity_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const chunks =
      arena_->chunks().size() + unused() + client_->view().header().grantable.load();
  return chunks * client_->view().shape().chunk_bytes;
}

std::uint64_t training_memory::kept_bytes() const {
  std::lock_guard const lock{mutex_};
  return (chunks_kept() - persistent_->idle_chunks()) * memory_->shape().chunk_bytes;
}

bool training_memory::wait_capacity(std::uint64_t bytes, milliseconds patience) {
  auto const chunk = client_->view().shape().chunk_bytes;
  std::uint64_t own = 0;
  bool stands_back = false;
  {
    std::lock_guard const lock{mutex_};
    own = (arena_->chunks().size() + unused()) * chunk;
    stands_back = waits_to_stand_back_ > 0;
    waits_to_stand_back_ -= stands_back ? 1 : 0;
  }
  if (stands_back) {  // what is free now another is about to take
    constexpr auto more_than_there_are = std::numeric_limits<std::uint32_t>::max();
    return client_->wait_grantable(more_than_there_are, steady_clock::now() + patience);
  }
  if (own >= bytes) {
    return true;
  }
  auto const missing = static_cast<std::uint32_t>((bytes - own - 1) / chunk + 1);
  if (client_->wait_grantable(missing, steady_clock::now() + patience)) {
    return true;
  }
  std::lock_guard const lock{mutex_};
  ++turns_;
  let_idle_go();
  if (phase_ == phase::idle && an_earlier_job_waits()) {
    give_way();
  }
  return false;
}

/// Two that wait, each with an arena of which the other would have enough, would wait for ever.
bool training_memory::an_earlier_job_waits() const {
  auto const& view = client_->view();
  for (std::uint32_t slot = 0; slot < client_->slot(); ++slot) {
    if (view.mailbox(slot).waiting.load() != 0) {
      return true;
    }
  }
  return false;
}

/// The pool has what no micro-batch uses; mutex_ is held.
void training_memory::give_way() {
  auto given =
      arena_->revoked() ? std::vector<std::uint32_t>{} : arena_->shrink(arena_->idle_chunks());
  auto const stocked = stock_->chunks();
  given.insert(given.end(), stocked.begin(), stocked.end());
  stock_->clear();
  if (!given.empty()) {
    client_->release(given);
    waits_to_stand_back_ = waits_that_let_another_begin;
    publish();
  }
}

}  // namespace sluice::step
