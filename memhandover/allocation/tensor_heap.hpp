/// Memory for the tensors of many models, from a pool's chunks: several models may share a chunk, and
/// a chunk goes back to the pool when its last tensor goes.
///
///   tensor_heap heap{pool, 256};
///   auto model = heap.load({.sizes = sizes, .what = "resnet50"}, deadline, &report);
///   // … sizes[i] bytes at model.addresses()[i], until `model` dies …
///
/// tensor_placement decides where tensors lie; this object has the memory. A load takes free chunks if
/// they do, else as many as its bytes fill, which may be training's.
///
/// *Stitched ranges* are kept when their model goes, because the next load of that model often wants
/// the same; `prepare` makes those that a load would need now, off the request's path.
///
/// A model that has been *published* outlives its server: when that dies, its successor *adopts* the
/// memory with the tensors in it (warm_memory.hpp). One entry of the manifest names all its chunks, and where
/// in them each tensor lies.
///
///   heap.publish(model, "resnet50/1", "what the bytes are");
///   auto warm = successor.adopt({.sizes = sizes}, "resnet50/1", "what the bytes are");
///
/// All functions may be called from any thread; loads wait for each other.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memhandover/allocation/tensor_placement.hpp"
#include "memhandover/client/serving_pool.hpp"

namespace sluice::memhandover {

/// Tensors' memory, a model's until this object dies. Movable. Empty after a default construction or
/// a move.
class loaded_tensors {
 public:
  loaded_tensors() noexcept = default;
  loaded_tensors(std::shared_ptr<void> hold, std::vector<std::byte*> addresses,
                 std::uint64_t bytes) noexcept
      : hold_(std::move(hold)), addresses_(std::move(addresses)), bytes_(bytes) {}

  loaded_tensors(loaded_tensors const&) = delete;
  loaded_tensors& operator=(loaded_tensors const&) = delete;
  loaded_tensors(loaded_tensors&&) noexcept = default;
  loaded_tensors& operator=(loaded_tensors&&) noexcept = default;
  ~loaded_tensors() = default;

  /// One for each size that was asked for: host addresses, or of the pool's GPU.
  [[nodiscard]] std::span<std::byte* const> addresses() const noexcept { return addresses_; }
  /// The sizes, added up.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return hold_ ? bytes_ : 0; }
  [[nodiscard]] explicit operator bool() const noexcept { return hold_ != nullptr; }

 private:
  friend class tensor_heap;

  std::shared_ptr<void> hold_;
  std::vector<std::byte*> addresses_;
  std::uint64_t bytes_ = 0;
};

class tensor_heap {
 public:
  struct request {
    std::span<std::uint64_t const> sizes;
    std::string_view what{};  ///< for `sluice pool show`, where a shared chunk says "2 models"
    residence lasts = residence::passing;
  };
  struct counters {
    std::uint64_t loads = 0;
    std::uint64_t tight_loads = 0;      ///< placed in holes, because too few chunks were to be had
    std::uint64_t stitched_ranges = 0;  ///< that loads needed
    std::uint64_t stitched_ahead = 0;   ///< of these, mapped before the load
  };

  /// Throws `invalid_argument` for an alignment that does not divide the pool's chunks.
  tensor_heap(std::shared_ptr<serving_pool> pool, std::uint64_t alignment);
  ~tensor_heap();
  tensor_heap(tensor_heap const&) = delete;
  tensor_heap& operator=(tensor_heap const&) = delete;

  /// Throws as `serving_pool::acquire` does; after a failure nothing has been taken.
  [[nodiscard]] loaded_tensors load(request const& wanted, urgency const& how,
                                    handover_report* report = nullptr);

  struct adopted {
    loaded_tensors tensors;
    bool intact = false;  ///< holds what was published; else it may have been changed since
  };

  /// From now on a successor may have what lies there, which `tag` tells apart from other contents, until it
  /// goes. Throws as `warm_memory::publish_chunks` does; false where no memory outlives a server.
  bool publish(loaded_tensors const& model, std::string key, std::string_view tag);
  /// While `used`, what has been published of it may be changing.
  void set_in_use(loaded_tensors const& model, bool used);
  /// What a dead server has published under that key, in its place, if it had the same sizes and tag.
  /// Throws `out_of_memory` if it cannot be mapped.
  [[nodiscard]] std::optional<adopted> adopt(request const& wanted, std::string key,
                                             std::string_view tag);
  /// Gives back what a dead server has left and nobody has adopted.
  void release_rest();

  /// Stitches what a load of these sizes would need if it came now and free chunks do.
  void prepare(std::span<std::uint64_t const> sizes, residence lasts = residence::passing);
  /// Unmaps stitched ranges that nobody uses, the longest unused first, until they map no more than a
  /// quarter of the pool.
  void tidy();

  /// Free bytes of the chunks that are held here.
  [[nodiscard]] std::uint64_t hole_bytes() const;
  [[nodiscard]] counters count() const;

 private:
  class impl;
  std::shared_ptr<impl> impl_;
};

}  // namespace sluice::memhandover
