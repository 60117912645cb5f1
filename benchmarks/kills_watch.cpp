#include "benchmarks/kills_watch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "memhandover/base/error.hpp"

namespace sluice::bench {
namespace {

namespace fs = std::filesystem;
using memhandover::client_kind;
using memhandover::client_status;
using memhandover::unique_fd;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

unique_fd open_memfd_of(pid_t process, std::string const& name, int flags) {
  std::error_code gone;
  for (auto const& entry :
       fs::directory_iterator{"/proc/" + std::to_string(process) + "/fd", gone}) {
    if (fs::read_symlink(entry.path(), gone).string().rfind("/memfd:" + name, 0) == 0) {
      if (unique_fd found{::open(entry.path().c_str(), flags | O_CLOEXEC)}) {
        return found;
      }
    }
  }
  throw error{error_kind::not_found,
              "process " + std::to_string(process) + " has no " + name + " open"};
}

}  // namespace

ledger_watch::ledger_watch(pid_t broker)
    : ledger_(open_memfd_of(broker, "sluice-ledger", O_RDONLY)),
      mailroom_(open_memfd_of(broker, "sluice-mailroom", O_RDWR)) {
  view_.emplace(ledger_.get(), mailroom_.get(), memhandover::shared_segment::access::read_only);
}

std::optional<std::uint32_t> ledger_watch::slot_of(pid_t process) const {
  for (std::uint32_t slot = 0; slot < memhandover::max_clients; ++slot) {
    auto const& entry = view().clients()[slot];
    auto const pid = static_cast<pid_t>(entry.pid.load());
    if (entry.status.load() == static_cast<std::uint32_t>(client_status::live) &&
        (pid == process || parent_of(pid) == process)) {
      return slot;
    }
  }
  return std::nullopt;
}

std::uint32_t ledger_watch::held_by(std::uint32_t slot) const {
  std::uint32_t held = 0;
  for (std::uint32_t i = 0; i < view().header().chunk_count; ++i) {
    auto const state = view().chunk(i);
    held += !state.is_free() && state.client == slot ? 1 : 0;
  }
  return held;
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> ledger_watch::strays() const {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> found;
  for (std::uint32_t i = 0; i < view().header().chunk_count; ++i) {
    auto const state = view().chunk(i);
    if (!state.is_free() && view().clients()[state.client].status.load() ==
                                static_cast<std::uint32_t>(client_status::empty)) {
      found.emplace_back(i, state.epoch);
    }
  }
  return found;
}

std::uint32_t ledger_watch::leaked() const {
  auto const before = strays();
  if (before.empty()) {
    return 0;
  }
  // A chunk's word and its client's entry are read one after the other: what only looked stray in
  // between has another epoch, or a client, by now.
  ::poll(nullptr, 0, 100);
  auto const after = strays();
  return static_cast<std::uint32_t>(
      std::count_if(before.begin(), before.end(), [&](auto const& chunk) {
        return std::find(after.begin(), after.end(), chunk) != after.end();
      }));
}

pid_t start(std::vector<std::string> const& command) {
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (auto const& word : command) {
    argv.push_back(const_cast<char*>(word.c_str()));  // NOLINT: execvp does not write there
  }
  argv.push_back(nullptr);
  auto const parent = ::getpid();
  auto const child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) {
      ::_exit(1);
    }
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  if (child < 0) {
    throw error{error_kind::unavailable, "cannot start " + command.front()};
  }
  return child;
}

pid_t parent_of(pid_t process) {
  std::ifstream file{"/proc/" + std::to_string(process) + "/stat"};
  std::string line;
  if (!std::getline(file, line)) {
    return 0;
  }
  // The name in field 2 may hold anything; state and parent follow its closing parenthesis.
  std::istringstream rest{line.substr(line.rfind(')') + 1)};
  char state = 0;
  pid_t parent = 0;
  rest >> state >> parent;
  return parent;
}

std::vector<unique_fd> family_of(pid_t process) {
  std::multimap<pid_t, pid_t> children;
  auto const session = ::getsid(process);
  std::error_code failed;
  for (auto const& entry : fs::directory_iterator{"/proc", failed}) {
    auto const pid = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
    // A broker that one of them has just started is about to be nobody's child.
    if (pid > 0 && ::getsid(pid) == session) {
      children.emplace(parent_of(pid), pid);
    }
  }
  std::vector<pid_t> members{process};
  for (std::size_t i = 0; i < members.size(); ++i) {
    auto const [first, last] = children.equal_range(members[i]);
    for (auto child = first; child != last; ++child) {
      members.push_back(child->second);
    }
  }
  std::vector<unique_fd> result;
  for (auto const pid : members) {
    if (unique_fd handle{static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))}) {
      result.push_back(std::move(handle));
    }
  }
  return result;
}

bool await_ends(std::span<unique_fd const> processes, steady_clock::time_point deadline) {
  for (auto const& process : processes) {
    pollfd ended{process.get(), POLLIN, 0};
    auto const left =
        std::chrono::duration_cast<milliseconds>(deadline - steady_clock::now()).count();
    if (::poll(&ended, 1, static_cast<int>(std::max<std::int64_t>(0, left))) != 1) {
      return false;
    }
  }
  return true;
}

}  // namespace sluice::bench
