#include "memhandover/device/host_room.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "memhandover/base/bytes.hpp"

namespace sluice::memhandover {
namespace {

namespace fs = std::filesystem;
using namespace sluice::literals;

constexpr auto unlimited = std::numeric_limits<std::uint64_t>::max();

/// The number after `key` in a file of words; nothing if it has none.
std::optional<std::uint64_t> number_after(fs::path const& file, std::string const& key) {
  std::ifstream words{file};
  for (std::string word; words >> word;) {
    std::uint64_t value = 0;
    if (word == key && words >> value) {
      return value;
    }
  }
  return std::nullopt;
}

/// The only number of a file; nothing for "max", or without the file.
std::optional<std::uint64_t> number_in(fs::path const& file) {
  std::ifstream text{file};
  std::uint64_t value = 0;
  return text >> value ? std::optional{value} : std::nullopt;
}

/// What the files of a version of memory cgroups are called.
struct cgroup_files {
  char const* limit;
  char const* used;
  char const* idle_cache;  ///< key in memory.stat: pages that are given up before anything dies
};
constexpr cgroup_files version_2{"memory.max", "memory.current", "inactive_file"};
constexpr cgroup_files version_1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                                 "total_inactive_file"};

void narrow(host_room& room, fs::path const& folder, std::string const& name,
            cgroup_files const& files) {
  auto const limit = number_in(folder / files.limit);
  // Version 1 writes a number beyond any memory where there is no limit.
  if (!limit || *limit >= unlimited / 4) {
    return;
  }
  auto const set_by = "the limit of the memory cgroup " + name;
  if (*limit < room.most) {
    room.most = *limit;
    room.most_set_by = set_by;
  }
  auto const used = number_in(folder / files.used).value_or(0);
  auto const cache = number_after(folder / "memory.stat", files.idle_cache).value_or(0);
  auto const kept = used - std::min(used, cache);
  auto const available = *limit - std::min(*limit, kept);
  if (available < room.available) {
    room.available = available;
    room.available_set_by = set_by;
  }
}

/// The cgroup and all above it. In a container the mounted tree may begin further down than the path
/// says; then what can be seen of it counts.
void narrow_by_all(host_room& room, fs::path const& mount, std::string const& group,
                   cgroup_files const& files) {
  auto name = fs::path{group}.lexically_normal();
  for (;;) {
    auto const folder = mount / name.relative_path();
    std::error_code unreadable;
    if (fs::is_directory(folder, unreadable)) {
      narrow(room, folder, name.string(), files);
    }
    if (!name.has_relative_path()) {
      return;
    }
    name = name.parent_path();
  }
}

bool lists(std::string const& controllers, std::string const& wanted) {
  std::istringstream list{controllers};
  for (std::string name; std::getline(list, name, ',');) {
    if (name == wanted) {
      return true;
    }
  }
  return false;
}

/// What a budget can be to fit, in words: whole MiB, so that it can be given as it stands there.
std::string instead_of(std::uint64_t most, std::uint64_t slot_bytes) {
  auto const whole = most / 1_MiB * 1_MiB;
  return whole >= slot_bytes ? "ask for " + std::to_string(whole / 1_MiB) +
                                   "MiB at most (--host-memory of `sluice run`, host_copies.memory "
                                   "of the policy)"
                             : "ask for none";
}

}  // namespace

host_room read_host_room(fs::path const& root) {
  auto const meminfo = root / "proc/meminfo";
  auto bytes_of = [&](char const* key) {
    auto const kib = number_after(meminfo, key);
    return kib ? *kib << 10U : unlimited;
  };
  host_room room{bytes_of("MemTotal:"), "the machine", bytes_of("MemAvailable:"), "the machine"};
  std::ifstream groups{root / "proc/self/cgroup"};
  for (std::string line; std::getline(groups, line);) {
    auto const first = line.find(':');
    auto const second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) {
      continue;
    }
    auto const controllers = line.substr(first + 1, second - first - 1);
    auto const group = line.substr(second + 1);
    if (controllers.empty()) {
      narrow_by_all(room, root / "sys/fs/cgroup", group, version_2);
      narrow_by_all(room, root / "sys/fs/cgroup/unified", group, version_2);
    } else if (lists(controllers, "memory")) {
      narrow_by_all(room, root / "sys/fs/cgroup/memory", group, version_1);
    }
  }
  return room;
}

std::uint64_t untouched_bytes(int memfd, std::uint64_t bytes) noexcept {
  struct stat status {};
  if (::fstat(memfd, &status) != 0) {
    return 0;
  }
  constexpr std::uint64_t block = 512;
  return bytes - std::min(bytes, static_cast<std::uint64_t>(status.st_blocks) * block);
}

std::optional<std::string> shortage(std::uint64_t untouched, host_room const& room) {
  if (untouched <= room.available) {
    return std::nullopt;
  }
  return format_bytes(untouched) + " of pools on the host have not been used yet, but " +
         format_bytes(room.available) + " of memory are available (" + room.available_set_by +
         "); as more is used, the system may end processes";
}

std::optional<std::string> refusal_of_host_copies(std::uint64_t budget, std::uint64_t slot_bytes,
                                                  std::uint64_t pool_bytes, host_room const& room) {
  auto const most = room.most - std::min(room.most, pool_bytes + host_copies_headroom);
  if (budget <= most) {
    return std::nullopt;
  }
  return "host copies are to have " + format_bytes(budget) + ", but of the " +
         format_bytes(room.most) + " that there are (" + room.most_set_by + "), " +
         format_bytes(pool_bytes) + " are for pools on the host and " +
         format_bytes(host_copies_headroom) + " stay free; " + instead_of(most, slot_bytes);
}

std::optional<std::string> shortage_of_host_copies(std::uint64_t budget, host_room const& room) {
  if (budget + host_copies_headroom <= room.available) {
    return std::nullopt;
  }
  return "host copies are to have " + format_bytes(budget) + ", but only " +
         format_bytes(room.available) + " of memory are available now (" + room.available_set_by +
         "), of which " + format_bytes(host_copies_headroom) +
         " stay free; what is missing is made present when there is room for it";
}

}  // namespace sluice::memhandover
