/// Making the memory of a new pool.
#pragma once

#include <cstdint>
#include <string>

#include "memhandover/ledger.hpp"

namespace sluice::memhandover {

/// What a pool is to be; see broker_options for what empty fields mean.
struct pool_wish {
  std::string backend{};
  int device = 0;
  std::uint64_t pool_bytes = 0;
  std::uint64_t chunk_bytes = 0;
};

/// Creates chunks and ledger of a new pool. Throws `invalid_argument` for a wish that cannot be meant,
/// `out_of_memory` if there is too little, `unsupported` without the GPU that is wished for.
[[nodiscard]] pool_files create_pool(pool_wish const& wish);

}  // namespace sluice::memhandover
