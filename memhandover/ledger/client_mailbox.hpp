/// A tenant's own side of the ledger: asks for chunks, learns which it got, gives them up.
///
///   mailbox.ask(16, lifetime::revocable);   // then ring the writer's doorbell
///   // … until mailbox.answered(), or else mailbox.withdraw() …
///   auto chunks = mailbox.collect(16);      // at most 16, whatever happened to the writer
///   mailbox.release(chunks);                // then ring the doorbell
///
/// A writer may die while it grants, and its successor then grants once more; or it may have read a
/// request just before it is withdrawn. The ledger says in both cases what the client owns, which
/// may be more than it asked for: `collect` gives back what is too much, `resolve` what came late.
///
/// Thread-safety: none; the owner serialises calls. No call blocks or rings.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// Whether chunks are for memory that can be taken back at any time, or that stays.
enum class lifetime { revocable, lasting };

/// Whether what the server is waiting for is kept from a request. A commit goes before: the server may be
/// waiting for its end. `coming_back`: who is parked, for all that it needs to come back; it is granted that or nothing.
/// `beyond_reserve`: who has waited for long.
enum class precedence { after_demands, before_demands, coming_back, beyond_reserve };

class client_mailbox {
 public:
  /// The mailbox of `slot`, which this process is. `view` must outlive this object.
  client_mailbox(ledger_view const& view, std::uint32_t slot);

  /// Asks for `count` more chunks, in place of what was asked for before.
  void ask(std::uint32_t count, lifetime kind, precedence turn = precedence::after_demands);
  /// Whether the writer has answered the last `ask` or `withdraw`.
  [[nodiscard]] bool answered() const noexcept;
  /// Takes the last request back, so that a writer who comes late grants nothing that nobody
  /// expects.
  void withdraw();

  /// What has been granted since the last call, at most `most` chunks in ascending order; what is
  /// more is released at once. Of those returned, the ones that must be zeroed before use are
  /// appended to `needs_scrub` if it is given.
  [[nodiscard]] std::vector<std::uint32_t> collect(
      std::uint32_t most, std::vector<std::uint32_t>* needs_scrub = nullptr);
  /// Releases what a request that was withdrawn has brought all the same, once the writer has seen
  /// the withdrawal. Returns whether there was such.
  bool resolve();

  /// Posts that these chunks are used no more. Chunks that this client does not hold are left
  /// alone.
  void release(std::span<std::uint32_t const> chunks);
  /// Whether the writer has still to take what was released.
  [[nodiscard]] bool has_mail() const noexcept;

  /// While `true`, the writer rings whenever `grantable` grows.
  void set_waiting(bool waiting) noexcept;
  /// Chunks that the writer would grant at present. Whoever sets `waiting` and then finds too few
  /// is rung when there are more.
  [[nodiscard]] std::uint32_t grantable() const noexcept;

  /// Whether this client has the chunk: collected, and not released.
  [[nodiscard]] bool holds(std::uint32_t chunk) const { return held_.at(chunk); }

 private:
  [[nodiscard]] mailbox_header& mailbox() const noexcept { return view_.mailbox(slot_); }

  ledger_view const& view_;
  std::uint32_t slot_;
  /// For each chunk that is ours the epoch of its grant; of others the epoch of the last. A chunk
  /// that has been given up stands as ours in the ledger until the writer has read its mail, but
  /// with that same epoch.
  std::vector<std::uint32_t> known_epoch_;
  std::vector<bool> held_;
  bool withdrawn_ = false;  ///< the last request, and nobody has looked since what it brought
};

}  // namespace sluice::memhandover
