/// A training runtime that does what a test says. It has no pool: memory goes away only in what it
/// answers.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
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
  /// To the next calls of a name, each one or more numbers; before what stands above.
  std::map<std::string, std::deque<std::vector<std::int64_t>>> answers;

  // Whom it asks and says what happens; none may be there.
  std::function<void()> before_call;
  std::function<void()> micro_batch_begins;
  std::function<void()> memory_goes;
  std::function<void(bool)> drop_launches;  ///< of a deferred commit; false: not any more
  std::function<std::uint64_t()> count_survivors;

  // What it has been told.
  std::vector<std::string> calls;  ///< those that make up a micro-batch
  std::vector<std::string>
      sequence;  ///< all but questions, as cases of the specification have them
  std::vector<std::uint32_t> planned;
  bool fixed = false;
  bool inside = false;  ///< the thread is in the arena
  std::uint32_t next = 0;
  bool dropping = false;  ///< launches of a deferred commit

  /// The micro-batch that runs loses its memory.
  SLUICE_EXPORT void lose(int state);
};

/// One for the process.
SLUICE_EXPORT script& the_script();

}  // namespace sluice::testing
