#include "memhandover/device/host_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/system_error.hpp"

#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateIgnoreWritesBegin(char const* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(char const* file, int line);
#endif

namespace sluice::memhandover {
namespace {

/// ThreadSanitizer takes mapping a range for writing all of it. While one of these lives it does
/// not: where pages are exchanged under threads that go on using them, nothing is written.
class exchange_of_pages {
 public:
#ifdef __SANITIZE_THREAD__
  exchange_of_pages() {
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~exchange_of_pages() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  }
#else
  exchange_of_pages() = default;
  ~exchange_of_pages() = default;
#endif
  exchange_of_pages(exchange_of_pages const&) = delete;
  exchange_of_pages& operator=(exchange_of_pages const&) = delete;
};

/// Calls `each(offset in `chunks`, length)` for every run of consecutive chunk numbers.
template <typename Each>
void for_each_run(std::span<std::uint32_t const> chunks, Each&& each) {
  for (std::size_t start = 0; start < chunks.size();) {
    std::size_t end = start + 1;
    while (end < chunks.size() && chunks[end] == chunks[end - 1] + 1) {
      ++end;
    }
    each(start, end - start);
    start = end;
  }
}

}  // namespace

host_memory::host_memory(pool_shape const& shape, int fd) : shape_(shape), fd_(fd) {}

std::byte* host_memory::reserve(std::uint32_t chunks) {
  // Aligned to the chunk, so that a kernel that backs shared memory with huge pages can do so.
  auto const bytes = chunks * shape_.chunk_bytes;
  auto const padded = bytes + shape_.chunk_bytes;
  void* raw =
      ::mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    throw_system_error("cannot reserve " + format_bytes(bytes) + " of address space");
  }
  auto const start = reinterpret_cast<std::uintptr_t>(raw);
  auto const aligned = (start + shape_.chunk_bytes - 1) / shape_.chunk_bytes * shape_.chunk_bytes;
  if (aligned > start) {
    ::munmap(raw, aligned - start);
  }
  auto const tail = start + padded - (aligned + bytes);
  if (tail > 0) {
    ::munmap(reinterpret_cast<void*>(aligned + bytes), tail);
  }
  return reinterpret_cast<std::byte*>(aligned);
}

void host_memory::release(std::byte* where, std::uint32_t chunks) noexcept {
  ::munmap(where, chunks * shape_.chunk_bytes);
}

void host_memory::map(std::byte* where, std::span<std::uint32_t const> chunks) {
  for_each_run(chunks, [&](std::size_t start, std::size_t length) {
    auto* at = where + start * shape_.chunk_bytes;
    auto const offset = static_cast<off_t>(chunks[start] * shape_.chunk_bytes);
    if (::mmap(at, length * shape_.chunk_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_,
               offset) == MAP_FAILED) {
      auto const error_number = errno;
      unmap(where, static_cast<std::uint32_t>(start));
      errno = error_number;
      throw_system_error("cannot map chunks of the pool");
    }
  });
}

void host_memory::unmap(std::byte* where, std::uint32_t count) noexcept {
  if (count > 0) {
    // Over pages of our own it fails only where the kernel has no memory left for its tables; the
    // mapping then stays, which is as harmless as it was.
    (void)::mmap(where, count * shape_.chunk_bytes, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
}

/// Moves the pages of `chunks` from `where` to addresses that nobody knows. Emptying page tables
/// takes 13 ms for 256 MiB, moving them 0.1 ms. Where the kernel cannot (before 5.13), nothing
/// happens, and whoever maps over `where` pays.
void host_memory::set_aside(std::byte* where, std::span<std::uint32_t const> chunks) noexcept {
  auto const bytes = chunks.size() * shape_.chunk_bytes;
  std::byte* aside = nullptr;
  try {
    aside = reserve(static_cast<std::uint32_t>(chunks.size()));
    std::lock_guard const lock{mutex_};
    aside_.emplace_back(aside, bytes);
  } catch (...) {
    if (aside != nullptr) {
      ::munmap(aside, bytes);
    }
    return;
  }
  for_each_run(chunks, [&](std::size_t start, std::size_t length) {
    auto const offset = start * shape_.chunk_bytes;
    // The old addresses stay mapped, without pages: a running kernel finds no hole.
    (void)::mremap(where + offset, length * shape_.chunk_bytes, length * shape_.chunk_bytes,
                   MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, aside + offset);
  });
}

void host_memory::unmap_soon(std::byte* where, std::span<std::uint32_t const> chunks) noexcept {
  if (!chunks.empty()) {
    set_aside(where, chunks);
    unmap(where, static_cast<std::uint32_t>(chunks.size()));
  }
}

void host_memory::revoke(std::byte* where, std::span<std::uint32_t const> chunks) {
  if (!chunks.empty()) {
    set_aside(where, chunks);
    map_private(where, static_cast<std::uint32_t>(chunks.size()));
  }
}

void host_memory::sweep() noexcept {
  std::vector<std::pair<std::byte*, std::size_t>> done;
  {
    std::lock_guard const lock{mutex_};
    done.swap(aside_);
  }
  for (auto const& [where, bytes] : done) {
    ::munmap(where, bytes);
  }
}

void host_memory::map_private(std::byte* where, std::uint32_t count) {
  [[maybe_unused]] exchange_of_pages const unseen;
  if (::mmap(where, count * shape_.chunk_bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    throw_system_error("cannot put private pages where chunks of the pool were");
  }
}

void host_memory::scrub(std::byte* /*where*/, std::span<std::uint32_t const> chunks) {
  for_each_run(chunks, [&](std::size_t start, std::size_t length) {
    auto const offset = static_cast<off_t>(chunks[start] * shape_.chunk_bytes);
    auto const bytes = static_cast<off_t>(length * shape_.chunk_bytes);
    if (::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) != 0) {
      throw_system_error("cannot zero chunks of the pool");
    }
  });
}

pool_descriptors create_host_chunks(pool_shape const& shape) {
  unique_fd fd{::memfd_create("sluice-pool", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(shape.bytes())) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_system_error("cannot create a pool of " + format_bytes(shape.bytes()) + " in memory");
  }
  pool_descriptors descriptors;
  descriptors.push_back(std::move(fd));
  return descriptors;
}

}  // namespace sluice::memhandover
