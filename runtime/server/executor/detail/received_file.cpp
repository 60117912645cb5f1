#include "runtime/server/executor/detail/received_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "memhandover/base/system_error.hpp"

namespace sluice::server::detail {
namespace {

constexpr int beside_standard_streams = STDERR_FILENO + 1;
constexpr int most_descriptors = 1024;

std::byte* map(int file, std::size_t bytes) {
  auto* const begin = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  if (begin == MAP_FAILED) {
    throw memhandover::system_error("cannot map the tensors of a message");
  }
  return static_cast<std::byte*>(begin);
}

}  // namespace

received_file::received_file(int file, std::size_t bytes) : bytes_{bytes} {
  memhandover::unique_fd mine{::fcntl(file, F_DUPFD_CLOEXEC, beside_standard_streams)};
  if (!mine || mine.get() >= most_descriptors) {
    mapped_ = map(file, bytes_);
  } else {
    file_ = std::move(mine);
  }
}

received_file::~received_file() {
  if (auto* const mapped = mapped_.load()) {
    ::munmap(mapped, bytes_);
  }
}

std::byte* received_file::bring() {
  if (auto* const mapped = mapped_.load(std::memory_order_acquire)) {
    return mapped;
  }
  std::lock_guard const lock{mapping_};
  if (mapped_.load(std::memory_order_relaxed) == nullptr) {
    mapped_.store(map(file_.get(), bytes_), std::memory_order_release);
  }
  return mapped_.load(std::memory_order_relaxed);
}

void received_file::read(std::size_t begin, std::span<std::byte> to) {
  if (auto const* const mapped = mapped_.load(std::memory_order_acquire)) {
    std::copy_n(mapped + begin, to.size(), to.data());
    return;
  }
  while (!to.empty()) {
    auto const got = ::pread(file_.get(), to.data(), to.size(), static_cast<off_t>(begin));
    if (got <= 0 && !(got < 0 && errno == EINTR)) {
      throw memhandover::system_error("cannot read the tensors of a message");
    }
    auto const done = static_cast<std::size_t>(std::max<ssize_t>(got, 0));
    to = to.subspan(done);
    begin += done;
  }
}

}  // namespace sluice::server::detail
