/// The memory of a training job as spaces that chunks are mapped into, and the chunks that are in none.
///
///   persistent   what lasts. *Sparse* is persistent memory of the set-up: what lasts stays in it until it is freed,
///                and everything new lies elsewhere
///   arena        what the micro-batch allocates. Put away when it was
///                  revoked, or given out without memory  ──► retired: its addresses are not used again while
///                                                            an allocation in it lives
///                  survived by what was allocated in it  ──► promoted: the chunks that hold it stay mapped, and
///                                                            are never a victim
///   pieces       what the program maps itself, each whole or nowhere (cuMemCreate)
///   stock        chunks without a mapping
///   unmapping    on CUDA, chunks of a revoked arena that stay the job's: mapped until `finish_unmapping`
///
/// Putting the arena away begins another, with the next generation. What nothing lives in any more goes: its chunks
/// into the stock, or to the pool where the arena is not to have them.
///
///   spaces.stock().collect();
///   spaces.stock().map_into(spaces.arena(), 4, lifetime::revocable);
///   auto* const block = spaces.arena().allocate(bytes);
///   spaces.promote_arena();   // it outlives its micro-batch
///   spaces.free(block);       // and now its chunks are in the stock again
///
/// Nothing here waits, and nothing knows of micro-batches' states or of demands.
///
/// Thread-safety: none but for `generation`; the owner locks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "memhandover/allocation/chunk_space.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/ledger/chunk_history.hpp"
#include "runtime/step/chunk_stock.hpp"

namespace sluice::step {

class training_spaces {
 public:
  using space = memhandover::chunk_space;
  using space_list = std::vector<std::unique_ptr<space>>;

  struct options {
    std::size_t alignment = 64;  ///< of every allocation
    space::backing persistent = space::backing::pool;
    bool on_gpu = false;
  };

  /// Arena and persistent memory, both empty. `client`, `memory` and `history`, which the spaces record in, must
  /// outlive this object.
  training_spaces(memhandover::tenant_client& client, memhandover::device_memory& memory,
                  memhandover::chunk_history& history, options how);

  [[nodiscard]] space& arena() noexcept { return *arena_; }
  [[nodiscard]] space const& arena() const noexcept { return *arena_; }
  [[nodiscard]] space& persistent() noexcept { return *persistent_; }
  [[nodiscard]] space const& persistent() const noexcept { return *persistent_; }
  [[nodiscard]] chunk_stock& stock() noexcept { return stock_; }
  [[nodiscard]] chunk_stock const& stock() const noexcept { return stock_; }
  [[nodiscard]] space_list const& promoted() const noexcept { return promoted_; }
  /// Counts the arenas. From any thread.
  [[nodiscard]] std::uint64_t generation() const noexcept {
    return generation_.load(std::memory_order_acquire);
  }

  // --- which memory an address is of
  [[nodiscard]] bool owns(void const* address) const;
  /// Whether it lies in an arena that has been put away.
  [[nodiscard]] bool is_former(void const* address) const;
  /// The allocation of persistent memory that it lies in, as base and size; {null, 0} if none.
  [[nodiscard]] std::pair<std::byte*, std::size_t> persistent_range(std::byte* address) const;

  // --- allocations
  /// Null if it does not fit into what is mapped.
  [[nodiscard]] std::byte* allocate_persistent(std::size_t bytes);
  /// Whether `address` was an allocation of ours; it is free afterwards.
  bool free(std::byte* address);

  // --- pieces; none while memory is frozen
  /// An empty one for `bytes`, to be filled; and its end, whatever is in it. Its chunks go to the pool.
  [[nodiscard]] space& begin_piece(std::size_t bytes);
  void end_piece(space& piece);
  /// The same as `allocate_persistent`, of all of it.
  [[nodiscard]] std::byte* allocate_piece(space& piece, std::size_t bytes);

  // --- how much there is, in chunks
  /// Ours, which hold nothing.
  [[nodiscard]] std::uint32_t unused() const noexcept {
    return stock_.size() + static_cast<std::uint32_t>(unmapping_.size());
  }
  /// How many `take_idle` would find.
  [[nodiscard]] std::uint32_t idle() const;
  /// What is mapped for other than the arena.
  [[nodiscard]] std::uint32_t kept() const;
  /// Of that what no demand gets: without what persistent memory does not use.
  [[nodiscard]] std::uint32_t needed_for_good() const;
  /// How many chunks short of its next `needed` ones the arena would be even if the server gave
  /// everything back.
  [[nodiscard]] std::uint32_t short_for_good(std::uint32_t needed) const;
  /// Allocations that live in retired arenas.
  [[nodiscard]] std::uint64_t survivors() const;
  /// Shows it in the mailbox: all of it; what no demand gets; what of persistent memory nothing uses that is kept all
  /// the same.
  void publish();
  void publish_kept();
  void publish_stranded() const;

