/// The training runtime (libsluice_runtime.so), opened by the name that `sluice run` gives; see
/// abi/step_api.h for the contract.
#pragma once

#include <memory>
#include <string>

#include "abi/step_api.h"
#include "runtime/torch/step/detail/arena.hpp"

namespace sluice::detail {

/// The functions of the C boundary that a step calls.
struct runtime_library {
  decltype(&sluice_last_error) last_error;
  decltype(&sluice_join_host) join_host;
  decltype(&sluice_backend) backend;
  decltype(&sluice_begin) begin;
  decltype(&sluice_arena_state) arena_state;
  decltype(&sluice_commit_begin) commit_begin;
  decltype(&sluice_commit_end) commit_end;
  decltype(&sluice_commit_resolve) commit_resolve;
  decltype(&sluice_commit_made) commit_made;
  decltype(&sluice_discard) discard;
  decltype(&sluice_discarded_ns) discarded_ns;
  decltype(&sluice_survivors) survivors;
  decltype(&sluice_enter) enter;
  decltype(&sluice_arena_peak) arena_peak;
  decltype(&sluice_pool_bytes) pool_bytes;
  decltype(&sluice_reachable_bytes) reachable_bytes;
  decltype(&sluice_shortage) shortage;
  decltype(&sluice_wait_memory) wait_memory;
  decltype(&sluice_plan_start) plan_start;
  decltype(&sluice_plan_next) plan_next;
  decltype(&sluice_plan_committed) plan_committed;
  decltype(&sluice_plan_discarded) plan_discarded;

  /// Whether this process is a forked child of the one that shares.
  [[nodiscard]] bool is_inherited() const;
  [[nodiscard]] bool sound() const { return arena_state() == SLUICE_ARENA_SOUND; }
  /// Who holds the pool's memory, and what would leave this job more of it.
  [[nodiscard]] std::string shortage_text() const { return std::string{"sluice: "} + shortage(); }
};

/// The runtime if this process shares the pool; null for plain libtorch, after a word on standard
/// error if sharing was wanted but is not possible. Thread-safe.
[[nodiscard]] runtime_library const* attach(bool uses_cuda);

/// The arena of a process that shares.
[[nodiscard]] std::unique_ptr<arena> make_arena(runtime_library const& runtime, bool uses_cuda);

}  // namespace sluice::detail
