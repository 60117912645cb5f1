#include "runtime/server/executor/child_process.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::server {
namespace {

using memhandover::unique_fd;

class spawn_settings {
 public:
  explicit spawn_settings(int passed) {
    ::posix_spawn_file_actions_init(&actions_);
    // To its own number too: the copy stays open in the program.
    ::posix_spawn_file_actions_adddup2(&actions_, passed, child_process::passed_descriptor);
    // Libraries leave theirs open, among them the connections of clients, which would outlast their ends here.
    ::posix_spawn_file_actions_addclosefrom_np(&actions_, child_process::passed_descriptor + 1);
    ::posix_spawnattr_init(&attributes_);
    sigset_t none;
    ::sigemptyset(&none);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    sigset_t all;
    ::sigfillset(&all);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  spawn_settings(spawn_settings const&) = delete;
  spawn_settings& operator=(spawn_settings const&) = delete;
  ~spawn_settings() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  [[nodiscard]] posix_spawn_file_actions_t const* actions() const { return &actions_; }
  [[nodiscard]] posix_spawnattr_t const* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
};

/// How many processes the kernel has ended for want of memory since it started; 0 where it does not say.
std::uint64_t kills_for_memory() {
  std::ifstream counters{"/proc/vmstat"};
  std::string name;
  for (std::uint64_t value = 0; counters >> name >> value;) {
    if (name == "oom_kill") {
      return value;
    }
  }
  return 0;
}

}  // namespace

child_process child_process::start(std::vector<std::string> command, unique_fd passed) {
  std::vector<char*> words;
  words.reserve(command.size() + 1);
  for (auto& word : command) {
    words.push_back(word.data());
  }
  words.push_back(nullptr);
  spawn_settings const settings{passed.get()};
  child_process made;
  made.kills_for_memory_ = kills_for_memory();
  if (int const failed = ::posix_spawn(&made.pid_, words.front(), settings.actions(),
                                       settings.attributes(), words.data(), environ);
      failed != 0) {
    made.pid_ = 0;
    throw error{error_kind::unsupported, fmt::format("{} cannot be started: {}", command.front(),
                                                     memhandover::reason_of(failed))};
  }
  return made;
}

child_process::child_process(child_process&& other) noexcept {
  *this = std::move(other);
}

child_process& child_process::operator=(child_process&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(kills_for_memory_, other.kills_for_memory_);
  return *this;
}

child_process::~child_process() {
  if (pid_ != 0) {
    kill();
    (void)wait();
  }
}

void child_process::kill() const noexcept {
  if (pid_ != 0) {
    (void)::kill(pid_, SIGKILL);
  }
}

void child_process::await_end() const noexcept {
  siginfo_t ended{};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOWAIT) < 0 &&
         errno == EINTR) {
  }
}

void child_process::watch_from_now() {
  kills_for_memory_ = kills_for_memory();
}

process_end child_process::wait() {
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = 0;
  if (!WIFSIGNALED(status)) {
    auto const code = WEXITSTATUS(status);
    return {fmt::format("ended with exit code {}", code), code == 0, false};
  }
  auto const signal = WTERMSIG(status);
  if (signal == SIGKILL && kills_for_memory() != kills_for_memory_) {
    return {"was ended by the kernel, which had no memory left", false, false};
  }
  return {fmt::format("was ended by signal {}", signal), false, signal == SIGKILL};
}

}  // namespace sluice::server
