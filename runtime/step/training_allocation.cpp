/// Training's memory: allocating and freeing.

#include <spdlog/spdlog.h>

#include <algorithm>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/ledger/pool_account.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::step {
namespace {

using memhandover::lifetime;
using memhandover::precedence;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// How long an allocation waits for the pool's writer. It answers within microseconds unless it has
/// just died; what is on its way then, too.
constexpr milliseconds grant_patience{2000};
/// How long persistent memory that the server holds is waited for: the server's idle timeouts are
/// seconds. Afterwards the job hears that it is out of memory.
constexpr std::chrono::seconds persistent_patience{60};
/// How long an allocation lets a demand go first.
constexpr milliseconds demand_patience{2000};
/// How long who waits for the pool does not look at what the job itself has, or may have before others.
constexpr milliseconds look_again{50};
/// Chunks that are mapped and zeroed while the lock is held: on a GPU 8 take some 0.3 ms.
constexpr std::uint32_t most_at_once = 8;

}  // namespace

std::byte* training_memory::allocate_arena(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  for (;;) {
    if (arena_->is_lost()) {
      // Nothing that the device is given now is done. A refusal here would be taken for a shortage
      // by libraries that then settle for another kernel, with other rounding, and remember it.
      if (auto* const address =
              options_.gate != nullptr ? arena_->allocate_unbacked(bytes) : nullptr) {
        return address;
      }
      throw error{
          error_kind::cancelled,
          "this micro-batch's memory has gone to the inference server; it will be run again"};
    }
    if (auto* const address = arena_->allocate(bytes)) {
      peak_ = std::max(peak_, arena_->ranges().used());
      return address;
    }
    auto* const before = arena_.get();
    if (fill(*arena_, bytes, lock) || arena_.get() != before || arena_->revoked()) {
      continue;
    }
    starved_bytes_ = starved_in(bytes);
    state_.store(arena_state::starved, std::memory_order_release);
    lost_ns_ = lost_ns_.value_or(memhandover::monotonic_ns());
    if (options_.gate != nullptr && phase_ == phase::running) {
      abort_launches();
      if (auto* const address = arena_->allocate_unbacked(bytes)) {
        return address;
      }
    } else if (phase_ == phase::running) {
      notify_others();
    }
    throw error{error_kind::out_of_memory, "the step arena holds " +
                                               format_bytes(arena_->ranges().used()) +
                                               " and cannot get " + format_bytes(bytes) +
                                               " more from the pool at present: " + shortage()};
  }
}

/// The most that this micro-batch has been shown to be too large for, once `bytes` did not fit.
std::uint64_t training_memory::starved_in(std::size_t bytes) const {
  auto const shape = client_->view().shape();
  // What an earlier micro-batch has left may lie in the way; in an arena that began empty, all of
  // the pool would not have done.
  if (began_empty_ && arena_->chunks_needed(bytes) > arena_->room()) {
    return shape.bytes();
  }
  return (arena_->chunks().size() + unused()) * shape.chunk_bytes;
}

std::byte* training_memory::allocate_persistent(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  auto const deadline = steady_clock::now() + persistent_patience;
  bool waits = false;
  for (;;) {
    if (auto* const address = persistent_->allocate(bytes)) {
      least_idle_ = std::min(least_idle_, persistent_->idle_chunks());
      publish_kept();
      return address;
    }
    if (!fill(*persistent_, bytes, lock) && !await_persistent(bytes, deadline, waits, lock)) {
      throw error{error_kind::out_of_memory,
                  "cannot get " + format_bytes(bytes) + " of persistent memory: " + shortage()};
    }
  }
}

