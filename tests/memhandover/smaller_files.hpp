/// Writes that fail: beyond a size, files of this process do not grow, nor are they written.
#pragma once

#include <sys/resource.h>

#include <csignal>

namespace sluice::test {

/// The limit of a file's size for as long as it lives.
class smaller_files {
 public:
  explicit smaller_files(rlim_t bytes) {
    before_ = ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &was_);
    rlimit const now{bytes, was_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  smaller_files(smaller_files const&) = delete;
  smaller_files& operator=(smaller_files const&) = delete;
  ~smaller_files() {
    ::setrlimit(RLIMIT_FSIZE, &was_);
    ::signal(SIGXFSZ, before_);
  }

 private:
  rlimit was_{};
  void (*before_)(int) = nullptr;
};

}  // namespace sluice::test
