/// Locks on single bytes of a file. One lasts as long as the description of the file that it was taken by is open, here or in
/// a forked child. Source: fcntl(2), open file description locks.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>

namespace sluice::posix {

[[nodiscard]] inline struct flock byte_at(std::uint32_t at) noexcept {
  struct flock byte {};
  byte.l_type = F_WRLCK;
  byte.l_whence = SEEK_SET;
  byte.l_start = static_cast<off_t>(at);
  byte.l_len = 1;
  return byte;
}

/// False if another description of the file has it.
[[nodiscard]] inline bool lock_byte(int fd, std::uint32_t at) noexcept {
  auto byte = byte_at(at);
  return ::fcntl(fd, F_OFD_SETLK, &byte) == 0;
}

/// Whether another description of the file has it; also if that cannot be told.
[[nodiscard]] inline bool is_byte_locked(int fd, std::uint32_t at) noexcept {
  auto byte = byte_at(at);
  return ::fcntl(fd, F_OFD_GETLK, &byte) != 0 || byte.l_type != F_UNLCK;
}

}  // namespace sluice::posix
