#include "memhandover/broker/detail/open_files.hpp"

#include <unistd.h>

#include <cstddef>
#include <string>

#include "memhandover/base/descriptor_limit.hpp"

namespace sluice::memhandover::detail {
namespace {

/// A connection, a life pipe, a pidfd, a bell, and one for a moment.
constexpr std::size_t of_each_process = 5;
/// For a pool on the host, and a process in it.
constexpr std::size_t least = 24;
/// When its connection has been taken and its descriptors have come: a bell twice, what it is sent, and what is written
/// meanwhile.
constexpr std::size_t still_to_come = 6;

}  // namespace

void require_open_files() {
  if (auto const may = descriptor_limit(); may < least) {
    throw error{error_kind::unavailable,
                "a broker that may open " + std::to_string(may) +
                    " files (ulimit -Hn) has no room for a pool: it needs " +
                    std::to_string(least) + ", and " + std::to_string(of_each_process) +
                    " for each further process in the pool; raise that limit"};
  }
}

void require_room_for_another() {
  if (!can_open(still_to_come)) {
    throw too_few_open_files();
  }
}

error too_few_open_files() {
  auto const process = std::to_string(::getpid());
  return {
      error_kind::unavailable,
      "the broker, process " + process + ", may open " + std::to_string(descriptor_limit()) +
          " files (ulimit -Hn), and a process in the pool takes " +
          std::to_string(of_each_process) +
          " of them: too few are left. Raise that limit for the program that starts the broker, "
          "the first that needs a pool; this broker ends when nobody needs it any more, or by "
          "`kill " +
          process + "`"};
}

}  // namespace sluice::memhandover::detail
