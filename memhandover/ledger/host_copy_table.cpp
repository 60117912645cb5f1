#include "memhandover/ledger/host_copy_table.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <span>

#include "memhandover/base/bytes.hpp"
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

}  // namespace

host_copy_files create_host_copies(std::uint64_t budget, std::uint64_t slot_bytes) {
  auto const slots = host_copy_slots(budget, slot_bytes);
  host_copy_files files{make_memfd("sluice-host-copies", slots * slot_bytes),
                        make_memfd("sluice-host-copy-table", host_copies_table_bytes(slots))};
  shared_segment const segment{files.table.get(), shared_segment::access::read_write};
  make_host_copies(all_of(segment), budget, slot_bytes);
  return files;
}

host_copy_table::host_copy_table(int table_fd)
    : segment_(table_fd, shared_segment::access::read_write),
      header_(&host_copies_header_in(all_of(segment_))),
      copies_(host_copies_words(all_of(segment_))) {}

}  // namespace sluice::memhandover
