#include "runtime/launcher/descendants.hpp"

#include <dirent.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "memhandover/base/numbers.hpp"

namespace sluice::launcher {
namespace {

/// 0 if there is no such process.
pid_t parent_of(pid_t pid) {
  std::ifstream file{"/proc/" + std::to_string(pid) + "/stat"};
  std::string line;
  std::getline(file, line);
  auto const name_end = line.rfind(')');  // the name may itself contain blanks and parentheses
  if (name_end == std::string::npos) {
    return 0;
  }
  std::istringstream rest{line.substr(name_end + 1)};
  char state = 0;
  pid_t parent = 0;
  rest >> state >> parent;
  return parent;
}

}  // namespace

std::vector<pid_t> children_of_this_process() {
  std::vector<pid_t> result;
  auto const close = [](DIR* folder) { ::closedir(folder); };
  std::unique_ptr<DIR, decltype(close)> const folder{::opendir("/proc"), close};
  if (!folder) {
    spdlog::warn("descendants cannot be found because /proc cannot be read reason=\"{}\"",
                 std::strerror(errno));
    return result;
  }
  auto const self = ::getpid();
  while (auto const* entry = ::readdir(folder.get())) {
    auto const pid = parse_number<pid_t>(entry->d_name);
    if (pid && parent_of(*pid) == self) {
      result.push_back(*pid);
    }
  }
  return result;
}

bool is_of_tree(pid_t pid, pid_t ancestor) {
  while (pid > 1 && pid != ancestor) {
    pid = parent_of(pid);
  }
  return pid == ancestor && ancestor > 0;
}

bool is_broker(pid_t pid) {
  std::ifstream file{"/proc/" + std::to_string(pid) + "/cmdline"};
  std::string program;
  std::string command;
  std::getline(file, program, '\0');
  std::getline(file, command, '\0');
  return command == "broker" && std::filesystem::path{program}.filename() == "sluice";
}

void end_descendants() {
  std::vector<pid_t> beyond_reach;
  for (;;) {
    auto victims = children_of_this_process();
    auto const spared = [&beyond_reach](pid_t pid) {
      return std::find(beyond_reach.begin(), beyond_reach.end(), pid) != beyond_reach.end() ||
             is_broker(pid);
    };
    victims.erase(std::remove_if(victims.begin(), victims.end(), spared), victims.end());
    // A child that has exited stays listed until it is waited for, here alone; and its own children
    // have come to us by then. So once nobody is listed, nobody is left.
    if (victims.empty()) {
      return;
    }
    for (auto const pid : victims) {
      if (::kill(pid, SIGKILL) != 0 && errno == EPERM) {
        spdlog::warn("a process that the command left behind cannot be ended pid={} reason=\"{}\"",
                     pid, std::strerror(EPERM));
        beyond_reach.push_back(pid);
        continue;
      }
      while (::waitpid(pid, nullptr, __WALL) < 0 && errno == EINTR) {
      }
    }
  }
}

}  // namespace sluice::launcher
