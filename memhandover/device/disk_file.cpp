#include "memhandover/device/disk_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::memhandover {
namespace {

namespace fs = std::filesystem;

constexpr int attempts_to_read = 3;

/// It has a name for as long as it is empty.
unique_fd make_nameless(std::string const& folder) {
  auto path = (fs::path{folder} / "sluice-host-copies-XXXXXX").string();
  auto fd = beside_standard_streams(unique_fd{::mkostemp(path.data(), O_CLOEXEC)});
  if (!fd || ::unlink(path.c_str()) != 0) {
    throw system_error("cannot create a file for host copies in " + folder);
  }
  return fd;
}

}  // namespace

unique_fd create_disk_file(disk_wish const& wanted) {
  if (auto const why = refusal_of_folder(wanted.folder)) {
    throw error{error_kind::invalid_argument, *why};
  }
  if (auto const why = shortage_of_disk(wanted, read_disk_room(wanted.folder))) {
    throw error{error_kind::out_of_memory, *why};
  }
  auto fd = make_nameless(wanted.folder);
  while (::fallocate(fd.get(), 0, 0, static_cast<off_t>(wanted.bytes)) != 0) {
    if (errno == EOPNOTSUPP) {
      throw error{error_kind::unsupported,
                  "the file system of " + wanted.folder +
                      " cannot keep blocks for a file (fallocate), so that host copies there could "
                      "be lost to a full disk; name a folder on ext4, XFS or another that can"};
    }
    if (errno != EINTR) {
      throw system_error("cannot keep " + format_bytes(wanted.bytes) + " for host copies in " +
                         wanted.folder);
    }
  }
  return fd;
}

disk_error::disk_error(int error_number, std::string const& doing)
    : error(error_kind::unavailable, doing + ": " + reason_of(error_number)),
      number_(error_number) {}

disk_file::disk_file(int fd) {
  auto const path = "/proc/self/fd/" + std::to_string(fd);
  auto const open = [&path](int more) {
    return beside_standard_streams(unique_fd{::open(path.c_str(), O_RDWR | O_CLOEXEC | more)});
  };
  fd_ = open(O_DIRECT);
  if (!fd_ && errno == EINVAL) {
    direct_ = false;
    fd_ = open(0);
  }
  if (!fd_) {
    throw system_error("cannot open the file of host copies");
  }
}

/// True: the next attempt goes through the cache of pages, since the file system does not take these past it.
bool disk_file::leave_direct() noexcept {
  auto const flags = ::fcntl(fd_.get(), F_GETFL);
  return std::exchange(direct_, false) && flags >= 0 &&
         ::fcntl(fd_.get(), F_SETFL, flags & ~O_DIRECT) == 0;
}

/// Calls until all is moved; the errno of the call that failed, or 0.
template <typename Call>
int disk_file::move(Call const& call, std::uint64_t from, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    auto const moved = call(done, static_cast<off_t>(from + done));
    if (moved == 0) {
      return EIO;  // the file has become shorter
    }
    if (moved > 0) {
      done += static_cast<std::size_t>(moved);
    } else if (errno != EINTR && !(errno == EINVAL && leave_direct())) {
      return errno;
    }
  }
  return 0;
}

void disk_file::write(std::uint64_t from, std::span<std::byte const> contents) {
  auto failed = move(
      [&](std::size_t done, off_t at) {
        return ::pwrite(fd_.get(), contents.data() + done, contents.size() - done, at);
      },
      from, contents.size());
  if (failed == 0 && !direct_) {
    failed = ::fdatasync(fd_.get()) == 0 ? 0 : errno;
    (void)::posix_fadvise(fd_.get(), static_cast<off_t>(from), static_cast<off_t>(contents.size()),
                          POSIX_FADV_DONTNEED);
  }
  if (failed != 0) {
    throw disk_error{failed, "cannot write host copies to the disk"};
  }
}

void disk_file::read(std::uint64_t from, std::span<std::byte> into) {
  int failed = 0;
  for (int attempt = 0; attempt < attempts_to_read; ++attempt) {
    failed = move(
        [&](std::size_t done, off_t at) {
          return ::pread(fd_.get(), into.data() + done, into.size() - done, at);
        },
        from, into.size());
    if (failed == 0) {
      break;
    }
  }
  if (failed == 0 && !direct_) {
    (void)::posix_fadvise(fd_.get(), static_cast<off_t>(from), static_cast<off_t>(into.size()),
                          POSIX_FADV_DONTNEED);
  }
  if (failed != 0) {
    throw disk_error{failed, "cannot read host copies from the disk"};
  }
}

}  // namespace sluice::memhandover
