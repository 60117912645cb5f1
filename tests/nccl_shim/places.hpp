/// Where the words of a cut may lie, for tests that are to hold wherever they do.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "nccl_shim/agreement/cut_words.hpp"

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

/// For suites of tests: all kinds that there are here, and what a case of one is called.
#ifdef SLUICE_WITH_TORCH
inline auto const everywhere = ::testing::Values(place_kind::memory, place_kind::store);
#else
inline auto const everywhere = ::testing::Values(place_kind::memory);
#endif
[[nodiscard]] inline std::string name_of_case(::testing::TestParamInfo<place_kind> const& of) {
  return name_of(of.param);
}

/// So long from now, as a deadline.
[[nodiscard]] inline std::int64_t in(std::chrono::nanoseconds span) {
  return (std::chrono::steady_clock::now().time_since_epoch() + span).count();
}

}  // namespace sluice::nccl_shim::testing
