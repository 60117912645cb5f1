/// A ledger and the plain model of one, put through the same random operations in step. The writer
/// dies between any two of its writes to the shared memory.
///
/// Thread-safety: none; forks, so that its process has one thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "memhandover/ledger/client_mailbox.hpp"
#include "memhandover/ledger/ledger_writer.hpp"
#include "plain_ledger.hpp"
#include "random_runs.hpp"

namespace sluice::memhandover::trials {

using plan = std::vector<plain_change>;

/// What is other in the ledger than in the model.
struct difference : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class ledger_in_step {
 public:
  ledger_in_step(std::uint64_t seed, std::uint32_t chunk_count);
  /// One operation, and a comparison of all there is. Throws `difference`.
  void step();
  /// Everybody ends: nothing may be left to anybody. Throws `difference`.
  void finish();
  [[nodiscard]] std::uint64_t deaths() const noexcept { return deaths_; }

 private:
  [[nodiscard]] std::uint32_t chunk_count() const { return view_.header().chunk_count; }
  [[nodiscard]] std::uint32_t some(std::uint64_t most) { return below(random_, most + 1); }

  void seat(std::uint32_t slot, client_kind kind);
  /// A training job or an engine, whichever comes.
  void seat_tenant(std::uint32_t slot);
  void set_status(std::uint32_t slot, client_status status);
  void replace_writer();
  /// The writer does this; or it dies on the way, which returns false.
  bool writes(plan const& planned, std::function<void()> const& what);
  /// What the dead writer has left must be the beginning of what it was about to do; its successor
  /// knows the shared memory alone.
  void survive(plan const& planned);
  void ask(std::uint32_t slot);
  void pump();
  void collect(std::uint32_t slot);
  void release(std::uint32_t slot);
  void take();
  void give_back();
  void set_limits();
  void demand(std::uint32_t slot);
  /// Mail is read again, as if its reader had died before it was counted; or posted again.
  void repeat_mail(std::uint32_t slot);
  /// A client ends, and another takes its slot.
  void end_client(std::uint32_t slot);
  [[nodiscard]] plain_chunk state(std::uint32_t chunk) const;
  void compare() const;
  void compare_holds(std::uint32_t slot) const;

  std::mt19937_64 random_;
  pool_files files_;
  ledger_view view_;
  plain_ledger model_;
  std::unique_ptr<ledger_writer> writer_;
  std::array<std::optional<client_mailbox>, plain_ledger::clients> mailboxes_;
  std::uint64_t deaths_ = 0;
};

}  // namespace sluice::memhandover::trials