/// Gets hold of chunks for `bytes` of persistent memory where the pool has none to grant: what the
/// arena does not use itself, else what the server gives back before the deadline, or what is on its way
/// without a server. True: it may be there. False: there will be none. `waits`, false at first: there
/// was a server to wait for.
bool training_memory::await_persistent(std::size_t bytes, steady_clock::time_point deadline,
                                       bool& waits, std::unique_lock<std::mutex>& lock) {
  auto const needed = persistent_->chunks_needed(bytes);
  if (needed > persistent_->room()) {
    return false;
  }
  if (stock_->missing(needed) > 0 && !arena_->revoked()) {
    // All of them, so that those at the pool's end can be chosen.
    stock_->add(arena_->shrink(arena_->idle_chunks()));
  }
  auto const wanted = stock_->missing(needed);
  if (wanted == 0) {
    return true;
  }
  waits = waits || client_->view().header().serving_now.load() != 0;
  auto const until = waits ? deadline : deadline - persistent_patience + grant_patience;
  bool const may_come = waits || is_on_its_way(wanted);
  // On a GPU torch's allocator has a lock, so that a commit waits for any thread that waits in it.
  std::uint32_t const holds_up_commits = committing() || options_.gate != nullptr ? 1 : 0;
  holding_up_commits_ += holds_up_commits;
  commit_changed_.notify_all();  // who waits for a commit's end would hold up what that waits for
  lock.unlock();
  bool const granted =
      may_come &&
      (client_->wait_grantable(wanted, std::min(until, steady_clock::now() + look_again)) ||
       steady_clock::now() < until);
  lock.lock();
  holding_up_commits_ -= holds_up_commits;
  return granted;
}

/// Whether there is memory that comes free by itself: what a server held that has gone, which the broker takes back as soon
/// as its process has ended, or what this job has given back and nobody has taken in yet.
bool training_memory::is_on_its_way(std::uint32_t wanted) const {
  auto const& view = client_->view();
  std::size_t own = 0;
  for (std::uint32_t chunk = 0; chunk < view.shape().chunk_count; ++chunk) {
    auto const state = view.chunk(chunk);
    if (state.who == memhandover::owner::serving) {
      return true;
    }
    own += state.who == memhandover::owner::training && state.client == client_->slot() ? 1 : 0;
  }
  return view.header().grantable.load() >= wanted ||
         own > arena_->chunks().size() + unused() + chunks_kept();
}

/// Waits until the control thread has answered what it is being asked, unless that waits for a commit, which may need
/// what the caller holds.
void training_memory::let_demands_pass(std::unique_lock<std::mutex>& lock) {
  // On the host the demand may be waiting for the operator that allocates here.
  if (!committing() && options_.gate != nullptr) {
    (void)demand_answered_.wait_for(lock, demand_patience, [this] {
      return demands_waiting_ == 0 || phase_ == phase::committing;
    });
  }
}

/// Maps chunks into `where`, so that `bytes` fit sooner or later; false if there are too few. The lock
/// is let go while the pool is asked.
bool training_memory::fill(space& where, std::size_t bytes, std::unique_lock<std::mutex>& lock) {
  bool const lasting = &where == persistent_.get();
  // Meanwhile another thread may have begun the first micro-batch.
  auto const was_left = [&] { return lasting && persistent_.get() != &where; };
  let_demands_pass(lock);
  if (was_left() || where.is_lost()) {
    return true;  // the latter is what the demand took
  }
  auto const needed = where.chunks_needed(bytes);
  if (needed > where.room()) {
    return false;
  }
  auto const kind = lasting ? lifetime::lasting : lifetime::revocable;
  if (stock_->missing(needed) > 0) {
    unmapped_.wait(lock, [this] { return unmapping_.empty(); });
    if (was_left()) {
      return true;
    }
  }
  bool const chooses = lasting && options_.gate != nullptr;  // which of the pool's ends
  auto const better = chooses ? stock_->better_in_pool(needed) : 0;
  if (auto const asked = std::max(stock_->missing(needed), better); asked > 0) {
    if (chooses) {
      give_back_idle_arena(asked);
    }
    auto const answered = demands_answered_;
    lock.unlock();
    client_->ask(std::max(asked, options_.grow_by), kind, steady_clock::now() + grant_patience,
                 committing() ? precedence::before_demands : precedence::after_demands);
    lock.lock();
    stock_->collect();
    if (was_left() || demands_answered_ != answered) {
      return true;  // the demand may have had what was granted here: look again
    }
    if (!lasting && options_.gate != nullptr) {
      stock_->add(persistent_->shrink(short_for_good(needed)));
    }
    if (stock_->missing(needed) > 0) {
      return false;
    }
    if (where.chunks_needed(bytes) != needed || where.revoked()) {
      return true;  // others were here meanwhile: look again
    }
  }
  // A few at a time, between which a demand gets its turn.
  stock_->map_into(where, std::min(needed, most_at_once), kind);
  publish();
  return true;
}

