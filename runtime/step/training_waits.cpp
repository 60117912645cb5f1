/// How much a micro-batch could have, and waiting until that is enough.
#include <algorithm>
#include <limits>

#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/job_needs.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::step {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// In which an earlier job that has waited, too, takes what it has been left.
constexpr std::uint32_t waits_that_let_another_begin = 10;
/// Whose broker has died gets what was free before.
constexpr milliseconds release_patience{1000};

}  // namespace

std::uint64_t training_memory::capacity_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const chunks = spaces_->arena().chunks().size() + spaces_->unused() +
                      memhandover::grantable_to(client_->view(), client_->slot());
  return chunks * client_->view().shape().chunk_bytes;
}

std::uint64_t training_memory::reachable_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const shape = memory_->shape();
  return (shape.chunk_count - std::min(shape.chunk_count, spaces_->needed_for_good())) *
         shape.chunk_bytes;
}

/// Who has given memory back finds it here, as with a driver.
std::uint64_t training_memory::persistent_free_bytes() const {
  client_->await_releases(steady_clock::now() + release_patience);
  std::lock_guard const lock{mutex_};
  auto const& arena = spaces_->arena();
  auto const& persistent = spaces_->persistent().ranges();
  auto const idle = arena.revoked() ? 0 : arena.idle_chunks();
  auto const chunks =
      spaces_->unused() + idle + memhandover::grantable_to(client_->view(), client_->slot());
  return persistent.capacity() - persistent.used() + chunks * memory_->shape().chunk_bytes;
}

std::uint64_t training_memory::kept_bytes() const {
  std::lock_guard const lock{mutex_};
  return spaces_->needed_for_good() * memory_->shape().chunk_bytes;
}

bool training_memory::wait_capacity(std::uint64_t bytes, milliseconds patience) {
  auto const chunk = client_->view().shape().chunk_bytes;
  std::uint64_t own = 0;
  bool stands_back = false;
  bool away = false;
  {
    std::lock_guard const lock{mutex_};
    own = (spaces_->arena().chunks().size() + spaces_->unused()) * chunk;
    stands_back = waits_to_stand_back_ > 0;
    away = is_away();
    waits_to_stand_back_ -= stands_back ? 1 : 0;
  }
  if (stands_back) {  // what is free now another is about to take
    constexpr auto more_than_there_are = std::numeric_limits<std::uint32_t>::max();
    return client_->wait_grantable(more_than_there_are, steady_clock::now() + patience);
  }
  if (own >= bytes) {
    memhandover::withdraw_need(client_->mailbox());
    return true;
  }
  auto const missing = static_cast<std::uint32_t>((bytes - own - 1) / chunk + 1);
  bool const comes_first = !away && show_need(missing, patience);
  if (client_->wait_grantable(missing, steady_clock::now() + patience)) {
    return !comes_first || take_needed(missing);
  }
  std::lock_guard const lock{mutex_};
  spaces_->count_turn();
  spaces_->release_idle();
  // Two that wait, each with an arena of which the other would have enough, would wait for ever.
  if (cycle_.is_idle() && memhandover::waits_behind_another(client_->view(), client_->slot()) &&
      spaces_->release_unused()) {
    waits_to_stand_back_ = waits_that_let_another_begin;
    spaces_->publish();
  }
  return false;
}

}  // namespace sluice::step
