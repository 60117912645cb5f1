/// The one writer of a ledger: takes what clients release, grants what they ask for, and takes
/// memory for serving. What it does for a tenant, a training job or an engine, follows from its kind's traits
/// (client_kinds.hpp).
///
/// Used by the broker while there is no server and by the server otherwise. A new writer needs
/// nothing from its predecessor but the shared memory (layout.hpp says why).
///
/// Thread-safety: none; the owner serialises calls. No call blocks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

class ledger_writer {
 public:
  /// `view` must be writable and outlive this object.
  explicit ledger_writer(ledger_view const& view);

  /// The eventfd that wakes the client in `slot`; it is rung once, for what was said before it was
  /// known.
  void set_bell(std::uint32_t slot, unique_fd bell);
  /// Chunks that are never granted to tenants, so that cold starts find them free.
  void set_reserve(std::uint32_t chunks);
  /// Chunks that an acquisition under way is waiting for: nothing of what comes free is granted
  /// meanwhile.
  void set_wanted(std::uint32_t chunks);

  /// Reads all mailboxes: takes releases, answers requests. Returns how many chunks came free.
  std::uint32_t pump();

  /// Up to `count` free or dirty chunks become `serving` of `slot`: a contiguous run if there is
  /// one.
  [[nodiscard]] std::vector<std::uint32_t> take(std::uint32_t count, std::uint16_t slot);
  /// Exactly these chunks become `serving` of `slot` if all are free or dirty; else none, and false.
  [[nodiscard]] bool take_these(std::span<std::uint32_t const> chunks, std::uint16_t slot);
  /// Serving chunks become dirty. Chunks that are not serving are left alone.
  void give_back(std::span<std::uint32_t const> chunks);

  // --- what a dead server has left; epochs stay as they are

  /// Of `chunks` those that are serving of `slot` are from now on nobody's, but not free. A tenant
  /// that wants memory gets them, as does whoever calls `release_left`. Returns how many.
  std::uint32_t leave(std::span<std::uint32_t const> chunks, std::uint16_t slot);
  /// Of `chunks` those that are left become `slot`'s.
  void claim(std::span<std::uint32_t const> chunks, std::uint16_t slot);
  /// Up to `count` chunks that are left become dirty. Returns how many.
  std::uint32_t release_left(std::uint32_t count);
  [[nodiscard]] std::uint32_t left_chunks() const noexcept { return left_; }

  /// Asks the tenant in `slot` for `count` chunks; zero withdraws the last demand. Unless it `may_park` it gives what it has at once.
  /// Returns the demand's number, which appears in the mailbox's `demand_done` when it has been
  /// answered.
  std::uint32_t demand(std::uint32_t slot, std::uint32_t count, bool may_park = true);

  /// Lets the client in `slot` know that the server went without `count` chunks, since clients keep too many. It is
  /// not rung for it.
  void report_refused(std::uint32_t slot, std::uint32_t count);

  /// Everything that `slot` held becomes dirty, and its mailbox is emptied for the next client
  /// there. Call only when no process can reach the chunks any more. Returns how many chunks came
  /// free.
  std::uint32_t reclaim(std::uint32_t slot);

  /// Free or dirty.
  [[nodiscard]] std::uint32_t free_chunks() const noexcept { return free_; }
  /// Of those, what is not owed to tenants that are parked.
  [[nodiscard]] std::uint32_t available_chunks() const;

  /// Of what the job in `slot` needs (job_needs.hpp), what it would not be granted now.
  [[nodiscard]] std::uint32_t missing_for(std::uint32_t slot) const;

  /// Of what is owed now, what the tenant in `slot` is.
  [[nodiscard]] std::uint32_t owed_to(std::uint32_t slot) const;

  /// What a tenant that is parked is owed next (`client_report::owed_ns`).
  struct owed {
    std::uint32_t slot = 0;
    std::int64_t at_ns = 0;     ///< CLOCK_MONOTONIC; may be past
    std::uint32_t missing = 0;  ///< chunks that are owed by then, to all, and not free now
  };
  /// Of those for which something is missing the first; nothing if there are none.
  [[nodiscard]] std::optional<owed> next_owed() const;
  [[nodiscard]] std::uint32_t owned_by(owner who) const {
    return by_owner_.at(static_cast<std::size_t>(who));
  }
  [[nodiscard]] std::uint32_t held_by(std::uint32_t slot) const { return held_.at(slot); }

 private:
  void set(std::uint32_t chunk, owner who, std::uint16_t client, bool needs_scrub);
  void put(std::uint32_t chunk, chunk_state const& state);
  void count(chunk_state const& state, std::uint32_t by) noexcept;
  void make_dirty(std::uint32_t chunk);
  void change_hands(std::uint32_t chunk, std::uint16_t client);
  [[nodiscard]] bool tenant_waits() const;
  std::uint32_t take_mail(std::uint32_t slot);
  void answer_request(std::uint32_t slot);
  [[nodiscard]] std::uint32_t grant(std::uint32_t slot, std::uint32_t request);
  [[nodiscard]] std::uint32_t grantable() const noexcept;
  [[nodiscard]] std::optional<std::int64_t> owed_at(std::uint32_t slot, std::int64_t now_ns) const;
  [[nodiscard]] std::uint32_t owed_by(std::int64_t at_ns, std::int64_t now_ns) const;
  [[nodiscard]] std::uint32_t beside_parked(std::uint32_t chunks) const;
  [[nodiscard]] std::uint32_t beside_owed(std::int64_t now_ns) const;
  void publish_grantable();
  void ring(std::uint32_t slot);

  ledger_view const& view_;
  std::array<unique_fd, max_clients> bells_;
  // Counted from the ledger when this writer begins, and with every word that it writes: they need not outlive it.
  std::uint32_t free_ = 0;  ///< chunks whose owner is free or dirty
  std::uint32_t left_ = 0;  ///< chunks that a dead server has left
  std::array<std::uint32_t, owner_count> by_owner_{};
  std::array<std::uint32_t, max_clients> held_{};  ///< by slot
  std::uint32_t reserve_ = 0;
  std::uint32_t wanted_ = 0;
  /// Its `owed_ns` when it was granted what it was owed, which it may not have noticed yet.
  std::array<std::int64_t, max_clients> met_{};
};

}  // namespace sluice::memhandover
