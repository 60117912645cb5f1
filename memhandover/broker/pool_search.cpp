#include "memhandover/broker/pool_search.hpp"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>

#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {
namespace {

namespace fs = std::filesystem;

/// A process's descriptors of one pool's shared memory, as paths in /proc.
struct shared_memory {
  std::string ledger;
  std::string mailroom;
};

/// What of `target` stands behind `prefix`, up to a blank; nothing if it does not begin with that.
std::optional<std::string> behind(std::string const& target, std::string_view prefix) {
  if (target.rfind(prefix, 0) != 0) {
    return std::nullopt;
  }
  return target.substr(prefix.size(), target.find(' ') - prefix.size());
}

/// The pools that a process holds, by what their shared memory is called.
std::map<std::string, shared_memory> shared_memory_of(fs::path const& process) {
  std::map<std::string, shared_memory> found;
  std::error_code unreadable;  // a process may end, or be another user's, while it is looked at
  for (auto entry = fs::directory_iterator{process / "fd", unreadable};
       !unreadable && entry != fs::directory_iterator{}; entry.increment(unreadable)) {
    std::error_code gone;
    auto const target = fs::read_symlink(entry->path(), gone).string();
    if (auto const name = behind(target, "/memfd:sluice-ledger")) {
      found[*name].ledger = entry->path();
    } else if (auto const other = behind(target, "/memfd:sluice-mailroom")) {
      found[*other].mailroom = entry->path();
    }
  }
  std::erase_if(found, [](auto const& each) { return each.second.ledger.empty(); });
  return found;
}

std::vector<std::string> words_of(fs::path const& process) {
  std::ifstream file{process / "cmdline", std::ios::binary};
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) {
    words.push_back(word);
  }
  return words;
}

std::string command_of(fs::path const& process) {
  std::ifstream file{process / "comm"};
  std::string name;
  std::getline(file, name);
  return name;
}

/// The runtime folder of a `sluice broker`; nothing for another program.
std::optional<std::string> broker_folder(std::vector<std::string> const& words) {
  if (words.size() < 2 || words[1] != "broker") {
    return std::nullopt;
  }
  auto const option = std::find(words.begin(), words.end(), "--runtime-dir");
  return option == words.end() || option + 1 == words.end() ? std::string{} : *(option + 1);
}

bool is_client(ledger_view const& view, int pid) {
  auto const clients = view.clients();
  auto const who = identity_of(pid);
  return std::any_of(clients.begin(), clients.end(), [&](client_entry const& entry) {
    return entry.status.load(std::memory_order_acquire) ==
               static_cast<std::uint32_t>(client_status::live) &&
           process_of(entry).is(who);
  });
}

/// What one process says of the pool that it holds, with itself as the only holder.
found_pool look_into(fs::path const& process, int pid, shared_memory const& shared) {
  found_pool pool;
  pool_holder holder{pid, process_start_ticks(pid), command_of(process), pool_holder::role::other};
  if (auto folder = broker_folder(words_of(process))) {
    holder.is = pool_holder::role::broker;
    pool.runtime_dir = std::move(*folder);
  }
  unique_fd const ledger{::open(shared.ledger.c_str(), O_RDONLY | O_CLOEXEC)};
  unique_fd const mailroom{::open(shared.mailroom.c_str(), O_RDWR | O_CLOEXEC)};
  pool.id = inode_of(ledger.get());
  try {
    if (!ledger || !mailroom) {
      throw error{error_kind::unavailable, "its shared memory cannot be opened"};
    }
    ledger_view const view{ledger.get(), mailroom.get(), shared_segment::access::read_only};
    pool.id = view.header().pool_id;
    pool.shape = view.shape();
    if (holder.is == pool_holder::role::other && is_client(view, pid)) {
      holder.is = pool_holder::role::client;
    }
  } catch (error const& why) {
    pool.problem = why.what();
  }
  pool.holders.push_back(std::move(holder));
  return pool;
}

/// Adds what one process says of a pool to what others have said of it.
void add(found_pool seen, std::vector<found_pool>& pools) {
  auto const known = std::find_if(pools.begin(), pools.end(), [&](found_pool const& pool) {
    return pool.id == seen.id && pool.problem.empty() == seen.problem.empty();
  });
  if (known == pools.end()) {
    pools.push_back(std::move(seen));
    return;
  }
  std::move(seen.holders.begin(), seen.holders.end(), std::back_inserter(known->holders));
  if (!seen.runtime_dir.empty()) {
    known->runtime_dir = std::move(seen.runtime_dir);
  }
}

}  // namespace

bool found_pool::orphaned() const noexcept {
  // What cannot be read may belong to another version, whose clients look like strays.
  return problem.empty() && std::all_of(holders.begin(), holders.end(), [](auto const& holder) {
           return holder.is == pool_holder::role::other;
         });
}

std::vector<found_pool> find_pools() {
  std::vector<found_pool> pools;
  std::error_code failed;
  for (auto const& entry : fs::directory_iterator{"/proc", failed}) {
    auto const pid = pid_of(entry.path());
    if (!pid) {
      continue;
    }
    for (auto const& [name, shared] : shared_memory_of(entry.path())) {
      add(look_into(entry.path(), *pid, shared), pools);
    }
  }
  return pools;
}

int end_orphan(found_pool const& pool) {
  if (!pool.orphaned()) {
    return 0;
  }
  int ended = 0;
  for (auto const& holder : pool.holders) {
    auto const process = open_process(holder.pid, holder.start_ticks);
    if (process && ::syscall(SYS_pidfd_send_signal, process.get(), SIGKILL, nullptr, 0) == 0) {
      ++ended;
    }
  }
  return ended;
}

}  // namespace sluice::memhandover
