/// How a pool's server gets chunks: what is free, then what a dead server left, then what tenants give up whose kind
/// is asked (client_kinds.hpp), in the order of demand_order.hpp: training first, and of that jobs of the lowest priority.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/client/host_copy_share.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/demand_order.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "memhandover/ledger/ledger_writer.hpp"

namespace sluice::memhandover::detail {

class acquisition {
 public:
  using foresight = chunk_pool::foresight;

  /// What the server shares with this object.
  struct parts {
    ledger_view const& view;
    std::uint32_t slot;                    ///< the server's
    std::mutex& mutex;                     ///< guards the writer and the reserve
    std::condition_variable& mail;         ///< notified when the writer has taken mail
    std::optional<ledger_writer>& writer;  ///< has a value
    std::uint32_t const& reserve;          ///< chunks that are to be free besides
    std::uint32_t const& waiting;          ///< for this acquisition's end
    bool demands_from_engines;             ///< when training has given all that it can
    host_copy_share* copies = nullptr;     ///< where the pool has some
  };

  explicit acquisition(parts const& of);

  /// Chunks of other live clients that no acquisition gets; with the mutex.
  [[nodiscard]] std::uint32_t kept_for_good() const;

  /// For how long the tenant in `slot` stays when it has come back, by what it has taken so far to be parked.
  [[nodiscard]] std::chrono::milliseconds stay_of(std::uint32_t slot) const;

  /// Chunks for `bytes`, the server's from then on, neighbours if possible; adds what it took to `report`.
  /// One call at a time, without the mutex. `meanwhile` as in `chunk_pool::acquire_chunks`. Throws as
  /// `serving_pool::acquire`.
  [[nodiscard]] std::vector<std::uint32_t> obtain(std::uint64_t bytes, urgency const& how,
                                                  handover_report& report,
                                                  foresight const& meanwhile);

  /// Demands what is owed now and not free: what an engine is owed from jobs, and then from other engines; what a job is owed
  /// from engines alone. Otherwise as `obtain`, but that what comes free is kept for who is owed it, and that too little is no
  /// error.
  void gather_owed(std::chrono::steady_clock::time_point deadline, handover_report& report);

  /// Whether a job needs memory (job_needs.hpp) that those of lower priority could give; with the mutex.
  [[nodiscard]] bool is_needed() const;
  /// Demands that from them, as what is spare, and so without parking anybody; too little is no error. Returns whether it has come.
  bool gather_needed(urgency const& how, handover_report& report);

 private:
  struct wish {
    std::uint32_t chunks = 0;
    urgency const& how;
    foresight const& meanwhile;
    std::vector<std::uint32_t>& foreseen;    ///< what `meanwhile` was called with last
    std::function<std::uint32_t()> missing;  ///< chunks, with the mutex
    bool refills = true;                     ///< the reserve, too
  };

  /// A demand that took what micro-batches were using, and was not met all the same.
  struct futile_demand {
    std::uint32_t chunks = 0;
    std::chrono::steady_clock::time_point until;  ///< for so long none of that size is made
    std::chrono::milliseconds pause{};
  };

  /// Who has been asked in vain.
  struct spent {
    std::vector<std::uint32_t> of_all;   ///< slots
    std::vector<std::uint32_t> at_once;  ///< for what goes without parking them

    void note(next_asked const& asked);
    void add(std::vector<std::uint32_t> const& slots);
  };

  [[nodiscard]] std::function<void()> waker() const;
  [[nodiscard]] std::uint32_t reachable() const;
  void refuse_spare(std::uint32_t count) const;
  [[nodiscard]] bool is_called_off(urgency const& how) const;
  void refuse_hopeless(std::uint32_t count);
  void refuse_until_parkable(std::uint32_t count) const;
  void refuse_while_owed(std::uint32_t count) const;
  void refuse_again(std::uint32_t count) const;
  void note_futile(std::uint32_t count, handover_report const& report);
  void demand_from(next_asked const& next, wish const& wanted, std::unique_lock<std::mutex>& lock,
                   handover_report& report);
  [[nodiscard]] bool has_to_park(std::uint32_t slot, std::uint32_t demanded) const;
  [[nodiscard]] std::vector<std::uint32_t> foresee(std::uint32_t slot, std::uint32_t number,
                                                   std::uint32_t demanded,
                                                   std::uint32_t wanted) const;
  void add_phases(std::uint32_t slot, std::int64_t start_ns, handover_report& report) const;
  void add_parking(std::uint32_t slot, std::int64_t start_ns, bool answered,
                   handover_report& report) const;
  [[nodiscard]] std::optional<turn_in_handovers> turn_of(std::uint32_t slot) const;
  [[nodiscard]] std::uint32_t kept_by(std::uint32_t slot) const;
  [[nodiscard]] std::uint32_t spare_of(std::uint32_t slot) const;
  [[nodiscard]] giveable giveable_by(std::uint32_t slot, bool may_stay = false) const;
  [[nodiscard]] job_standing standing_in(std::uint32_t slot) const;
  [[nodiscard]] std::uint32_t most_demanded_of(std::uint32_t slot) const;
  [[nodiscard]] std::optional<next_asked> next_to_ask(spent const& asked, std::uint32_t missing,
                                                      bool is_spare = false) const;
  [[nodiscard]] std::string minimums() const;
  [[nodiscard]] std::vector<std::uint32_t> not_to_ask_for_owed() const;
  [[nodiscard]] std::vector<std::uint32_t> not_below(std::uint32_t needing) const;
  [[nodiscard]] bool dying_hold() const;
  [[nodiscard]] std::string room_for_copies() const;
  [[nodiscard]] std::string disks_that_failed() const;
  [[nodiscard]] std::string holders() const;
  [[nodiscard]] std::string name_of_client(std::uint32_t slot) const;
  template <typename Chunks>
  [[nodiscard]] std::string who(char const* does, Chunks const& chunks_of) const;

  parts of_;
  bool stays_awake_;
  futile_demand futile_;
};

/// Writes a handover into the ledger's list of recent ones, for `sluice pool show`.
void record_handover(ledger_header& header, handover_report const& report);

}  // namespace sluice::memhandover::detail
