/// Making the memory of a new pool.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

/// Of a pool for which nobody says another size.
inline constexpr std::uint64_t default_host_chunk_bytes = 2ULL << 20U;
inline constexpr std::uint64_t default_cuda_chunk_bytes = 64ULL << 20U;

/// What a pool is to be; see broker_options for what empty fields mean.
struct pool_wish {
  std::string backend{};
  int device = 0;
  std::uint64_t pool_bytes = 0;
  std::uint64_t chunk_bytes = 0;
};

/// A pool in the making. The look for a GPU and the creation of chunks there open CUDA, so both
/// happen in a child process, which exits; a pool on the host is whole at once.
///
///   pool_creation making{{.backend = "cuda", .device = 1}};
///   while (!making.done()) {
///     // … wait until making.socket() can be read …
///     making.advance();
///   }
///   auto files = making.take();
///
/// The process must ignore SIGCHLD, since nobody waits for the child's end. Thread-safety: none.
class pool_creation {
 public:
  /// `promised_bytes` of the host's memory are other pools' that have not touched them yet. Throws
  /// `invalid_argument` for a wish that cannot be meant, `out_of_memory` if there is too little.
  explicit pool_creation(pool_wish wish, std::uint64_t promised_bytes = 0);
  pool_creation(pool_creation&& other) noexcept = default;
  pool_creation& operator=(pool_creation&& other) noexcept = default;
  pool_creation(pool_creation const&) = delete;
  pool_creation& operator=(pool_creation const&) = delete;
  ~pool_creation() = default;

  [[nodiscard]] pool_wish const& wish() const noexcept { return wish_; }
  /// Can be read when `advance` has something to do; negative once the pool is whole.
  [[nodiscard]] int socket() const noexcept { return helper_.get(); }
  [[nodiscard]] bool done() const noexcept { return !helper_; }
  /// Takes one message of the child; waits for it if there is none. Throws what the child tells,
  /// `unsupported` without the GPU that is wished for.
  void advance();
  /// The pool, once it is whole.
  [[nodiscard]] pool_files take() { return std::move(*files_); }

 private:
  void start_helper();

  pool_wish wish_;
  std::uint64_t promised_bytes_;
  unique_fd helper_;  ///< its end tells the child to exit
  std::optional<pool_files> files_;
  std::uint32_t chunks_ = 0;
};

}  // namespace sluice::memhandover
