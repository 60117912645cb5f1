/// A file for host copies that memory has no room for: a folder is asked for it, and whoever has the descriptor reads and
/// writes whole pieces.
///
/// The file has no name from the moment it is made, and all its blocks are its own: neither a crash leaves it behind, nor does the
/// disk run full under it. What is written is on the disk when `write` returns, past the cache of pages, where the file system
/// can do that (O_DIRECT), else flushed and dropped from it: it is not memory again, and an error is the error of whoever wrote.
///
///   auto const made = create_disk_file({"/var/lib/sluice", 64_GiB});
///   disk_file file{made.get()};
///   file.write(0, contents);
///   file.read(0, contents);
///
/// Source: open(2), fallocate(2), fdatasync(2). Thread-safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/device/disk_room.hpp"

namespace sluice::memhandover {

/// A file without a name, readable and writable by this user alone, with all blocks that it needs. Throws
/// `invalid_argument` for a folder that will not do, `out_of_memory` for one that has not the room, `unsupported`
/// where the file system cannot keep blocks for a file.
[[nodiscard]] unique_fd create_disk_file(disk_wish const& wanted);

/// What the system said of a read or a write.
class disk_error : public error {
 public:
  disk_error(int error_number, std::string const& doing);
  /// An errno.
  [[nodiscard]] int number() const noexcept { return number_; }

 private:
  int number_;
};

class disk_file {
 public:
  /// Opens the file once more, so that errors are told to who caused them. Throws `unavailable` if that cannot be done.
  explicit disk_file(int fd);

  /// Returns when all of it is on the disk. `from` and what is in it begin and end on 4 KiB. Throws `disk_error`; what
  /// the file has there is then unknown.
  void write(std::uint64_t from, std::span<std::byte const> contents);
  /// Fills `into` likewise. What fails is tried again, three times in all. Throws `disk_error`, which an end before that is, too.
  void read(std::uint64_t from, std::span<std::byte> into);

 private:
  template <typename Call>
  [[nodiscard]] int move(Call const& call, std::uint64_t from, std::size_t bytes);
  [[nodiscard]] bool leave_direct() noexcept;

  unique_fd fd_;
  bool direct_ = true;
};

}  // namespace sluice::memhandover
