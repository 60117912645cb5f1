/// A training runtime that does what a test says. It has no pool: memory goes away only in what it
/// answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abi/step_api.h"

namespace sluice::testing {

struct script {
  // What it answers.
  int arena_state = SLUICE_ARENA_SOUND;  ///< until the micro-batch ends
  int commits_refused = 0;               ///< the next so many
  std::uint64_t survivors = 0;
  std::uint64_t reachable_bytes = 1000;
  std::uint64_t needed_bytes = 0;  ///< if not 0, the next plan is to wait for so many
  int waits_in_vain = 0;           ///< until there is memory; -1: for ever
  bool inherited = false;          ///< the process is a forked child of the one that shares

  // What it has been told.
  std::vector<std::string> calls;  ///< those that make up a micro-batch
  std::vector<std::uint32_t> planned;
  bool fixed = false;
  bool inside = false;  ///< the thread is in the arena
  std::uint32_t next = 0;
};

/// One for the process.
SLUICE_EXPORT script& the_script();

}  // namespace sluice::testing
