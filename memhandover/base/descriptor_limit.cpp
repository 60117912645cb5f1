#include "memhandover/base/descriptor_limit.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "memhandover/base/error.hpp"

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
                    " open files for its chunks, but this process has " + std::to_string(open) +
                    " open and may have " + std::to_string(limit.rlim_max) +
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

}  // namespace sluice::memhandover
