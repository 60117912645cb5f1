/// A load under way: what it has occupied so far, undone if it comes to nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "memhandover/allocation/tensor_placement.hpp"

namespace sluice::memhandover::detail {

/// A tensor that is to be placed: its size, rounded, and its number in the load.
struct wanted_tensor {
  std::uint64_t bytes = 0;
  std::uint32_t number = 0;
};

class placement_draft {
 public:
  placement_draft(chunk_map& map, model_id model, residence lasts, std::size_t tensors)
      : map_(map), model_(model), lasts_(lasts) {
    decision_.tensors.resize(tensors);
  }
  placement_draft(placement_draft const&) = delete;
  placement_draft& operator=(placement_draft const&) = delete;
  ~placement_draft();

  [[nodiscard]] chunk_map const& map() const noexcept { return map_; }
  [[nodiscard]] residence lasts() const noexcept { return lasts_; }

  /// Says where a tensor lies; its bytes are occupied separately, several tensors' at once.
  void put(wanted_tensor const& tensor, std::uint64_t address) {
    decision_.tensors[tensor.number] = {tensor_spot::whole_view, address};
  }
  /// The same for one that lies across `parts`, each of which but the first begins a chunk, and each
  /// but the last ends one; occupies them.
  void stitch(wanted_tensor const& tensor, std::vector<extent> const& parts);
  void occupy(extent where);

  /// Ends the draft: the decision, and what the model occupies.
  [[nodiscard]] std::pair<load_decision, std::vector<extent>> keep();

 private:
  chunk_map& map_;
  model_id model_;
  residence lasts_;
  load_decision decision_;
  std::vector<extent> occupied_;
};

}  // namespace sluice::memhandover::detail
