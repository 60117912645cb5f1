#include "memhandover/device/held_pages.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <spdlog/spdlog.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"

#ifndef USERFAULTFD_IOC_NEW  // since Linux 6.1
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

namespace sluice::memhandover {
namespace {

std::uint64_t address_of(std::byte const* where) noexcept {
  return reinterpret_cast<std::uintptr_t>(where);
}

/// Faults of the kernel included: without them read(2) into a page that is away would fail.
unique_fd open_for_all_faults() {
  constexpr int flags = O_CLOEXEC | O_NONBLOCK;
  unique_fd made{static_cast<int>(::syscall(SYS_userfaultfd, flags))};
  if (!made) {
    auto const refused = errno;
    if (unique_fd const device{::open("/dev/userfaultfd", O_RDWR | O_CLOEXEC)}; device) {
      made = unique_fd{::ioctl(device.get(), USERFAULTFD_IOC_NEW, flags)};
    } else {
      errno = refused;
    }
  }
  return made;
}

/// True: it is done. False: again, since memory is lacking or somebody changes mappings.
bool is_done(int result, char const* what) noexcept {
  if (result == 0) {
    return true;
  }
  if (errno != EAGAIN && errno != ENOMEM && errno != EINTR) {
    spdlog::critical("threads would wait for pages for ever call={} reason=\"{}\"", what,
                     std::strerror(errno));
    std::abort();
  }
  std::this_thread::yield();
  return false;
}

}  // namespace

held_pages::held_pages() : fd_(open_for_all_faults()) {
  uffdio_api wanted{.api = UFFD_API, .features = 0, .ioctls = 0};
  if (!fd_ || ::ioctl(fd_.get(), UFFDIO_API, &wanted) != 0) {
    throw error{error_kind::unsupported,
                "the kernel does not let this process hold who touches its pages (userfaultfd: " +
                    std::string{std::strerror(errno)} +
                    "); it needs CAP_SYS_PTRACE, the right to open /dev/userfaultfd, or "
                    "vm.unprivileged_userfaultfd=1"};
  }
}

std::byte* held_pages::take(std::byte* where, std::size_t bytes) {
  uffdio_register range{
      .range = {address_of(where), bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING, .ioctls = 0};
  if (::ioctl(fd_.get(), UFFDIO_REGISTER, &range) != 0) {
    throw_system_error("cannot hold who touches pages of this process");
  }
  void* const aside = ::mremap(where, bytes, bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, nullptr);
  if (aside == MAP_FAILED) {
    auto const why = errno;
    release(where, bytes);
    errno = why;
    throw_system_error("cannot take pages of this process away");
  }
  return static_cast<std::byte*>(aside);
}

void held_pages::drop(std::byte* aside, std::size_t bytes) noexcept {
  (void)::munmap(aside, bytes);
}

void held_pages::put(std::byte* where, std::byte const* from, std::size_t bytes) noexcept {
  for (std::size_t done = 0; done < bytes;) {
    uffdio_copy copy{.dst = address_of(where) + done,
                     .src = address_of(from) + done,
                     .len = bytes - done,
                     .mode = 0,
                     .copy = 0};
    auto const result = ::ioctl(fd_.get(), UFFDIO_COPY, &copy);
    if (copy.copy > 0) {
      done += static_cast<std::size_t>(copy.copy);
    }
    if (is_done(result, "UFFDIO_COPY")) {
      return;
    }
  }
}

void held_pages::release(std::byte* where, std::size_t bytes) noexcept {
  uffdio_range range{.start = address_of(where), .len = bytes};
  while (!is_done(::ioctl(fd_.get(), UFFDIO_UNREGISTER, &range), "UFFDIO_UNREGISTER")) {
  }
}

void held_pages::vacate(std::byte* where, std::size_t bytes) noexcept {
  (void)::madvise(where, bytes, MADV_DONTNEED);
}

bool held_pages::touched() noexcept {
  uffd_msg message{};
  bool any = false;
  while (::read(fd_.get(), &message, sizeof message) == static_cast<ssize_t>(sizeof message)) {
    any = any || message.event == UFFD_EVENT_PAGEFAULT;
  }
  return any;
}

}  // namespace sluice::memhandover
