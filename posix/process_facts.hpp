/// What /proc says of a process, by its pid as text, or as "self": with a pid it names one for good.
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace sluice::posix {

/// The fields of its stat from the third on; empty if there is none. Source: proc(5).
[[nodiscard]] inline std::string stat_behind_name(std::string const& process) {
  std::ifstream file{"/proc/" + process + "/stat"};
  std::string line;
  std::getline(file, line);
  // The program's name, the second field, may hold anything; what is counted stands behind its parenthesis.
  auto const name_end = line.rfind(')');
  return name_end == std::string::npos ? "" : line.substr(name_end + 1);
}

/// Whether a signal or a tracer has stopped it; field 3 of stat.
[[nodiscard]] inline bool is_stopped(std::string const& process) {
  char state = 0;
  std::istringstream{stat_behind_name(process)} >> state;
  return state == 'T' || state == 't';
}

/// When it began, in clock ticks since boot; 0 if there is none. Field 22 of stat.
[[nodiscard]] inline std::uint64_t start_ticks_of(std::string const& process) {
  std::istringstream rest{stat_behind_name(process)};
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
