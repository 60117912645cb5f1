/// Private pages of this process that can be taken away under threads which use them: whoever touches one waits in the kernel
/// until it has contents again.
///
///   there ──take──► away, the contents lie aside ──put──► there again, and who waited goes on
///                        └──────────release──────────► zero
///
///   held_pages pages;
///   auto* const aside = pages.take(where, bytes);  // from now on who touches them waits
///   std::memcpy(copy, aside, bytes);
///   pages.drop(aside, bytes);
///   if (pages.touched()) {
///     pages.put(where, copy, bytes);
///     pages.release(where, bytes);  // they are pages as any others
///   }
///
/// Source: userfaultfd(2) and ioctl_userfaultfd(2), mremap(2) with MREMAP_DONTUNMAP, which moves pages in one step: no
/// write is lost and none falls in between. Accesses of the kernel for this process (read(2) into such a page) wait as well,
/// for which the process needs the right to say so: CAP_SYS_PTRACE, /dev/userfaultfd, or `vm.unprivileged_userfaultfd` = 1.
/// What a device is writing by itself into pages that are being taken (O_DIRECT) is not waited for.
///
/// A forked child does not inherit the holding: what is away reads as zeros there. Addresses and sizes are whole pages.
/// Thread-safety: one thread; the ranges may be in use by any.
#pragma once

#include <cstddef>

#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {

class held_pages {
 public:
  /// Throws `unsupported` where the kernel does not let this process do it, with what would be needed.
  held_pages();

  /// Moves the pages of `where`, which is private and anonymous, and returns where they lie now. Throws what the system says;
  /// then they are where they were, and nobody waits for good.
  [[nodiscard]] std::byte* take(std::byte* where, std::size_t bytes);
  /// Ends what `take` has returned.
  void drop(std::byte* aside, std::size_t bytes) noexcept;
  /// Copies `from` to pages that were taken. Where there is no memory for them it waits until there is.
  void put(std::byte* where, std::byte const* from, std::size_t bytes) noexcept;
  /// Nobody waits for what was taken there any more: what has not been put is zero.
  void release(std::byte* where, std::size_t bytes) noexcept;
  /// Gives the memory of pages back that nobody uses; they are zero from then on.
  static void vacate(std::byte* where, std::size_t bytes) noexcept;

  /// Whether somebody has begun to wait since this was asked last. Never waits.
  [[nodiscard]] bool touched() noexcept;

 private:
  unique_fd fd_;
};

}  // namespace sluice::memhandover
