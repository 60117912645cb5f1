/// The processes of the benchmark `isolation`: training that goes on using what was taken from it,
/// a server that looks whether anybody else's bytes ever appear in its memory, and an engine that looks for them in its own.
///
/// Bytes tell who wrote them: each trainer has a range of values, the engine and the server others.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "memhandover/broker/broker_launch.hpp"

namespace sluice::bench {

/// What the processes count, in memory that all of them map.
struct isolation_counts {
  std::atomic<std::uint64_t>
      handovers;  ///< acquisitions that took memory from training or the engine
  std::atomic<std::uint64_t> checked_bytes;  ///< of the server's memory, looked at
  std::atomic<std::uint64_t> foreign_bytes;  ///< of the server's memory, not the server's: none
  std::atomic<std::uint64_t> granted_bytes;  ///< of training's memory, looked at when it came
  std::atomic<std::uint64_t> leaked_bytes;   ///< of these, neither zero nor its own: none
  std::atomic<std::uint64_t> probes;         ///< accesses to revoked addresses
  std::atomic<std::uint64_t> refused;  ///< of these, refused by the driver (a GPU refuses all)
  std::atomic<std::uint64_t> probes_that_saw;  ///< of these, that saw a byte not their own: none
  std::atomic<std::uint64_t> revocations;      ///< micro-batches whose memory was taken away
  std::atomic<std::uint64_t> server_errors;
  std::atomic<std::uint64_t>
      engine_granted_bytes;  ///< of the engine's memory, looked at when it came
  std::atomic<std::uint64_t> engine_leaked_bytes;   ///< of these, not zero: none
  std::atomic<std::uint64_t> engine_checked_bytes;  ///< of the engine's memory, looked at later
  std::atomic<std::uint64_t> engine_foreign_bytes;  ///< of these, not its own: none
  std::atomic<std::uint64_t> engine_probes;   ///< reads where the engine has no memory any more
  std::atomic<std::uint64_t> engine_refused;  ///< of these, refused: all
  std::atomic<std::uint64_t> engine_parked;   ///< demands that the engine has answered with memory
  std::atomic<std::uint64_t> faults;  ///< trainers whose kernel has touched a revoked address
  std::atomic<std::uint64_t> done;    ///< 1 when training shall end
  std::array<std::atomic<std::uint64_t>, 5> doing;  ///< `activity` of each role, as `role_names`
};

/// Trainers and the one that faults have the numbers 0 to 2.
constexpr std::array<char const*, 5> role_names{"trainer 0", "trainer 1", "faulting trainer",
                                                "engine", "server"};
constexpr int engine_number = 3;
constexpr int server_number = 4;

/// A role writes bytes from its first value on, so many different ones; nobody writes zero.
constexpr int values_of_a_role = 50;
constexpr std::uint8_t first_value(int number) {
  return static_cast<std::uint8_t>(1 + number * values_of_a_role);
}

struct isolation_options {
  memhandover::broker_options broker;
  std::uint64_t bytes = 0;  ///< trainer: of a micro-batch; engine: of all that it wants; server: of
                            ///< the largest acquisition
  std::uint64_t handovers = 0;  ///< server: how many there shall be
  std::uint64_t faults = 0;     ///< server: for how many faulting trainers it stays
  std::chrono::seconds longest{std::chrono::hours{24}};  ///< server: it ends then at the latest
  std::chrono::seconds patience{60};  ///< how long a role may get nowhere before it ends as failed
  int number = 0;                     ///< trainer: which of them it is, 0 to 2
  std::string counts;                 ///< a file of at least a page, for `isolation_counts`
};

[[nodiscard]] isolation_counts& map_counts(std::string const& file);

/// Trains until `done` is set and touches revoked addresses all the time.
int isolation_trainer(isolation_options const& options);

/// Trains until its memory has been taken away, then touches that from a kernel. Prints the
/// driver's results for sound memory of its own and for what was taken; nothing if `done` is set
/// before.
int isolation_fault(isolation_options const& options);

/// Grows, gives back and is parked until `done` is set, and looks at its memory and where it has none.
int isolation_engine(isolation_options const& options);

/// Takes and gives back memory; sets `done` when there have been enough handovers and faults, or
/// its time is over.
int isolation_server(isolation_options const& options);

}  // namespace sluice::bench
