/// The shape that the brackets of a nested list spell, as they come.
///
///   list_nesting list;   // [[1, 2]]
///   list.open();
///   list.open();
///   list.add(2);
///   list.close();
///   list.close();
///   list.extents();     // {1, 2}
///   list.problem();     // empty, or "is ragged: …"
///
/// The first fault of the nesting is kept as a half sentence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sluice::server {

class list_nesting {
 public:
  void open();
  void close();
  /// Scalars of the list that is open.
  void add(std::size_t scalars);

  /// Lists open now.
  [[nodiscard]] std::size_t depth() const noexcept { return depth_; }
  /// All scalars.
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// How many elements the lists of each level have, from the outermost inwards. Meaningful without
  /// a problem.
  [[nodiscard]] std::vector<std::size_t> extents() const;
  [[nodiscard]] std::string const& problem() const noexcept { return problem_; }

 private:
  struct level {
    std::size_t count = 0;   ///< elements so far in the list that is open at this level
    std::size_t extent = 0;  ///< elements of the lists closed at this level
    bool closed_one = false;
  };

  void fail(std::string message);

  std::vector<level> levels_;
  std::size_t depth_ = 0;
  std::size_t leaf_depth_ = 0;  ///< depth at which scalars stand; 0: none seen yet
  std::uint64_t size_ = 0;
  std::string problem_;
};

}  // namespace sluice::server
