#include "memhandover/broker/runtime_folder.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::memhandover {
namespace {

constexpr auto or_another = ", or name another folder with --runtime-dir or SLUICE_RUNTIME_DIR";

[[noreturn]] void refuse(std::string const& what) {
  throw error{error_kind::invalid_argument, what};
}

std::string name_of_folder(std::string const& wanted) {
  auto dir = wanted.empty() ? environment("SLUICE_RUNTIME_DIR") : wanted;
  if (dir.empty()) {
    auto const users = environment("XDG_RUNTIME_DIR");
    dir = users.empty() ? "/tmp/sluice-" + std::to_string(::geteuid()) : users + "/sluice";
  }
  // A job may change its working folder, and a slash at the end would lead through a symbolic link.
  auto path = std::filesystem::absolute(dir).string();
  while (path.size() > 1 && path.back() == '/') {
    path.pop_back();
  }
  return path;
}

std::string in_octal(mode_t mode) {
  char text[8];
  std::snprintf(text, sizeof text, "%04o", static_cast<unsigned>(mode));
  return text;
}

/// Whether it is there, and as it must be.
bool is_in_order(std::string const& dir) {
  struct stat status {};
  if (::lstat(dir.c_str(), &status) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) {
      return false;
    }
    refuse("cannot look at the runtime folder " + dir + ": " + reason_of(errno) + or_another);
  }
  auto const word = shell_word(dir);
  if (S_ISLNK(status.st_mode)) {
    refuse("the runtime folder " + dir + " is a symbolic link, which may come to lead elsewhere; " +
           "remove it with `rm " + word + "`" + or_another);
  }
  if (!S_ISDIR(status.st_mode)) {
    refuse("the runtime folder " + dir + " is not a folder; remove it with `rm " + word + "`" +
           or_another);
  }
  if (status.st_uid != ::geteuid()) {
    refuse("the runtime folder " + dir + " belongs to user " + std::to_string(status.st_uid) +
           ", and must be yours; have it given to you with `sudo chown -R " +
           std::to_string(::geteuid()) + " " + word + "`" + or_another);
  }
  if (auto const mode = status.st_mode & 07777U; (mode & 0777U) != 0700U) {
    refuse("the runtime folder " + dir + " has mode " + in_octal(mode) +
           ", and must have 0700; run `chmod 0700 " + word + "`" + or_another);
  }
  return true;
}

}  // namespace

std::string check_runtime_dir(std::string const& wanted) {
  auto dir = name_of_folder(wanted);
  (void)is_in_order(dir);
  return dir;
}

std::string prepare_runtime_dir(std::string const& wanted) {
  auto dir = name_of_folder(wanted);
  if (is_in_order(dir)) {
    return dir;
  }
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) {
    auto const why = errno;
    auto const parent = std::filesystem::path{dir}.parent_path().string();
    refuse("cannot create the runtime folder " + dir + ": " + reason_of(why) +
           (why == ENOENT
                ? "; make the folder that it lies in with `mkdir -p " + shell_word(parent) + "`"
                : std::string{}) +
           or_another);
  }
  // Another process may have made it, or whatever is there by now.
  if (!is_in_order(dir)) {
    refuse("the runtime folder " + dir + " is removed as soon as it is made" + or_another);
  }
  return dir;
}

std::optional<pid_t> holder_of_broker_lock(std::string const& runtime_dir) {
  struct stat status {};
  if (::stat((runtime_dir + "/broker.lock").c_str(), &status) != 0) {
    return std::nullopt;
  }
  char file[64];
  std::snprintf(file, sizeof file, "%02x:%02x:%llu", major(status.st_dev), minor(status.st_dev),
                static_cast<unsigned long long>(status.st_ino));
  // To try the lock would be to keep it from a broker that starts.
  std::ifstream locks{"/proc/locks"};
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words{line};
    std::string number;
    std::string kind;
    std::string is_advisory;
    std::string access;
    std::string where;
    pid_t pid = 0;
    words >> number >> kind >> is_advisory >> access >> pid >> where;
    if (words && kind == "FLOCK" && pid > 0 && where == file) {
      return pid;
    }
  }
  return std::nullopt;
}

std::string unreachable_broker(std::string const& runtime_dir, pid_t broker) {
  auto const pid = std::to_string(broker);
  return "the broker of " + runtime_dir + " (pid " + pid +
         ") does not listen there; if it is stopped, let it go on with `kill -CONT " + pid +
         "`, else end it with `kill " + pid +
         "`: whoever uses its pools keeps what he holds and starts another";
}

std::string status_socket_of(std::string const& runtime_dir, int device) {
  return check_runtime_dir(runtime_dir) + "/server-" + std::to_string(device) + ".sock";
}

std::string server_experience_of(std::string const& runtime_dir, int device) {
  return check_runtime_dir(runtime_dir) + "/server-" + std::to_string(device) + ".experience";
}

}  // namespace sluice::memhandover
