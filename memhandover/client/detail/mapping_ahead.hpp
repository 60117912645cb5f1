/// Chunks that will probably be had are mapped one after the other while who has them gives them up, since mapping takes about as long
/// as that; what came otherwise is put right then.
///
///   mapping_ahead ahead{memory};
///   ahead.map(foreseen);                      // while a tenant is asked for them
///   auto const there = ahead.put_right(had);  // nothing: map them
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "memhandover/device/device_memory.hpp"

namespace sluice::memhandover::detail {

class mapping_ahead {
 public:
  struct mapped {
    std::byte* data = nullptr;
    std::vector<std::uint32_t> chunks;  ///< in the order in which they lie there
  };

  /// `memory` must outlive this object.
  explicit mapping_ahead(device_memory& memory) noexcept : memory_(memory) {}
  mapping_ahead(mapping_ahead const&) = delete;
  mapping_ahead& operator=(mapping_ahead const&) = delete;
  ~mapping_ahead() { drop(); }

  /// In the place of what was mapped before. Where that fails, nothing is.
  void map(std::span<std::uint32_t const> foreseen) noexcept;
  /// Those that were `had` where the foreseen ones were mapped, from then on the caller's to unmap; nothing if none were, or fewer or more.
  [[nodiscard]] std::optional<mapped> put_right(std::span<std::uint32_t const> had) noexcept;

 private:
  void drop() noexcept;
  void unmap(std::size_t from, std::size_t end) noexcept;
  [[nodiscard]] std::byte* at(std::size_t position) const noexcept {
    return ahead_.data + position * memory_.shape().chunk_bytes;
  }

  device_memory& memory_;
  mapped ahead_;
  std::optional<std::size_t> gap_;  ///< position without a chunk
};

}  // namespace sluice::memhandover::detail
