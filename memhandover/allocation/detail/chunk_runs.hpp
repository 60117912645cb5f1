/// Runs of neighbouring chunks that may be taken.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sluice::memhandover::detail {

/// `count` neighbours from `first` on; none if `count` is 0.
struct chunk_run {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

/// All operations are linear in the number of runs.
class chunk_runs {
 public:
  /// `chunks` in ascending order.
  explicit chunk_runs(std::span<std::uint32_t const> chunks);

  [[nodiscard]] std::uint32_t longest() const noexcept;
  /// Up to `count` chunks of the shortest run that has so many, else all of the longest.
  [[nodiscard]] chunk_run take(std::uint32_t count);
  /// Up to `count` chunks of the shortest run.
  [[nodiscard]] chunk_run take_from_shortest(std::uint32_t count);
  /// Puts back what has been taken and is not needed.
  void put_back(chunk_run run);

  [[nodiscard]] std::span<chunk_run const> runs() const noexcept { return runs_; }

 private:
  [[nodiscard]] chunk_run take_from(std::vector<chunk_run>::iterator run, std::uint32_t count);

  std::vector<chunk_run> runs_;
};

}  // namespace sluice::memhandover::detail
