#include "memhandover/broker/detail/broker_place.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/wire.hpp"
#include "memhandover/broker/runtime_folder.hpp"

namespace sluice::memhandover::detail {
namespace {

/// From the first thing that changes in the folder to the look at it.
constexpr std::chrono::milliseconds until_a_look{500};

bool is_at(std::string const& path, struct stat const& file) {
  struct stat there {};
  return ::lstat(path.c_str(), &there) == 0 && there.st_ino == file.st_ino &&
         there.st_dev == file.st_dev;
}

bool is_at(std::string const& path, unique_fd const& file) {
  struct stat own {};
  return ::fstat(file.get(), &own) == 0 && is_at(path, own);
}

/// What is at a path and is in the way; what it is, and how to remove it.
error in_the_way(std::string const& path, int error_number) {
  bool const is_folder = error_number == EISDIR;
  if (is_folder || error_number == ELOOP) {
    return error{error_kind::unavailable, path + " is a " +
                                              (is_folder ? "folder" : "symbolic link") +
                                              "; remove it with `rm -r " + shell_word(path) + "`"};
  }
  return system_error("cannot open " + path, error_kind::unavailable, error_number);
}

}  // namespace

broker_place::broker_place(std::string runtime_dir) : runtime_dir_(std::move(runtime_dir)) {
  take();
  listen();
  watch_folder();
}

/// The lock of the file that has its name now.
void broker_place::take() {
  auto const file = path("broker.lock");
  do {
    lock_ = unique_fd{::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)};
    if (!lock_) {
      throw in_the_way(file, errno);
    }
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) {
        throw system_error("cannot lock " + file);
      }
      throw error{error_kind::already_exists, "a broker already runs in " + runtime_dir_};
    }
  } while (!is_at(file, lock_));
}

void broker_place::listen() {
  auto const name = path("broker.sock");
  auto const address = broker_address(runtime_dir_);
  listener_ = unique_fd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  // The lock is ours, so whoever made it is dead.
  if (::unlink(name.c_str()) != 0 && errno == EISDIR) {
    throw in_the_way(name, EISDIR);
  }
  if (!listener_ ||
      ::bind(listener_.get(), reinterpret_cast<sockaddr const*>(&address), sizeof address) != 0 ||
      ::listen(listener_.get(), SOMAXCONN) != 0 || ::lstat(name.c_str(), &socket_) != 0) {
    throw system_error("cannot listen on " + name);
  }
}

void broker_place::watch_folder() {
  constexpr std::uint32_t changes = IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO |
                                    IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR;
  watch_ = unique_fd{::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)};
  if (!watch_ || ::inotify_add_watch(watch_.get(), runtime_dir_.c_str(), changes) < 0) {
    spdlog::info("what is removed from {} will not be seen reason=\"{}\"", runtime_dir_,
                 std::strerror(errno));
    watch_.reset();
  }
}

void broker_place::hear() {
  alignas(inotify_event) std::array<char, 4096> events{};
  while (::read(watch_.get(), events.data(), events.size()) > 0) {
  }
  if (!look_at_) {
    look_at_ = clock::now() + until_a_look;
  }
}

bool broker_place::folder_is_gone() const {
  struct stat status {};
  return ::lstat(runtime_dir_.c_str(), &status) != 0 && errno == ENOENT;
}

bool broker_place::look() {
  look_at_.reset();
  bool const has_lock = is_at(path("broker.lock"), lock_);
  if (!listener_ || (has_lock && is_at(path("broker.sock"), socket_))) {
    return false;
  }
  try {
    (void)prepare_runtime_dir(runtime_dir_);
    if (!has_lock) {
      take();
    }
    listen();
    watch_folder();
    spdlog::warn("what had been removed from {} is there again", runtime_dir_);
    return true;
  } catch (error const& why) {
    listener_.reset();
    watch_.reset();
    spdlog::error(
        "nobody finds this broker any more; its clients keep what they hold reason=\"{}\"",
        why.what());
    return false;
  }
}

}  // namespace sluice::memhandover::detail
