#include "memhandover/client/host_copy_share.hpp"

#include <sys/mman.h>

#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"

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
      table_(files_.table.get()),
      bytes_(files_.bytes.get(), shared_segment::access::read_write),
      holder_(said.at("holder").get<std::uint16_t>()) {
  if (holder_ >= copy_holders || bytes_.bytes() < table_.bytes() ||
      said.at("bytes") != table_.bytes() || said.at("slot_bytes") != table_.header().slot_bytes) {
    throw error{error_kind::internal, "the host copies are not what the broker's answer says"};
  }
  keep_from_children(table_.segment());
  keep_from_children(bytes_);
}

std::span<std::byte> host_copy_share::at(std::uint32_t slot) const {
  auto const& header = table_.header();
  if (slot >= header.slots) {
    throw error{error_kind::invalid_argument, "there is no slot " + std::to_string(slot) +
                                                  " of host copies, of which there are " +
                                                  std::to_string(header.slots)};
  }
  return {bytes_.data() + slot * header.slot_bytes, header.slot_bytes};
}

}  // namespace sluice::memhandover
