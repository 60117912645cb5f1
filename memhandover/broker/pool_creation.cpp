#include "memhandover/broker/pool_creation.hpp"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <iterator>
#include <limits>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/conversation.hpp"
#include "memhandover/device/cuda_driver.hpp"
#include "memhandover/device/cuda_memory.hpp"
#include "memhandover/device/host_memory.hpp"
#include "memhandover/device/host_room.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

constexpr int max_device = 63;

pool_files make_host_pool(pool_wish const& wish, std::uint64_t promised_bytes) {
  auto const room = read_host_room();
  auto const unpromised = room.available - std::min(room.available, promised_bytes);
  auto const bytes = wish.pool_bytes == 0 ? unpromised / 2 : wish.pool_bytes;
  if (bytes > room.most) {
    throw error{error_kind::out_of_memory, "the pool is to have " + format_bytes(bytes) + " but " +
                                               room.most_set_by + " is " + format_bytes(room.most) +
                                               " of memory in all; ask for less"};
  }
  if (auto const why = shortage(promised_bytes + bytes, room)) {
    spdlog::warn("the pool is larger than what can be had now: {}", *why);
  }
  pool_shape shape{backend_kind::host, wish.device,
                   wish.chunk_bytes == 0 ? default_host_chunk_bytes : wish.chunk_bytes, 0};
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
  files.chunks = create_host_chunks(shape);
  return files;
}

/// The child's part: looks for a GPU if it is not certain that there is one, creates the chunks, and
/// sends their descriptors.
void send_cuda_pool(int socket, pool_wish const& wish) {
  try {
    if (wish.backend != "cuda" && !cuda_available()) {
      send_message(socket, {{"type", "no_gpu"}});
    } else {
      auto const chunk_bytes = wish.chunk_bytes == 0 ? default_cuda_chunk_bytes : wish.chunk_bytes;
      auto const created = create_cuda_chunks(wish.device, wish.pool_bytes, chunk_bytes);
      send_message(socket, {{"type", "shape"},
                            {"chunk_bytes", created.shape.chunk_bytes},
                            {"chunk_count", created.shape.chunk_count},
                            {"gpu", created.shape.gpu}});
      send_chunks(socket, created.descriptors);
      // The descriptors are on their way; they stay alive until the parent has taken them.
      (void)receive_message(socket);
    }
  } catch (error const& why) {
    send_message(socket, refusal(why));
  }
}

}  // namespace

pool_creation::pool_creation(pool_wish wish, std::uint64_t promised_bytes)
    : wish_(std::move(wish)), promised_bytes_(promised_bytes) {
  auto const& backend = wish_.backend;
  if (!backend.empty() && backend != "auto" && backend != "host" && backend != "cuda") {
    throw error{error_kind::invalid_argument,
                "there is no backend " + backend + "; use host, cuda or auto"};
  }
  if (wish_.device < 0 || wish_.device > max_device) {
    throw error{error_kind::invalid_argument, "there is no device " + std::to_string(wish_.device) +
                                                  "; devices have numbers from 0 to " +
                                                  std::to_string(max_device)};
  }
  if (backend == "host") {
    files_ = make_host_pool(wish_, promised_bytes_);
  } else {
    start_helper();
  }
}

void pool_creation::start_helper() {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot create a socket: "} + std::strerror(errno)};
  }
  helper_ = unique_fd{pair[0]};
  unique_fd const theirs{pair[1]};
  auto const child = ::fork();
  if (child < 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot start a process: "} + std::strerror(errno)};
  }
  if (child == 0) {
    // Nothing of the broker's: not its lock and its socket, which a successor needs, nor pools.
    auto const kept = static_cast<unsigned>(theirs.get());
    ::close_range(STDERR_FILENO + 1, kept - 1, 0);
    ::close_range(kept + 1, std::numeric_limits<unsigned>::max(), 0);
    ::signal(SIGCHLD, SIG_DFL);
    try {
      send_cuda_pool(theirs.get(), wish_);
    } catch (...) {
      ::_exit(1);  // the parent sees that the conversation has ended
    }
    ::_exit(0);
  }
}

void pool_creation::advance() {
  auto received = receive_message(helper_.get());
  if (!received) {
    throw error{error_kind::unavailable, "the process that creates the pool's chunks ended early"};
  }
  auto const& body = received->body;
  if (body["type"] == "error") {
    throw error{static_cast<error_kind>(body["kind"].get<int>()),
                body["message"].get<std::string>()};
  }
  if (body["type"] == "no_gpu") {
    files_ = make_host_pool(wish_, promised_bytes_);
    helper_.reset();
    return;
  }
  if (body["type"] == "shape") {
    chunks_ = body["chunk_count"].get<std::uint32_t>();
    files_ =
        create_ledger({backend_kind::cuda, wish_.device, body["chunk_bytes"].get<std::uint64_t>(),
                       chunks_, body["gpu"].get<gpu_uuid>()});
  } else {
    std::move(received->descriptors.begin(), received->descriptors.end(),
              std::back_inserter(files_->chunks));
  }
  if (files_->chunks.size() >= chunks_) {
    helper_.reset();
  }
}

}  // namespace sluice::memhandover
