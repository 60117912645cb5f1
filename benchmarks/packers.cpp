#include "benchmarks/packers.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "memhandover/allocation/range_allocator.hpp"
#include "memhandover/allocation/tensor_placement.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::benchmarks {
namespace {

class tensor_packer final : public packer {
 public:
  tensor_packer(std::uint64_t chunk_bytes, std::uint32_t chunk_count, std::uint64_t alignment)
      : places_(chunk_bytes, chunk_count, alignment), free_(chunk_count) {
    std::iota(free_.begin(), free_.end(), 0U);
  }

  [[nodiscard]] std::unique_ptr<packer> copy() const override {
    return std::make_unique<tensor_packer>(*this);
  }

  [[nodiscard]] std::optional<load_cost> load(std::uint64_t model,
                                              std::span<std::uint64_t const> sizes) override {
    auto const made = places_.load(model, sizes, free_);
    if (!made) {
      return std::nullopt;
    }
    std::vector<std::uint32_t> left;
    std::set_difference(free_.begin(), free_.end(), made->taken.begin(), made->taken.end(),
                        std::back_inserter(left));
    free_.swap(left);
    load_cost cost{static_cast<std::uint32_t>(made->stitched.size()), 0,
                   static_cast<std::uint32_t>(made->touched.size())};
    for (auto const& each : made->stitched) {
      cost.stitched_chunks += static_cast<std::uint32_t>(each.size());
    }
    return cost;
  }

  unload_gain unload(std::uint64_t model) override {
    auto const gone = places_.unload(model);
    auto const middle = static_cast<std::ptrdiff_t>(free_.size());
    free_.insert(free_.end(), gone.emptied.begin(), gone.emptied.end());
    std::inplace_merge(free_.begin(), free_.begin() + middle, free_.end());
    return {static_cast<std::uint32_t>(gone.emptied.size()),
            static_cast<std::uint32_t>(gone.kept.size())};
  }

  [[nodiscard]] std::uint64_t live_bytes() const override { return places_.live_bytes(); }
  [[nodiscard]] std::uint64_t held_bytes() const override { return places_.held_bytes(); }

 private:
  memhandover::tensor_placement places_;
  std::vector<std::uint32_t> free_;  // ascending
};

std::uint64_t rounded(std::uint64_t bytes, std::uint64_t alignment) {
  return (std::max<std::uint64_t>(bytes, 1) + alignment - 1) / alignment * alignment;
}

/// A model's tensors lie one behind the other in chunks that are its alone: the shortest run of free
/// chunks that is long enough, else any, stitched.
class model_packer final : public packer {
 public:
  model_packer(std::uint64_t chunk_bytes, std::uint32_t chunk_count, std::uint64_t alignment)
      : chunk_bytes_(chunk_bytes), alignment_(alignment), is_free_(chunk_count, true) {}

  [[nodiscard]] std::unique_ptr<packer> copy() const override {
    return std::make_unique<model_packer>(*this);
  }

  [[nodiscard]] std::optional<load_cost> load(std::uint64_t model,
                                              std::span<std::uint64_t const> sizes) override {
    holding made;
    for (auto const each : sizes) {
      made.bytes += rounded(each, alignment_);
    }
    auto const count = static_cast<std::uint32_t>((made.bytes + chunk_bytes_ - 1) / chunk_bytes_);
    if (count > is_free_.size() - held_) {
      return std::nullopt;
    }
    std::size_t best = 0;
    std::size_t best_length = is_free_.size() + 1;
    for (std::size_t start = 0; start < is_free_.size();) {
      auto end = start;
      while (end < is_free_.size() && is_free_[end]) {
        ++end;
      }
      if (end - start >= count && end - start < best_length) {
        best = start;
        best_length = end - start;
      }
      start = end + 1;
    }
    for (auto i = best; made.chunks.size() < count; ++i) {
      if (is_free_[i]) {
        is_free_[i] = false;
        made.chunks.push_back(static_cast<std::uint32_t>(i));
      }
    }
    held_ += count;
    live_ += made.bytes;
    models_.emplace(model, std::move(made));
    bool const stitched = best_length > is_free_.size();
    return load_cost{stitched ? 1U : 0U, stitched ? count : 0U, count};
  }

  unload_gain unload(std::uint64_t model) override {
    auto const gone = models_.extract(model);
    auto const& [bytes, chunks] = gone.mapped();
    for (auto const each : chunks) {
      is_free_[each] = true;
    }
    held_ -= chunks.size();
    live_ -= bytes;
    return {static_cast<std::uint32_t>(chunks.size()), 0};
  }

