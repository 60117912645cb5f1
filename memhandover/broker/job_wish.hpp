/// What a training job asks for as it joins a pool: its priority, and its minimum, in bytes or as a part of the pool, whose size
/// it may not know. The environment has them as `sluice run` writes them.
///
///   auto wish = job_wish_in(environment("SLUICE_PRIORITY"), environment("SLUICE_MIN_MEMORY"));
///   wish.chunks_of(shape);   // what its minimum is in that pool
///
/// Thread-safety: any thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "memhandover/device/device_memory.hpp"
#include "memhandover/ledger/standing.hpp"

namespace sluice::memhandover {

struct job_wish {
  priority rank = priority::normal;
  std::uint64_t least_bytes = 0;
  std::uint32_t least_ppm = 0;  ///< of the pool; in place of bytes

  /// Whole chunks; may be more than the pool has.
  [[nodiscard]] std::uint64_t chunks_of(pool_shape const& pool) const noexcept;

  bool operator==(job_wish const&) const = default;
};

/// `rank`: low, normal, high or empty; `least`: a number of bytes, a percentage of the pool (`12.5%`), or empty. Throws
/// `invalid_argument` with the variable that is wrong and what it may be.
[[nodiscard]] job_wish job_wish_in(std::string const& rank, std::string const& least);

/// Adds it to a client's message, but for what is as usual.
void add_wish(nlohmann::json& join, job_wish const& wish);
/// What a client's message says. Throws `invalid_argument`.
[[nodiscard]] job_wish wish_in(nlohmann::json const& join);

}  // namespace sluice::memhandover
