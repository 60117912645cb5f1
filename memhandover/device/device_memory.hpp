/// The one interface to a memory backend: how chunks become addresses, in one process.
///
/// A chunk is a physical piece of the pool, kept alive by descriptors (one per chunk on CUDA, one
/// for the whole pool on the host) and known by its index in [0, chunk_count). The backend maps
/// chunks at reserved addresses, takes mappings away, and zeroes contents; who *owns* a chunk is
/// the ledger's business, not the backend's.
///
///   reserved ──map──► mapped ──unmap──► reserved                       in use by this process
///                        └──revoke──► revoked ──unmap──► reserved      taken away while kernels
///                                                                      may still run
///
/// Thread-safety: calls on disjoint address ranges may run at the same time. No call waits for
/// running kernels. Errors: `sluice::error`, kinds `out_of_memory`, `unsupported`, `internal`;
/// after an error nothing has changed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {

enum class backend_kind : std::uint32_t { host = 1, cuda = 2 };

/// The UUID that the driver gives a GPU.
using gpu_uuid = std::array<std::uint8_t, 16>;

/// What a pool is made of; constant for the pool's life.
struct pool_shape {
  backend_kind backend = backend_kind::host;
  std::int32_t device = 0;        ///< CUDA ordinal in the creator's numbering; on the host any
                                  ///< number by which pools are told apart
  std::uint64_t chunk_bytes = 0;  ///< size of every chunk
  std::uint32_t chunk_count = 0;
  gpu_uuid gpu{};  ///< which GPU it is, whatever its ordinal; zero on the host
  [[nodiscard]] std::uint64_t bytes() const noexcept { return chunk_bytes * chunk_count; }
};

[[nodiscard]] char const* to_string(backend_kind backend) noexcept;
/// As nvidia-smi writes it: GPU-01234567-89ab-….
[[nodiscard]] std::string to_string(gpu_uuid const& gpu);
/// Of the GPU that has this ordinal for the driver. Throws `unsupported` without a driver, else what that answers.
[[nodiscard]] gpu_uuid uuid_of_gpu(int device);
/// The device as sentences name it: "GPU 1", "host memory", or "host memory 1" for other than the
/// first.
[[nodiscard]] std::string name_of(pool_shape const& shape);

/// The descriptors that keep a pool's chunks alive: one per chunk on CUDA, one in all on the host.
using pool_descriptors = std::vector<unique_fd>;

struct cuda_driver;

class device_memory {
 public:
  virtual ~device_memory() = default;

  [[nodiscard]] virtual pool_shape const& shape() const noexcept = 0;

  /// Reserves `chunks` × chunk_bytes of address space without memory behind it.
  [[nodiscard]] virtual std::byte* reserve(std::uint32_t chunks) = 0;
  /// Gives a reservation back; everything in it must be unmapped.
  virtual void release(std::byte* where, std::uint32_t chunks) noexcept = 0;

  /// Maps `chunks` one after the other from `where` on, readable and writable.
  virtual void map(std::byte* where, std::span<std::uint32_t const> chunks) = 0;
  /// Removes the mappings of `count` chunks from `where` on; a later access faults.
  virtual void unmap(std::byte* where, std::uint32_t count) noexcept = 0;
  /// The same for `chunks`, which are mapped there, but what of it takes long may be left to
  /// `sweep`.
  virtual void unmap_soon(std::byte* where, std::span<std::uint32_t const> chunks) noexcept {
    unmap(where, static_cast<std::uint32_t>(chunks.size()));
  }
  /// Takes `chunks`, mapped from `where` on, away although kernels may still be running there: when
  /// it returns, nothing this process does reaches them any more. On the host such kernels go on in
  /// private pages that nobody reads; on CUDA the caller has made sure that none runs. What takes
  /// long may be left to `sweep`. `unmap` it afterwards.
  virtual void revoke(std::byte* where, std::span<std::uint32_t const> chunks) = 0;
  /// Finishes what `unmap_soon` and `revoke` have left.
  virtual void sweep() noexcept {}
  /// Puts private, zeroed pages of this process where `count` chunks could be mapped; on the host
  /// only.
  virtual void map_private(std::byte* where, std::uint32_t count) = 0;

  /// Zeroes the contents of the chunks mapped at `where`.
  virtual void scrub(std::byte* where, std::span<std::uint32_t const> chunks) = 0;

  /// Reserves addresses for `chunks` and maps them there, one after the other.
  [[nodiscard]] std::byte* map_anew(std::span<std::uint32_t const> chunks);
  /// Ends what `map_anew` began for `count` chunks.
  void unmap_and_release(std::byte* where, std::uint32_t count) noexcept;
};

/// The backend over descriptors received from the broker. For CUDA the calling thread must have the
/// device's primary context current. The descriptors are borrowed and must outlive the backend.
/// `driver`: null for the machine's own.
[[nodiscard]] std::unique_ptr<device_memory> open_device_memory(
    pool_shape const& shape, pool_descriptors const& descriptors,
    std::shared_ptr<cuda_driver const> driver = nullptr);

}  // namespace sluice::memhandover
