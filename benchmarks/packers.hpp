/// Ways to pack models into a pool's chunks, behind one interface, for the packing benchmark.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace sluice::benchmarks {

/// What a load did, besides succeeding.
struct load_cost {
  std::uint32_t stitched_ranges = 0;
  std::uint32_t stitched_chunks = 0;  ///< mapped a second time
  std::uint32_t touched_chunks = 0;
};

struct unload_gain {
  std::uint32_t emptied_chunks = 0;
  std::uint32_t kept_chunks = 0;  ///< that others keep partially live
};

class packer {
 public:
  packer() = default;
  packer& operator=(packer const&) = delete;
  packer(packer&&) = delete;
  packer& operator=(packer&&) = delete;
  virtual ~packer() = default;

  [[nodiscard]] virtual std::unique_ptr<packer> copy() const = 0;
  /// All or nothing.
  [[nodiscard]] virtual std::optional<load_cost> load(std::uint64_t model,
                                                      std::span<std::uint64_t const> sizes) = 0;
  virtual unload_gain unload(std::uint64_t model) = 0;
  /// Bytes of tensors, each rounded up to its alignment.
  [[nodiscard]] virtual std::uint64_t live_bytes() const = 0;
  /// Bytes of the chunks that are not the pool's.
  [[nodiscard]] virtual std::uint64_t held_bytes() const = 0;
  /// Whether a hole of a held chunk can be given to another model at all.
  [[nodiscard]] virtual bool shares_chunks() const { return true; }

 protected:
  packer(packer const&) = default;
};

/// `kind`: "tensors" (tensor_placement), "models" (whole chunks for each model, as one contiguous
/// range), "heap" (each tensor in the smallest free range of the whole view that holds it). Throws
/// `invalid_argument` for others.
[[nodiscard]] std::unique_ptr<packer> make_packer(std::string const& kind,
                                                  std::uint64_t chunk_bytes,
                                                  std::uint32_t chunk_count,
                                                  std::uint64_t alignment);

}  // namespace sluice::benchmarks
