/// The step arena as torch sees it: what a micro-batch allocates lands in memory that can be taken
/// away as a whole.
#pragma once

#include <cstdint>

namespace sluice::detail {

/// Entered for the thread that runs the step alone, which runs backward too, and only while a
/// micro-batch runs.
///
/// The arena of CUDA lies in a library of its own (cuda_arena.cpp), since a program without a GPU
/// has no libtorch_cuda. Not thread-safe.
class arena {
 public:
  /// Of a micro-batch.
  struct needed_bytes {
    std::uint64_t now;
    std::uint64_t at_first;  ///< one of so many samples, from which one foresees what others need
  };

  virtual ~arena() = default;
  /// Before a micro-batch of so many samples.
  virtual void enter(std::int64_t samples) = 0;
  /// Nothing happens if it was not entered.
  virtual void leave() noexcept = 0;
  /// Whether anything made in the committed micro-batch lives on, as far as the runtime does not
  /// see it itself.
  [[nodiscard]] virtual bool outlived() = 0;
  /// What the micro-batch that ends has needed.
  [[nodiscard]] virtual needed_bytes needed() = 0;
  /// Forgets what torch has cached of it, since its memory may have been given away.
  virtual void release() = 0;
  /// The same of each step of this process: memory that has gone is gone for what any has cached.
  virtual void release_all() = 0;
  /// Waits until the device has done all that it was given.
  virtual void synchronize() = 0;
  virtual void empty_cache() = 0;
  /// Frees what libraries keep for the streams that they have seen.
  virtual void clear_workspaces() = 0;
};

}  // namespace sluice::detail
