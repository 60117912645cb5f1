/// What /proc says of a process, by its pid as text, or as "self": with a pid it names one for good.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace sluice::posix {

/// When it began, in clock ticks since boot; 0 if there is none. Source: proc(5), field 22 of stat.
[[nodiscard]] inline std::uint64_t start_ticks_of(std::string const& process) {
  std::ifstream file{"/proc/" + process + "/stat"};
  std::string line;
  std::getline(file, line);
  // The program's name, the second field, may hold anything; what is counted stands behind its parenthesis.
  auto const name_end = line.rfind(')');
  if (name_end == std::string::npos) {
    return 0;
  }
  std::istringstream rest{line.substr(name_end + 1)};
  constexpr int fields_before = 19;
  std::string field;
  for (int i = 0; i < fields_before; ++i) {
    rest >> field;
  }
  std::uint64_t start = 0;
  rest >> start;
  return start;
}

/// The inode of its namespace of pids; 0 where that cannot be read.
[[nodiscard]] inline std::uint64_t pid_namespace_of(std::string const& process) {
  struct stat found {};
  return ::stat(("/proc/" + process + "/ns/pid").c_str(), &found) == 0 ? found.st_ino : 0;
}

}  // namespace sluice::posix
