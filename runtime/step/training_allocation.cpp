/// Training's memory: allocating and freeing.

#include <spdlog/spdlog.h>

#include <algorithm>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/ledger/chunk_counts.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/job_needs.hpp"
#include "memhandover/ledger/pool_account.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::step {
namespace {

using memhandover::lifetime;
using memhandover::precedence;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// How long an allocation waits for the pool's writer. It answers within microseconds unless it has
/// just died; on a busy machine it takes seconds until there is another.
constexpr std::chrono::seconds writer_patience{10};
/// How long persistent memory is waited for that is on its way without a server.
constexpr std::chrono::seconds arrival_patience{2};
/// How long persistent memory that the server holds is waited for: the server's idle timeouts are
/// seconds. Afterwards the job hears that it is out of memory.
constexpr std::chrono::seconds persistent_patience{60};
/// How long it waits before it is granted what is kept for cold starts, too: these can have it back.
constexpr milliseconds reserve_patience{2000};
/// How long who waits for the pool does not look at what the job itself has, or may have before others.
constexpr milliseconds look_again{50};
/// Chunks that are mapped and zeroed while the lock is held: on a GPU 8 take some 0.3 ms.
constexpr std::uint32_t most_at_once = 8;

precedence turn_of_commit() {
  return training_memory::committing() ? precedence::before_demands : precedence::after_demands;
}

}  // namespace

std::byte* training_memory::allocate_arena(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  for (;;) {
    auto& arena = spaces_->arena();
    if (arena.is_lost()) {
      // Nothing that the device is given now is done. A refusal here would be taken for a shortage
      // by libraries that then settle for another kernel, with other rounding, and remember it.
      if (auto* const address = on_gpu() ? arena.allocate_unbacked(bytes) : nullptr) {
        return address;
      }
      throw error{
          error_kind::cancelled,
          "this micro-batch's memory has gone to the inference server; it will be run again"};
    }
    if (auto* const address = arena.allocate(bytes)) {
      peak_ = std::max(peak_, arena.ranges().used());
      return address;
    }
    if (fill(arena, bytes, turn_of_commit(), lock) || &spaces_->arena() != &arena ||
        arena.revoked()) {
      continue;
    }
    starved_bytes_ = starved_in(bytes);
    cycle_.starve();
    if (on_gpu() && cycle_.is_running()) {
      if (auto* const address = arena.allocate_unbacked(bytes)) {
        return address;
      }
    }
    throw error{error_kind::out_of_memory,
                "the step arena holds " + format_bytes(arena.ranges().used()) + " and cannot get " +
                    format_bytes(bytes) + " more from the pool at present: " + shortage()};
  }
}

/// The most that this micro-batch has been shown to be too large for, once `bytes` did not fit.
std::uint64_t training_memory::starved_in(std::size_t bytes) const {
  auto const shape = client_->view().shape();
  // What an earlier micro-batch has left may lie in the way; in an arena that began empty, all of
  // the pool would not have done.
  if (began_empty_ && spaces_->arena().chunks_needed(bytes) > spaces_->arena().room()) {
    return shape.bytes();
  }
  return (spaces_->arena().chunks().size() + spaces_->unused()) * shape.chunk_bytes;
}

std::byte* training_memory::allocate_persistent(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  return allocate_lasting(nullptr, bytes, lock);
}

training_memory::space_id training_memory::make_piece(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  await_all_there(lock);
  auto& piece = spaces_->begin_piece(bytes);
  try {
    (void)allocate_lasting(&piece, bytes, lock);
  } catch (...) {
    await_all_there(lock);
    spaces_->end_piece(piece);
    throw;
  }
  return reinterpret_cast<space_id>(&piece);
}

void training_memory::move_piece(space_id piece, std::byte* to) {
  std::unique_lock lock{mutex_};
  await_all_there(lock);
  reinterpret_cast<space*>(piece)->move_to(to);
}

void training_memory::free_piece(space_id piece) {
  std::unique_lock lock{mutex_};
  await_all_there(lock);
  spaces_->end_piece(*reinterpret_cast<space*>(piece));
}

/// From then on, as long as the lock is held, nothing is parked.
void training_memory::await_all_there(std::unique_lock<std::mutex>& lock) {
  if (parking_ != nullptr) {
    parking_->await_resident(lock);
  }
}

