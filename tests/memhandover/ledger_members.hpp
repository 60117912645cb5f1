/// Clients and servers that use one ledger at the same time, as processes or threads, and write
/// down in shared memory what each believes to have.
///
/// Each chunk stands for memory: whoever gets it puts his mark there, and whoever finds another's
/// mark knows that two had it at once. The marks are plain words, ordered by nothing but the
/// ledger, so that ThreadSanitizer looks for what the ledger does not order.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover::trials {

inline constexpr std::uint32_t member_chunks = 48;
inline constexpr std::uint32_t member_clients = 4;  ///< slots 0 … 3: two training jobs, two engines
inline constexpr std::uint32_t server_slot = member_clients;
/// What is in a slot, and so whose the chunks are that it has.
[[nodiscard]] client_traits const& kind_in(std::uint32_t slot);

/// run → clients_park → server_parks → run …; end from any.
enum class phase : std::uint32_t { run, clients_park, server_parks, end };

/// Shared by all; zero at first.
struct members_record {
  std::atomic<phase> now;
  std::atomic<std::uint64_t> operations;
  std::atomic<std::uint32_t> round;                       ///< of parking; set before the phase
  std::atomic<std::uint32_t> parked[member_clients + 1];  ///< by slot: in that round
  std::atomic<std::uint32_t> to_reclaim;  ///< slot + 1 of a dead client; the server takes it back
  std::atomic<std::uint32_t> server_leaves;
  std::uint64_t mark[member_chunks];  ///< plain: slot + 1 of whoever has the chunk, by his word
  std::atomic<std::uint32_t> used[member_chunks];
  std::atomic<std::uint32_t> failed;
  char failure[200];
};

/// What a member needs; constant while it runs.
struct members_place {
  members_record& record;
  ledger_view const& view;
  int doorbell;
  std::vector<int> bells;  ///< by client
  int progress;            ///< eventfd for whoever watches; rung now and then
};

/// Runs one member until the phase is `end` or somebody has failed; what it throws is the record's
/// failure.
void run_member(members_place const& place, std::function<void(members_place const&)> const& what);

/// A tenant: asks, sometimes without patience, releases, and answers demands.
void be_client(members_place const& place, std::uint32_t slot, std::uint64_t seed);
/// The server, and so the writer. Gives all back and returns when `server_leaves` is set.
void be_server(members_place const& place, std::uint64_t seed);
/// Watches every chunk's word: no owner without a new epoch, no epoch back, no forbidden step.
void be_observer(members_place const& place);

/// Everybody parks: says what in the ledger is not what its members believe, or nothing.
[[nodiscard]] std::string disagreement(members_place const& place);

}  // namespace sluice::memhandover::trials
