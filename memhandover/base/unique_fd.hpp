/// Owns one file descriptor; closes it when it goes out of scope.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace sluice::memhandover {

class unique_fd {
 public:
  unique_fd() noexcept = default;
  explicit unique_fd(int fd) noexcept : fd_(fd) {}
  unique_fd(unique_fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  unique_fd& operator=(unique_fd&& other) noexcept {
    if (this != &other) {
      reset(std::exchange(other.fd_, -1));
    }
    return *this;
  }
  unique_fd(unique_fd const&) = delete;
  unique_fd& operator=(unique_fd const&) = delete;
  ~unique_fd() { reset(); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  [[nodiscard]] explicit operator bool() const noexcept { return fd_ >= 0; }
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept {
    if (fd_ >= 0) {
      ::close(fd_);
    }
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

/// A second, close-on-exec descriptor of the same open file, none of the standard streams; empty if the
/// process has no descriptors left.
[[nodiscard]] inline unique_fd duplicate(int fd) noexcept {
  return unique_fd{::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1)};
}

}  // namespace sluice::memhandover
