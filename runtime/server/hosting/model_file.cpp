#include "runtime/server/hosting/model_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::server {
namespace {

/// The kernel reads less than 2 GiB at once.
constexpr std::size_t most_at_once = std::size_t{1} << 30U;

}  // namespace

model_file::model_file(std::filesystem::path path)
    : path_(std::move(path)), file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  int const code = errno;
  struct stat seen {};
  if (!file_ && code != ENOENT) {
    throw error{error_kind::not_found, fmt::format("the file {} cannot be opened: {}",
                                                   path_.string(), memhandover::reason_of(code))};
  }
  if (!file_ || ::fstat(file_.get(), &seen) != 0 || !S_ISREG(seen.st_mode)) {
    throw error{error_kind::not_found, fmt::format("there is no file {}", path_.string())};
  }
  first_ = look();
}

model_file::state model_file::look() const {
  struct stat seen {};
  if (::fstat(file_.get(), &seen) != 0) {
    throw error{error_kind::internal, fmt::format("the state of the file {} is not to be had: {}",
                                                  path_.string(), memhandover::reason_of(errno))};
  }
  return {.device = seen.st_dev,
          .inode = seen.st_ino,
          .bytes = static_cast<std::uint64_t>(seen.st_size),
          .modified_s = seen.st_mtim.tv_sec,
          .modified_ns = seen.st_mtim.tv_nsec,
          .changed_s = seen.st_ctim.tv_sec,
          .changed_ns = seen.st_ctim.tv_nsec};
}

std::string model_file::fingerprint() const {
  return fmt::format("device={} inode={} bytes={} modified={}.{} changed={}.{}", first_.device,
                     first_.inode, first_.bytes, first_.modified_s, first_.modified_ns,
                     first_.changed_s, first_.changed_ns);
}

/// Losing its name changes the inode too (`changed`), but nothing that is read.
void model_file::check_unchanged() const {
  auto const now = look();
  if (now.bytes != first_.bytes || now.modified_s != first_.modified_s ||
      now.modified_ns != first_.modified_ns) {
    throw error{error_kind::unavailable,
                fmt::format("{} has been written to since the server opened it; start the server "
                            "again, and give a model that is served another file instead",
                            path_.string())};
  }
}

void model_file::read(std::uint64_t offset, std::span<std::byte> to) const {
  std::size_t done = 0;
  while (done < to.size()) {
    auto const got =
        ::pread(file_.get(), to.data() + done, std::min(to.size() - done, most_at_once),
                static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      int const code = got == 0 ? 0 : errno;
      check_unchanged();
      throw error{error_kind::internal,
                  fmt::format("reading {} failed: {}", path_.string(),
                              code == 0 ? "it ends too early" : memhandover::reason_of(code))};
    }
    done += static_cast<std::size_t>(got);
    read_ += static_cast<std::size_t>(got);
  }
  check_unchanged();  // after reading: what was read before a change is sound
}

}  // namespace sluice::server
