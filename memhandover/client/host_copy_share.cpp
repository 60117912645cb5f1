#include "memhandover/client/host_copy_share.hpp"

#include <sys/mman.h>

#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/broker/conversation.hpp"

namespace sluice::memhandover {
namespace {

void keep_from_children(std::byte* where, std::size_t bytes) {
  if (::madvise(where, bytes, MADV_DONTFORK) != 0) {
    throw_system_error("cannot keep host copies from forked processes");
  }
}

std::byte* map_pages(std::size_t bytes) {
  auto* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw_system_error("cannot map memory for copies to and from the disk");
  }
  return static_cast<std::byte*>(mapped);
}

[[noreturn]] void refuse_slot(std::uint32_t slot, std::string const& of_what,
                              std::uint32_t there_are) {
  throw error{error_kind::invalid_argument, "there is no slot " + std::to_string(slot) + " of " +
                                                of_what + ", of which there are " +
                                                std::to_string(there_are)};
}

}  // namespace

host_copy_share::host_copy_share(host_copy_files files, nlohmann::json const& said)
    : files_(std::move(files)),
      table_(files_),
      bytes_(files_.bytes.get(), shared_segment::access::read_write),
      holder_(static_cast<std::uint16_t>(field(said, "holder", copy_holders))) {
  if (field(said, "holder", copy_holders) >= copy_holders ||
      field(said, "bytes", std::uint64_t{0}) != shape().bytes() ||
      field(said, "slot_bytes", std::uint64_t{0}) != shape().slot_bytes ||
      field(said, "disk_bytes", std::uint64_t{0}) != shape().disk_bytes()) {
    throw error{error_kind::internal, "the host copies are not what the broker's answer says"};
  }
  keep_from_children(table_.segment().data(), table_.segment().bytes());
  keep_from_children(bytes_.data(), bytes_.bytes());
  if (files_.disk) {
    disk_.emplace(files_.disk.get());
    auto const bytes = staged * shape().slot_bytes;
    staging_ = {map_pages(bytes), unmapping{bytes}};
    keep_from_children(staging_.get(), bytes);
  }
}

void host_copy_share::unmapping::operator()(std::byte* where) const noexcept {
  ::munmap(where, bytes);
}

std::span<std::byte> host_copy_share::at(std::uint32_t slot) const {
  if (slot >= shape().memory_slots()) {
    refuse_slot(slot, "host copies in memory", shape().memory_slots());
  }
  return {bytes_.data() + slot * shape().slot_bytes, shape().slot_bytes};
}

std::uint64_t host_copy_share::disk_offset(std::uint32_t slot) const {
  if (!shape().is_on_disk(slot) || slot >= shape().slots) {
    refuse_slot(slot, "host copies on the disk", shape().disk_slots);
  }
  return (slot - shape().memory_slots()) * shape().slot_bytes;
}

}  // namespace sluice::memhandover