/// In persistent memory, or in a piece.
std::byte* training_memory::allocate_lasting(space* piece, std::size_t bytes,
                                             std::unique_lock<std::mutex>& lock) {
  std::optional<shortage_wait> wait;
  for (;;) {
    auto& where = piece != nullptr ? *piece : spaces_->persistent();
    if (auto* const address = piece != nullptr ? spaces_->allocate_piece(where, bytes)
                                               : spaces_->allocate_persistent(bytes)) {
      if (wait) {
        show_shortage(0);
      }
      return address;
    }
    auto const now = steady_clock::now();
    bool const was_away = is_away();
    auto const turn = !committing() && wait && now - wait->began > reserve_patience
                          ? precedence::beyond_reserve
                          : turn_of_commit();
    if (fill(where, bytes, turn, lock)) {
      if (wait && was_away) {
        wait->began += steady_clock::now() - now;  // it could have had nothing meanwhile
      }
      continue;
    }
    if (!wait) {
      wait = shortage_wait{steady_clock::now()};
    }
    if (!await_persistent(where, bytes, *wait, lock)) {
      show_shortage(0);
      throw error{error_kind::out_of_memory,
                  "cannot get " + format_bytes(bytes) + " of persistent memory: " + shortage()};
    }
  }
}

/// Gets hold of chunks for `bytes` of persistent memory where the pool has none to grant: what the
/// arena does not use itself, else what the server gives back in time, or what is on its way without a
/// server. True: it may be there. False: there will be none.
bool training_memory::await_persistent(space const& where, std::size_t bytes, shortage_wait& wait,
                                       std::unique_lock<std::mutex>& lock) {
  auto& stock = spaces_->stock();
  auto& arena = spaces_->arena();
  auto const needed = where.chunks_needed(bytes);
  if (needed > where.room()) {
    return false;
  }
  if (stock.missing(needed) > 0 && !arena.revoked()) {
    // All of them, so that those at the pool's end can be chosen.
    stock.add(arena.shrink(arena.idle_chunks()));
  }
  auto const wanted = stock.missing(needed);
  if (wanted == 0) {
    return true;
  }
  show_shortage(wanted);
  wait.for_server = wait.for_server || client_->view().header().serving_now.load() != 0;
  auto const until = wait.began + (wait.for_server ? persistent_patience : arrival_patience);
  bool const may_come = wait.for_server || is_on_its_way(wanted);
  // On a GPU torch's allocator has a lock, so that a commit waits for any thread that waits in it.
  bool const holds_up_commits = committing() || on_gpu();
  if (holds_up_commits) {
    cycle_.hold_up();
  }
  cycle_.notify();  // who waits for a commit's end would hold up what that waits for
  lock.unlock();
  bool const granted =
      may_come &&
      (client_->wait_grantable(wanted, std::min(until, steady_clock::now() + look_again)) ||
       steady_clock::now() < until);
  lock.lock();
  if (holds_up_commits) {
    cycle_.end_hold_up();
  }
  return granted;
}

/// Of an engine, which others wait for: the server makes room for it, as for one that comes back. Of a job those of lower priority do.
void training_memory::show_shortage(std::uint32_t chunks) noexcept {
  auto& mailbox = client_->mailbox();
  if (options_.kind != memhandover::client_kind::engine) {
    show_need(chunks, look_again);
    return;
  }
  auto const now_ns = memhandover::monotonic_ns();
  mailbox.short_chunks.store(chunks);
  mailbox.looked_ns.store(now_ns);
  mailbox.owed_ns.store(chunks == 0 ? 0 : now_ns);
}

/// Before jobs of lower priority, if there are any, they could give it, and a server would ask them: else it is false and nothing is
/// said, since they would go without for nothing. Whoever waits says it again and again.
bool training_memory::show_need(std::uint32_t chunks, milliseconds patience) noexcept {
  constexpr milliseconds until_said_again{1000};
  auto& mailbox = client_->mailbox();
  auto const& view = client_->view();
  auto const slot = client_->slot();
  bool const comes_first = chunks > 0 && view.header().serving_now.load() != 0 &&
                           memhandover::outranks_another(view, slot) &&
                           memhandover::could_have(view, slot, chunks);
  if (comes_first) {
    memhandover::show_need(mailbox, chunks, patience + until_said_again);
  } else {
    memhandover::withdraw_need(mailbox);
  }
  return comes_first;
}