  [[nodiscard]] std::uint64_t live_bytes() const override { return live_; }
  [[nodiscard]] std::uint64_t held_bytes() const override { return held_ * chunk_bytes_; }
  [[nodiscard]] bool shares_chunks() const override { return false; }

 private:
  struct holding {
    std::uint64_t bytes = 0;
    std::vector<std::uint32_t> chunks;
  };
  std::uint64_t chunk_bytes_;
  std::uint64_t alignment_;
  std::vector<bool> is_free_;
  std::map<std::uint64_t, holding> models_;
  std::uint64_t held_ = 0;  // chunks
  std::uint64_t live_ = 0;
};

/// One range over the whole view; chunks are held while anything lies in them.
class heap_packer final : public packer {
 public:
  heap_packer(std::uint64_t chunk_bytes, std::uint32_t chunk_count, std::uint64_t alignment)
      : chunk_bytes_(chunk_bytes), ranges_(alignment), live_in_(chunk_count) {
    ranges_.grow(chunk_bytes * chunk_count);
  }

  [[nodiscard]] std::unique_ptr<packer> copy() const override {
    return std::make_unique<heap_packer>(*this);
  }

  [[nodiscard]] std::optional<load_cost> load(std::uint64_t model,
                                              std::span<std::uint64_t const> sizes) override {
    auto& made = models_[model];
    for (auto const each : sizes) {
      auto const offset = ranges_.allocate(each);
      if (!offset) {
        (void)unload(model);
        return std::nullopt;
      }
      made.push_back(*offset);
      count(*offset, true);
    }
    return load_cost{0, 0, static_cast<std::uint32_t>(chunks_of(made).size())};
  }

  unload_gain unload(std::uint64_t model) override {
    auto const gone = models_.extract(model);
    auto const chunks = chunks_of(gone.mapped());
    for (auto const offset : gone.mapped()) {
      count(offset, false);
      ranges_.free(offset);
    }
    unload_gain gain;
    for (auto const each : chunks) {
      ++(live_in_[each] == 0 ? gain.emptied_chunks : gain.kept_chunks);
    }
    return gain;
  }

  [[nodiscard]] std::uint64_t live_bytes() const override { return ranges_.used(); }
  [[nodiscard]] std::uint64_t held_bytes() const override { return held_ * chunk_bytes_; }

 private:
  template <typename Each>
  void for_each_part(std::uint64_t offset, Each&& each) const {
    auto const [begin, size] = ranges_.containing(offset).value();
    memhandover::for_each_chunk({begin, begin + size}, chunk_bytes_, each);
  }

  void count(std::uint64_t offset, bool is_live) {
    for_each_part(offset, [&](std::uint32_t chunk, memhandover::extent part) {
      auto& live = live_in_[chunk];
      held_ -= live > 0 ? 1 : 0;
      live = is_live ? live + part.size() : live - part.size();
      held_ += live > 0 ? 1 : 0;
    });
  }

  [[nodiscard]] std::set<std::uint32_t> chunks_of(std::vector<std::uint64_t> const& offsets) const {
    std::set<std::uint32_t> chunks;
    for (auto const offset : offsets) {
      for_each_part(offset,
                    [&](std::uint32_t chunk, memhandover::extent) { chunks.insert(chunk); });
    }
    return chunks;
  }

  std::uint64_t chunk_bytes_;
  memhandover::range_allocator ranges_;
  std::vector<std::uint64_t> live_in_;
  std::map<std::uint64_t, std::vector<std::uint64_t>> models_;
  std::uint64_t held_ = 0;  // chunks
};

}  // namespace

std::unique_ptr<packer> make_packer(std::string const& kind, std::uint64_t chunk_bytes,
                                    std::uint32_t chunk_count, std::uint64_t alignment) {
  if (kind == "tensors") {
    return std::make_unique<tensor_packer>(chunk_bytes, chunk_count, alignment);
  }
  if (kind == "models") {
    return std::make_unique<model_packer>(chunk_bytes, chunk_count, alignment);
  }
  if (kind == "heap") {
    return std::make_unique<heap_packer>(chunk_bytes, chunk_count, alignment);
  }
  throw error{error_kind::invalid_argument,
              "there is no packer '" + kind + "'; there are tensors, models and heap"};
}

}  // namespace sluice::benchmarks
