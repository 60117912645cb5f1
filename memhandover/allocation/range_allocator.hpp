/// Hands out byte ranges of [0, capacity): best fit, neighbours merged when freed.
///
/// It only counts; there is no memory behind it here. The capacity grows and shrinks at its end,
/// which is how an allocator over chunks gets and gives them.
///
/// What throws (std::bad_alloc) has changed nothing; freeing and shrinking never throw: they use nodes that have been
/// allocated with the range.
///
/// Thread-safety: none. All operations are O(log n) in the number of ranges.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace sluice::memhandover {

class range_allocator {
 public:
  /// Every range starts at a multiple of `alignment` (a power of two) and its size is rounded up to
  /// one.
  explicit range_allocator(std::size_t alignment) noexcept : alignment_(alignment) {}
  /// In the same state.
  range_allocator(range_allocator const& other);
  range_allocator& operator=(range_allocator const&) = delete;
  range_allocator(range_allocator&&) = delete;
  range_allocator& operator=(range_allocator&&) = delete;
  ~range_allocator() = default;

  /// Offset of a range of at least `bytes`, or nothing if none is free.
  [[nodiscard]] std::optional<std::size_t> allocate(std::size_t bytes);
  /// Frees the range that starts at `offset`; returns its size, 0 if none does.
  std::size_t free(std::size_t offset) noexcept;
  /// The range that `offset` lies in, as start and size; nothing if it is free.
  [[nodiscard]] std::optional<std::pair<std::size_t, std::size_t>> containing(
      std::size_t offset) const;

  /// The free range that `offset` lies in, as start and size; nothing if it is in use.
  [[nodiscard]] std::optional<std::pair<std::size_t, std::size_t>> free_around(
      std::size_t offset) const;

  /// How much the capacity must grow so that `bytes` fit: 0 if they fit now.
  [[nodiscard]] std::size_t shortage(std::size_t bytes) const;
  void grow(std::size_t bytes);
  /// Free bytes at the end, which `shrink` can take.
  [[nodiscard]] std::size_t free_at_end() const;
  void shrink(std::size_t bytes) noexcept;

  /// Calls `each(offset, size)` for every range in use.
  template <typename Each>
  void for_each(Each&& each) const {
    for (auto const& [offset, size] : live_) {
      each(offset, size);
    }
  }

  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }
  [[nodiscard]] std::size_t live() const noexcept { return live_.size(); }

 private:
  using by_offset = std::map<std::size_t, std::size_t>;             ///< offset → size
  using by_extent = std::set<std::pair<std::size_t, std::size_t>>;  ///< (size, offset)

  /// A free range's nodes, while it is none.
  struct nodes {
    by_offset::node_type at;
    by_extent::node_type sized;
  };
  [[nodiscard]] static nodes make_nodes();
  void add_free(nodes with, std::size_t offset, std::size_t bytes) noexcept;
  [[nodiscard]] nodes remove_free(by_offset::iterator range) noexcept;
  [[nodiscard]] std::size_t rounded(std::size_t bytes) const noexcept {
    return bytes == 0 ? alignment_ : (bytes + alignment_ - 1) / alignment_ * alignment_;
  }

  std::size_t alignment_;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  by_offset live_;
  by_offset free_;                           ///< never two neighbours
  by_extent by_size_;                        ///< of the same
  std::vector<by_extent::node_type> spare_;  ///< one for each live range
};

}  // namespace sluice::memhandover