  // --- micro-batches
  /// Puts the arena away and begins another. If it throws, nothing is lost, and the arena is what it was.
  void retire_arena();
  void promote_arena();
  /// Before a micro-batch: gives back what nothing lives in any more, and exchanges chunks of persistent memory that lie
  /// badly.
  void tidy();
  /// A commit, or a wait for memory that was in vain: by these `release_idle` counts time.
  void count_turn() noexcept { ++turns_; }
  /// Persistent chunks that nothing has needed for a while go: on the host all that are idle, because
  /// blocks come and go there one by one, and everywhere those that are idle before the first
  /// micro-batch, because they served to set the job up.
  void release_idle();
  /// To the pool: up to so many chunks that the arena does not use; and all that nothing uses but persistent memory,
  /// where that is false if there are none.
  void release_idle_arena(std::uint32_t count);
  [[nodiscard]] bool release_unused();

  // --- for parking
  /// Spaces of what lasts and may be parked; none ends while they are frozen. On the host what has outlived a micro-batch
  /// stays: it lies in the pool's own pages.
  [[nodiscard]] std::vector<space*> lasting() const;
  /// While it is true no chunk of what lasts is unmapped but by whoever parks it.
  void set_frozen(bool frozen) noexcept { frozen_ = frozen; }
  /// Host copies could take so many chunks of that.
  void set_parkable(std::uint32_t chunks);

  // --- for demands
  /// `count` chunks of `from`, or all. It may be more, where only that makes the server find neighbours, among these,
  /// those that it has been `given` and those that nobody has.
  [[nodiscard]] std::vector<std::uint32_t> choose(std::uint32_t count,
                                                  std::vector<std::uint32_t>& from,
                                                  std::vector<std::uint32_t> const& given) const;
  /// Moves such a choice of the stock to `given`.
  void give_stock(std::uint32_t count, std::vector<std::uint32_t>& given);
  /// Moves chunks that nothing uses to `given` until it has `count`: those without a mapping, then the idle ends of
  /// arena and persistent memory.
  void take_idle(std::uint32_t count, std::vector<std::uint32_t>& given);
  /// What can be taken although it is in use: the arena, and on CUDA what a micro-batch that got too
  /// little memory has left, until the last of its tensors is freed.
  [[nodiscard]] std::vector<space*> revocable() const;
  /// On CUDA, when what is revocable has been revoked: what stays ours of it and of the stock, until it has been
  /// unmapped.
  void keep_until_unmapped(std::vector<std::uint32_t> kept) noexcept;
  [[nodiscard]] bool unmapping() const noexcept { return !unmapping_.empty(); }
  /// Whether anything that was revoked is still mapped, ours or given away.
  [[nodiscard]] bool awaits_unmapping() const noexcept;
  /// Unmaps what has been revoked; what stayed ours of it is in the stock then. False if there was none.
  bool finish_unmapping() noexcept;
  void drop_retired() noexcept { drop_empty(retired_); }

 private:
  [[nodiscard]] std::unique_ptr<space> new_arena(std::uint64_t generation);
  [[nodiscard]] std::unique_ptr<space> new_persistent();
  void replace_arena(space_list& old);
  void drop_empty(space_list& spaces) noexcept;
  void leave_sparse();
  void exchange_idle();
  void give_back_unused(space& of, space_list const& list) noexcept;
  [[nodiscard]] bool may_be_parked(space const& one) const noexcept {
    return how_.on_gpu || one.holds_private_pages();
  }
  void release_lasting(std::vector<std::uint32_t> const& chunks);
  /// Beside the persistent range, those whose chunks no demand gets, but by parking.
  [[nodiscard]] std::array<space_list const*, 3> lists_of_kept() const noexcept {
    return {&sparse_, &promoted_, &pieces_};
  }

  memhandover::tenant_client& client_;
  memhandover::device_memory& memory_;
  memhandover::chunk_history& history_;
  options how_;
  std::atomic<std::uint64_t> generation_{1};
  chunk_stock stock_;
  std::vector<std::uint32_t> unmapping_;
  space_list sparse_;
  space_list promoted_;
  space_list retired_;
  space_list pieces_;
  std::unique_ptr<space> persistent_;
  std::unique_ptr<space> arena_;
  std::uint64_t turns_ = 0;
  /// Turns when idle persistent chunks go again; 0: none have gone yet.
  std::uint64_t idle_go_at_ = 0;
  bool frozen_ = false;
  std::uint32_t parkable_ = 0;
  std::uint32_t least_idle_ = 0;  ///< persistent chunks, since that was last done
};

}  // namespace sluice::step
