#include "memhandover/base/descriptor_limit.hpp"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {
namespace {

/// What a process opens for a moment while it joins and works: sockets, maps, libraries.
constexpr std::size_t headroom = 64;

std::size_t open_now() {
  std::error_code unknown;
  std::filesystem::directory_iterator const all{"/proc/self/fd", unknown};
  return unknown ? 0 : static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

void make_room_for_descriptors(std::size_t count) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return;
  }
  auto const open = open_now();
  // A few more than before leave a process as it was; many must not take what it opens next.
  if (limit.rlim_max != RLIM_INFINITY &&
      open + count + std::min(headroom, count) > limit.rlim_max) {
    throw error{error_kind::unsupported,
                "the pool needs " + std::to_string(count) +
                    " open files for its chunks, but process " + std::to_string(::getpid()) +
                    " has " + std::to_string(open) + " open and may have " +
                    std::to_string(limit.rlim_max) +
                    " (ulimit -Hn); raise that limit, or make pool.chunk larger"};
  }
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_cur + count, limit.rlim_max);
  (void)::setrlimit(RLIMIT_NOFILE, &limit);  // up to the hard limit this is always allowed
}

void raise_descriptor_limit() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    limit.rlim_cur = limit.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &limit);
  }
}

std::size_t descriptor_limit() noexcept {
  rlimit limit{};
  bool const is_known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return is_known ? limit.rlim_cur : std::numeric_limits<std::size_t>::max();
}

bool can_open(std::size_t count) noexcept {
  std::array<unique_fd, 16> opened;
  for (std::size_t i = 0; i < std::min(count, opened.size()); ++i) {
    opened.at(i) = unique_fd{::epoll_create1(EPOLL_CLOEXEC)};
    if (!opened.at(i)) {
      return false;
    }
  }
  return true;
}

}  // namespace sluice::memhandover