/// Up to so many chunks that the arena does not use between micro-batches, for as many at the pool's other
/// end: a job grows only where it uses all that it has.
void training_memory::give_back_idle_arena(std::uint32_t count) {
  if (phase_ == phase::idle && !arena_->is_lost()) {
    client_->release(arena_->shrink(std::min(count, arena_->idle_chunks())));
  }
}

/// How many chunks short of its next `needed` ones the arena would be even if the server gave
/// everything back.
std::uint32_t training_memory::short_for_good(std::uint32_t needed) const {
  auto const wanted = arena_->chunks().size() + needed + chunks_kept();
  auto const total = memory_->shape().chunk_count;
  return static_cast<std::uint32_t>(wanted - std::min<std::size_t>(wanted, total));
}

std::uint32_t training_memory::chunks_kept() const {
  auto kept = persistent_->mapped_chunks();
  for (auto const* list : {&promoted_, &sparse_}) {
    for (auto const& old : *list) {
      kept += old->mapped_chunks();
    }
  }
  return kept;
}

std::uint64_t training_memory::reachable_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const shape = memory_->shape();
  auto const needed_for_good = chunks_kept() - persistent_->idle_chunks();
  return (shape.chunk_count - std::min(shape.chunk_count, needed_for_good)) * shape.chunk_bytes;
}

bool training_memory::free(std::byte* address) {
  std::lock_guard const lock{mutex_};
  if (arena_->contains(address)) {
    return arena_->free(address) > 0;
  }
  if (persistent_->contains(address)) {
    bool const freed = persistent_->free(address) > 0;  // what is idle then, `begin` sees to
    publish_kept();
    return freed;
  }
  for (auto* list : {&retired_, &promoted_, &sparse_}) {
    for (auto& candidate : *list) {
      if (candidate->contains(address)) {
        bool const freed = candidate->free(address) > 0;
        give_back_unused(*candidate, *list);
        drop_empty(*list);
        publish();
        return freed;
      }
    }
  }
  return false;
}

/// What nothing uses any more of a former space; later, where that takes more memory than there is.
void training_memory::give_back_unused(space& of,
                                       std::vector<std::unique_ptr<space>> const& list) noexcept {
  try {
    if (&list == &sparse_) {
      release_chunks(of.close());
    } else if (of.closed()) {
      stock_->add(of.close());
    }
  } catch (std::exception const& why) {
    spdlog::error("chunks that nothing uses stay mapped reason=\"{}\"", why.what());
  }
}

bool training_memory::owns(void const* address) const {
  std::lock_guard const lock{mutex_};
  auto holds = [address](std::unique_ptr<space> const& candidate) {
    return candidate->contains(address);
  };
  return holds(arena_) || holds(persistent_) ||
         std::any_of(retired_.begin(), retired_.end(), holds) ||
         std::any_of(promoted_.begin(), promoted_.end(), holds) ||
         std::any_of(sparse_.begin(), sparse_.end(), holds);
}

bool training_memory::is_former(void const* address) const {
  std::lock_guard const lock{mutex_};
  auto const holds = [address](auto const& candidate) { return candidate->contains(address); };
  return std::any_of(promoted_.begin(), promoted_.end(), holds) ||
         std::any_of(retired_.begin(), retired_.end(), holds);
}

std::pair<std::byte*, std::size_t> training_memory::persistent_range(std::byte* address) const {
  std::lock_guard const lock{mutex_};
  auto const* lies_in = persistent_.get();
  for (auto const& old : sparse_) {
    lies_in = old->contains(address) ? old.get() : lies_in;
  }
  if (!lies_in->contains(address)) {
    return {nullptr, 0};
  }
  auto const range =
      lies_in->ranges().containing(static_cast<std::size_t>(address - lies_in->base()));
  return range ? std::pair{lies_in->base() + range->first, range->second}
               : std::pair{static_cast<std::byte*>(nullptr), std::size_t{0}};
}

std::string training_memory::shortage() const {
  auto const& view = client_->view();
  auto const slot = client_->slot();
  return memhandover::account_of(view, slot) +
         ". What would help: " + memhandover::remedies(view, slot) + '.';
}

std::uint64_t training_memory::persistent_free_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const idle = arena_->revoked() ? 0 : arena_->idle_chunks();
  auto const chunks = unused() + idle + client_->view().header().grantable.load();
  return persistent_->ranges().capacity() - persistent_->ranges().used() +
         chunks * memory_->shape().chunk_bytes;
}

}  // namespace sluice::step
