#include "memhandover/base/system_error.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace sluice::memhandover {
namespace {

/// Empty where the system's text says it all.
std::string_view remedy_for(int error_number) {
  switch (error_number) {
    case EFBIG:
      return "the limit of a file's size (ulimit -f) holds for shared memory too: raise it";
    case EMFILE:
      return "raise the limit of open files (ulimit -n)";
    case ENFILE:
      return "raise the machine's limit of open files (sysctl fs.file-max)";
    case EAGAIN:
      return "raise the limit of processes (ulimit -u) or of address space (ulimit -v)";
    case ENOMEM:
      return "the limit of address space (ulimit -v) or the machine's memory is too small";
    case ENOSPC:
      return "make room on that file system";
    case EDQUOT:
      return "make room, the user's quota is used up";
    default:
      return {};
  }
}

}  // namespace

std::string reason_of(int error_number) {
  std::string text = std::strerror(error_number);
  if (auto const remedy = remedy_for(error_number); !remedy.empty()) {
    text += "; ";
    text += remedy;
  }
  return text;
}

error system_error(std::string const& doing, error_kind otherwise, int error_number) {
  auto kind = otherwise;
  if (error_number == ENOMEM) {
    kind = error_kind::out_of_memory;
  } else if (error_number == EACCES || error_number == EPERM || error_number == EROFS ||
             !remedy_for(error_number).empty()) {
    kind = error_kind::unavailable;
  }
  return error{kind, doing + ": " + reason_of(error_number)};
}

void throw_system_error(std::string const& doing) {
  throw system_error(doing, error_kind::internal);
}

std::string shell_word(std::string const& path) {
  auto const plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view{"_./+-@%:,="}.find(c) != std::string_view::npos;
  };
  if (!path.empty() && std::all_of(path.begin(), path.end(), plain)) {
    return path;
  }
  std::string word{'\''};
  for (char const c : path) {
    word += c == '\'' ? std::string{"'\\''"} : std::string{c};
  }
  return word + '\'';
}

}  // namespace sluice::memhandover
