/// What lives in the pool's pages, for the child of a fork, which keeps it unchanged while the parent goes on: the pages of
/// a pool are shared, and no fork copies them.
///
///   copies.make(spaces);   // before the fork
///   copies.drop();         // after it, in the parent
///   copies.put_in_place(); // or in the child
///
/// Of the host alone. Persistent memory lies in private pages already. Where there are no pages for a copy, the child goes
/// on with the parent's.
///
/// Thread-safety: none; the owner locks from `make` on.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "runtime/step/training_spaces.hpp"

namespace sluice::step {

class fork_copies {
 public:
  /// Of arena and promoted ones. `spaces` stay as they are until one of the others has been called.
  void make(training_spaces const& spaces) noexcept;
  void drop() noexcept;
  void put_in_place() noexcept;

 private:
  void copy(training_spaces::space const& shared);

  /// Each with its copy.
  std::vector<std::pair<training_spaces::space const*, std::byte*>> twins_;
};

}  // namespace sluice::step
