#include "memhandover/pool_creation.hpp"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

#include "memhandover/bytes.hpp"
#include "memhandover/detail/cuda_memory.hpp"
#include "memhandover/detail/host_memory.hpp"
#include "memhandover/detail/message_field.hpp"
#include "memhandover/error.hpp"
#include "memhandover/wire.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

constexpr std::uint64_t host_chunk_bytes = 2_MiB;
constexpr std::uint64_t cuda_chunk_bytes = 64_MiB;

/// Host memory that can still be used: what the system has available, or less where a memory cgroup
/// says so.
std::uint64_t available_host_bytes() {
  std::uint64_t available = std::numeric_limits<std::uint64_t>::max();
  std::ifstream meminfo{"/proc/meminfo"};
  for (std::string key, unit; meminfo >> key;) {
    std::uint64_t kib = 0;
    meminfo >> kib;
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") {
      available = kib << 10U;
    }
  }
  std::ifstream group{"/proc/self/cgroup"};
  for (std::string line; std::getline(group, line);) {
    if (line.rfind("0::", 0) == 0) {
      auto const folder = "/sys/fs/cgroup" + line.substr(3);
      std::ifstream limit_file{folder + "/memory.max"};
      std::ifstream used_file{folder + "/memory.current"};
      std::uint64_t limit = 0;
      std::uint64_t used = 0;
      if (limit_file >> limit && used_file >> used) {  // "max" does not parse: no limit
        available = std::min(available, limit > used ? limit - used : 0);
      }
    }
  }
  return available;
}

pool_files make_host_pool(pool_wish const& wish) {
  auto const available = available_host_bytes();
  auto const bytes = wish.pool_bytes == 0 ? available / 2 : wish.pool_bytes;
  if (bytes > available) {
    throw error{error_kind::out_of_memory, "the pool is to have " + format_bytes(bytes) +
                                               " but this machine has " + format_bytes(available) +
                                               " of memory available; ask for less"};
  }
  pool_shape shape{backend_kind::host, -1,
                   wish.chunk_bytes == 0 ? host_chunk_bytes : wish.chunk_bytes, 0};
  if (shape.chunk_bytes % 4096 != 0) {
    throw error{error_kind::invalid_argument, "the chunk size must be a multiple of 4 KiB"};
  }
  shape.chunk_count = static_cast<std::uint32_t>(bytes / shape.chunk_bytes);
  if (shape.chunk_count == 0) {
    throw error{error_kind::invalid_argument, "the pool is to have " + format_bytes(bytes) +
                                                  ", less than one chunk of " +
                                                  format_bytes(shape.chunk_bytes)};
  }
  auto files = create_ledger(shape);
  files.chunks = detail::create_host_chunks(shape);
  return files;
}

/// Chunks are created by a child that exits: the broker itself never opens CUDA.
pool_files make_cuda_pool(pool_wish const& wish) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot create a socket: "} + std::strerror(errno)};
  }
  unique_fd ours{pair[0]};
  unique_fd theirs{pair[1]};
  auto const child = ::fork();
  if (child < 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot start a process: "} + std::strerror(errno)};
  }
  if (child == 0) {
    ours.reset();
    try {
      auto const chunk_bytes = wish.chunk_bytes == 0 ? cuda_chunk_bytes : wish.chunk_bytes;
      auto const created = detail::create_cuda_chunks(wish.device, wish.pool_bytes, chunk_bytes);
      send_message(theirs.get(), {{"type", "shape"},
                                  {"chunk_bytes", created.shape.chunk_bytes},
                                  {"chunk_count", created.shape.chunk_count}});
      send_chunks(theirs.get(), created.descriptors);
      // The descriptors are on their way; they stay alive until the parent has taken them.
      (void)receive_message(theirs.get());
    } catch (error const& why) {
      try {
        send_message(theirs.get(), detail::refusal(why));
      } catch (error const&) {
        ::_exit(1);
      }
    }
    ::_exit(0);
  }
  theirs.reset();
  auto next = [&ours] {
    auto received = receive_message(ours.get());
    if (!received) {
      throw error{error_kind::unavailable,
                  "the process that creates the pool's chunks ended early"};
    }
    if (received->body["type"] == "error") {
      throw error{static_cast<error_kind>(received->body["kind"].get<int>()),
                  received->body["message"].get<std::string>()};
    }
    return std::move(*received);
  };
  std::optional<pool_files> files;
  try {
    auto const first = next();
    pool_shape const shape{backend_kind::cuda, wish.device,
                           first.body["chunk_bytes"].get<std::uint64_t>(),
                           first.body["chunk_count"].get<std::uint32_t>()};
    files = create_ledger(shape);
    while (files->chunks.size() < shape.chunk_count) {
      auto batch = next();
      std::move(batch.descriptors.begin(), batch.descriptors.end(),
                std::back_inserter(files->chunks));
    }
  } catch (...) {
    ours.reset();
    ::waitpid(child, nullptr, 0);
    throw;
  }
  ours.reset();
  ::waitpid(child, nullptr, 0);
  return std::move(*files);
}

}  // namespace

pool_files create_pool(pool_wish const& wish) {
  auto const& backend = wish.backend;
  if (!backend.empty() && backend != "auto" && backend != "host" && backend != "cuda") {
    throw error{error_kind::invalid_argument,
                "there is no backend " + backend + "; use host, cuda or auto"};
  }
  // The look for a GPU opens CUDA, so it happens in a child.
  bool const cuda = backend == "cuda" || (backend != "host" && detail::cuda_in_child());
  return cuda ? make_cuda_pool(wish) : make_host_pool(wish);
}

}  // namespace sluice::memhandover