/// What others were not granted for it, who may have it from now on. False: it was not all there any more.
bool training_memory::take_needed(std::uint32_t chunks) {
  client_->ask(chunks, memhandover::lifetime::revocable, steady_clock::now() + writer_patience);
  std::lock_guard const lock{mutex_};
  auto const before = spaces_->unused();
  spaces_->stock().collect();
  bool const has_all = spaces_->unused() >= before + chunks;
  if (has_all) {
    memhandover::withdraw_need(client_->mailbox());
  }
  spaces_->publish();
  return has_all;
}

/// Whether there is memory that comes free by itself: what a server or another job held that has gone, which is taken back as
/// soon as the last of its processes has ended, or what this job has given back and nobody has taken in yet.
bool training_memory::is_on_its_way(std::uint32_t wanted) const {
  auto const& view = client_->view();
  auto const counted = memhandover::count_chunks(view);
  for (std::uint32_t slot = 0; slot < memhandover::max_clients; ++slot) {
    if (counted.by_client.at(slot) > 0 &&
        memhandover::has_status(view.clients()[slot], memhandover::client_status::gone)) {
      return true;
    }
  }
  return counted.serving > 0 || memhandover::grantable_to(view, client_->slot()) >= wanted ||
         counted.by_client.at(client_->slot()) >
             spaces_->arena().chunks().size() + spaces_->unused() + spaces_->kept();
}

/// Maps chunks into `where`, so that `bytes` fit sooner or later; false if there are too few. The lock
/// is let go while the pool is asked.
bool training_memory::fill(space& where, std::size_t bytes, precedence turn,
                           std::unique_lock<std::mutex>& lock) {
  if (is_away()) {
    parking_->await_resident(lock);
    return true;  // where it has been, there may be something else now
  }
  auto& stock = spaces_->stock();
  bool const lasting = &where != &spaces_->arena();
  bool const grows = &where == &spaces_->persistent();
  // Meanwhile another thread may have begun the first micro-batch, or a demand may have parked the
  // job: then there is no room until it is back.
  auto const was_left = [&] { return is_away() || (grows && &spaces_->persistent() != &where); };
  answers_.let_pass(lock);
  if (was_left() || where.is_lost()) {
    return true;  // the latter is what the demand took
  }
  auto const needed = where.chunks_needed(bytes);
  if (needed > where.room()) {
    return false;
  }
  auto const kind = lasting ? lifetime::lasting : lifetime::revocable;
  if (stock.missing(needed) > 0) {
    answers_.await_stock(lock);
    if (was_left()) {
      return true;
    }
  }
  bool const chooses = lasting && on_gpu();  // which of the pool's ends
  auto const better = chooses ? stock.better_in_pool(needed) : 0;
  if (auto const asked = std::max(stock.missing(needed), better); asked > 0) {
    if (chooses && cycle_.is_idle()) {
      // For as many at the pool's other end: a job grows only where it uses all that it has.
      spaces_->release_idle_arena(asked);
    }
    auto const answered = answers_.count();
    lock.unlock();
    client_->ask(std::max(asked, options_.grow_by), kind, steady_clock::now() + writer_patience,
                 turn);
    lock.lock();
    stock.collect();
    if (was_left() || answers_.count() != answered) {
      return true;  // the demand may have had what was granted here: look again
    }
    if (!lasting && on_gpu()) {
      stock.add(spaces_->persistent().shrink(spaces_->short_for_good(needed)));
    }
    if (stock.missing(needed) > 0) {
      return false;
    }
    if (where.chunks_needed(bytes) != needed || where.revoked()) {
      return true;  // others were here meanwhile: look again
    }
  }
  // A few at a time, between which a demand gets its turn.
  stock.map_into(where, std::min(needed, most_at_once), kind);
  spaces_->publish();
  return true;
}

bool training_memory::is_away() const noexcept {
  return parking_ != nullptr && !parking_->is_resident();
}

bool training_memory::free(std::byte* address) {
  std::lock_guard const lock{mutex_};
  return spaces_->free(address);
}

std::string training_memory::shortage() const {
  auto const& view = client_->view();
  auto const slot = client_->slot();
  return memhandover::account_of(view, slot) +
         ". What would help: " + memhandover::remedies(view, slot) + '.';
}

}  // namespace sluice::step
