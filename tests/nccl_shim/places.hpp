/// Where the words of a cut may lie, for tests that are to hold wherever they do.
#pragma once

#include <memory>
#include <string>

#include "nccl_shim/cut_words.hpp"

namespace sluice::nccl_shim::testing {

/// What some ranks share. Processes that are forked share it, too.
class place {
 public:
  place() = default;
  place(place const&) = delete;
  place& operator=(place const&) = delete;
  virtual ~place() = default;

  /// One rank's way to it.
  [[nodiscard]] virtual std::unique_ptr<cut_words> words_of(unsigned rank, unsigned ranks) = 0;
  /// Returns when somebody sleeps who waits, where that can be told.
  virtual void await_sleeper() = 0;
  /// How many steps there are time for, of so many in memory.
  [[nodiscard]] virtual std::uint64_t some_of(std::uint64_t steps) const = 0;
};

enum class place_kind { memory, store };

/// A new one, in which nothing has happened yet.
[[nodiscard]] std::unique_ptr<place> make_place(place_kind kind);
[[nodiscard]] std::string name_of(place_kind kind);

}  // namespace sluice::nccl_shim::testing
