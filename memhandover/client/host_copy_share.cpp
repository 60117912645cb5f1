#include "memhandover/client/host_copy_share.hpp"

#include <sys/mman.h>

#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/broker/conversation.hpp"

namespace sluice::memhandover {
namespace {

void keep_from_children(shared_segment const& segment) {
  if (::madvise(segment.data(), segment.bytes(), MADV_DONTFORK) != 0) {
    throw_system_error("cannot keep host copies from forked processes");
  }
}

}  // namespace

host_copy_share::host_copy_share(host_copy_files files, nlohmann::json const& said)
    : files_(std::move(files)),
      table_(files_),
      bytes_(files_.bytes.get(), shared_segment::access::read_write),
      holder_(static_cast<std::uint16_t>(field(said, "holder", copy_holders))) {
  if (field(said, "holder", copy_holders) >= copy_holders ||
      field(said, "bytes", std::uint64_t{0}) != shape().bytes() ||
      field(said, "slot_bytes", std::uint64_t{0}) != shape().slot_bytes) {
    throw error{error_kind::internal, "the host copies are not what the broker's answer says"};
  }
  keep_from_children(table_.segment());
  keep_from_children(bytes_);
}

std::span<std::byte> host_copy_share::at(std::uint32_t slot) const {
  if (slot >= shape().slots) {
    throw error{error_kind::invalid_argument, "there is no slot " + std::to_string(slot) +
                                                  " of host copies, of which there are " +
                                                  std::to_string(shape().slots)};
  }
  return {bytes_.data() + slot * shape().slot_bytes, shape().slot_bytes};
}

}  // namespace sluice::memhandover
