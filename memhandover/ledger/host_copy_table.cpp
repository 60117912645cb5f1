#include "memhandover/ledger/host_copy_table.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <span>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::memhandover {
namespace {

unique_fd make_memfd(char const* name, std::uint64_t bytes) {
  auto fd =
      beside_standard_streams(unique_fd{::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)});
  // Who maps it must never see it shrink under its feet.
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error("cannot create " + format_bytes(bytes) + " of host copies");
  }
  return fd;
}

std::span<std::byte> all_of(shared_segment const& segment) {
  return {segment.data(), segment.bytes()};
}

struct stat status_of(unique_fd const& fd) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) {
    throw_system_error("cannot read what a descriptor of host copies is");
  }
  return status;
}

/// What could become shorter would take down whoever reads it then.
int sealed(unique_fd const& fd) {
  auto const seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    throw error{error_kind::internal,
                "the memory of host copies is not sealed, so that it may become shorter"};
  }
  return fd.get();
}

std::uint64_t bytes_of(unique_fd const& fd) {
  return static_cast<std::uint64_t>(status_of(fd).st_size);
}

void expect_bytes(char const* what, std::uint64_t said, std::uint64_t found) {
  if (said != found) {
    throw error{error_kind::internal, "the table of host copies is damaged: it tells of " +
                                          std::to_string(said) + ' ' + what + ", but there are " +
                                          std::to_string(found)};
  }
}

bool same_file(unique_fd const& one, unique_fd const& other) {
  auto const a = status_of(one);
  auto const b = status_of(other);
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

host_copy_files create_host_copies(std::uint64_t budget, std::uint64_t slot_bytes, unique_fd disk) {
  auto const slots = host_copy_slots(budget, slot_bytes);
  auto const disk_bytes = disk ? bytes_of(disk) : 0;
  auto const disk_slots = disk_copy_slots(disk_bytes, slot_bytes);
  host_copy_files files;
  files.disk = std::move(disk);
  files.bytes = make_memfd("sluice-host-copies", slots * slot_bytes);
  files.table = make_memfd("sluice-host-copy-table", host_copies_table_bytes(slots + disk_slots));
  shared_segment const segment{files.table.get(), shared_segment::access::read_write};
  make_host_copies(all_of(segment), budget, slot_bytes, disk_bytes);
  return files;
}

host_copy_files duplicate(host_copy_files const& files) {
  return {duplicate(files.bytes.get()), duplicate(files.table.get()),
          files.disk ? duplicate(files.disk.get()) : unique_fd{}};
}

bool same_memory(host_copy_files const& one, host_copy_files const& other) {
  return same_file(one.bytes, other.bytes) && same_file(one.table, other.table) &&
         static_cast<bool>(one.disk) == static_cast<bool>(other.disk) &&
         (!one.disk || same_file(one.disk, other.disk));
}

host_copy_table::host_copy_table(host_copy_files const& files)
    : segment_(sealed(files.table), shared_segment::access::read_write),
      shape_(host_copies_shape_in(all_of(segment_))),
      header_(&host_copies_header_in(all_of(segment_))),
      copies_(host_copies_words(all_of(segment_), shape_), shape_.disk_slots) {
  (void)sealed(files.bytes);
  expect_bytes("bytes", shape_.bytes(), bytes_of(files.bytes));
  expect_bytes("bytes on disk", shape_.disk_bytes(), files.disk ? bytes_of(files.disk) : 0);
}

}  // namespace sluice::memhandover
