#include "memhandover/device/disk_room.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::memhandover {
namespace {

namespace fs = std::filesystem;
using namespace sluice::literals;

bool is_memory(std::string const& folder) {
  struct statfs status {};
  if (::statfs(folder.c_str(), &status) != 0) {
    return false;
  }
  auto const type = static_cast<std::uint64_t>(status.f_type) & 0xffff'ffffU;
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

std::string for_copies(disk_wish const& wanted) {
  return "host copies are to have " + format_bytes(wanted.bytes) + " on the disk of " +
         wanted.folder;
}

std::string instead_of(std::uint64_t most) {
  return most < 1_MiB ? "choose another folder"
                      : "ask for " + std::to_string(most / 1_MiB) +
                            "MiB at most (--host-disk of `sluice run`, host_copies.disk of the "
                            "policy), or choose another folder";
}

}  // namespace

std::optional<std::string> refusal_of_folder(std::string const& folder) {
  std::error_code failed;
  auto const type = fs::status(folder, failed).type();
  if (type == fs::file_type::not_found) {
    return "there is no folder " + folder + "; create it, or name another for host copies on disk";
  }
  if (type != fs::file_type::directory) {
    return folder +
           (failed ? " cannot be looked at: " + failed.message()
                   : std::string{" is not a folder"}) +
           "; name a folder for host copies on disk";
  }
  if (::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) != 0) {
    return "no file can be created in " + folder + ": " + reason_of(errno) +
           "; name a folder for host copies that you can write to";
  }
  if (is_memory(folder)) {
    return folder +
           " is in memory (tmpfs), so that copies there would take what they are to save; name a "
           "folder on a disk, or ask for more host_copies.memory";
  }
  return std::nullopt;
}

disk_room read_disk_room(std::string const& folder) {
  struct statvfs status {};
  if (::statvfs(folder.c_str(), &status) != 0) {
    throw system_error("cannot tell how much room " + folder + " has");
  }
  auto const block = static_cast<std::uint64_t>(status.f_frsize);
  return {status.f_blocks * block, status.f_bavail * block};
}

std::optional<std::string> refusal_of_disk(disk_wish const& wanted, disk_room const& room) {
  auto const most = room.most - std::min(room.most, disk_headroom);
  if (wanted.bytes <= most) {
    return std::nullopt;
  }
  return for_copies(wanted) + ", which has " + format_bytes(room.most) + ", of which " +
         format_bytes(disk_headroom) + " stay free; " + instead_of(most);
}

std::optional<std::string> shortage_of_disk(disk_wish const& wanted, disk_room const& room) {
  auto const most = room.available - std::min(room.available, disk_headroom);
  if (wanted.bytes <= most) {
    return std::nullopt;
  }
  return for_copies(wanted) + ", where " + format_bytes(room.available) +
         " are available, of which " + format_bytes(disk_headroom) + " stay free; " +
         instead_of(most);
}

}  // namespace sluice::memhandover
