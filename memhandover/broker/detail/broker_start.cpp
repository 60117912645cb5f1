#include "memhandover/broker/detail/broker_start.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/waiting.hpp"

extern char** environ;

namespace sluice::memhandover::detail {
namespace {

/// Creating the chunks of a whole GPU takes a second or so.
constexpr std::chrono::seconds start_patience{60};
constexpr int ready_fd = STDERR_FILENO + 1;  ///< in the broker

std::string program_of(broker_options const& options) {
  if (!options.sluice_binary.empty()) {
    return options.sluice_binary;
  }
  auto const named = environment("SLUICE_BROKER");
  return named.empty() ? "sluice" : named;
}

std::vector<std::string> command_line(std::string const& program, broker_options const& options,
                                      std::string const& runtime_dir) {
  std::vector<std::string> words{program,     "broker",     "--runtime-dir",
                                 runtime_dir, "--ready-fd", std::to_string(ready_fd)};
  auto add = [&words](char const* name, std::string const& value) {
    words.emplace_back(name);
    words.push_back(value);
  };
  if (options.device) {
    add("--device", std::to_string(*options.device));
  }
  if (!options.backend.empty()) {
    add("--backend", options.backend);
  }
  if (options.pool_bytes > 0) {
    add("--memory", std::to_string(options.pool_bytes));
  }
  if (options.chunk_bytes > 0) {
    add("--chunk", std::to_string(options.chunk_bytes));
  }
  if (options.host_copy_bytes > 0) {
    add("--host-memory", std::to_string(options.host_copy_bytes));
  }
  if (options.host_copy_disk.bytes > 0) {
    add("--host-disk", std::to_string(options.host_copy_disk.bytes));
    add("--host-disk-path", options.host_copy_disk.folder);
  }
  return words;
}

/// The broker outlives whoever starts it, so it must not carry what its starter preloads for training.
std::vector<char*> environment_of_broker() {
  std::vector<char*> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "LD_PRELOAD=", 11) != 0) {
      entries.push_back(*entry);
    }
  }
  entries.push_back(nullptr);
  return entries;
}

/// What a broker writes to its standard error.
class broker_log {
 public:
  explicit broker_log(std::string const& runtime_dir) : path_(runtime_dir + "/broker.log") {
    file_ = beside_standard_streams(
        unique_fd{::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600)});
    if (!file_ && errno == EISDIR) {
      throw error{error_kind::unavailable,
                  path_ + " is a folder; remove it with `rm -r " + shell_word(path_) + "`"};
    }
    if (!file_) {
      throw system_error("cannot write to " + path_);
    }
    before_ = size();
  }
  [[nodiscard]] int fd() const noexcept { return file_.get(); }
  [[nodiscard]] std::string const& path() const noexcept { return path_; }

  /// The last line since this object was made; empty if there is none.
  [[nodiscard]] std::string last_line() const {
    std::array<char, 2048> tail{};
    auto const end = size();
    auto const from = std::max(before_, end - static_cast<off_t>(tail.size()));
    auto const got = ::pread(file_.get(), tail.data(), tail.size(), from);
    std::string text{tail.data(), static_cast<std::size_t>(std::max<ssize_t>(got, 0))};
    while (!text.empty() && text.back() == '\n') {
      text.pop_back();
    }
    return text.substr(text.rfind('\n') + 1);  // none: from the beginning
  }

 private:
  [[nodiscard]] off_t size() const {
    struct stat status {};
    return ::fstat(file_.get(), &status) == 0 ? status.st_size : 0;
  }

  std::string path_;
  unique_fd file_;
  off_t before_ = 0;
};

/// Starts it; the process dies when the broker it forks is on its own.
pid_t spawn(std::vector<std::string> words, broker_log const& log, unique_fd const& word) {
  std::vector<char*> arguments;
  arguments.reserve(words.size() + 1);
  for (auto& each : words) {
    arguments.push_back(each.data());
  }
  arguments.push_back(nullptr);
  auto const variables = environment_of_broker();

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, log.fd(), STDERR_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, word.get(), ready_fd);
  sigset_t all_default;
  sigset_t none;
  ::sigfillset(&all_default);
  ::sigdelset(&all_default, SIGKILL);
  ::sigdelset(&all_default, SIGSTOP);
  ::sigemptyset(&none);
  ::posix_spawnattr_setsigdefault(&attributes, &all_default);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  pid_t child = 0;
  int const failed = ::posix_spawnp(&child, arguments.front(), &actions, &attributes,
                                    arguments.data(), variables.data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (failed != 0) {
    bool const is_missing = failed == ENOENT || failed == EACCES;
    throw error{error_kind::unavailable,
                "cannot start the broker as `" + words.front() + " broker`: " + reason_of(failed) +
                    (is_missing ? "; put sluice on the PATH or name it in SLUICE_BROKER" : "")};
  }
  return child;
}

/// How a process has ended, in words; empty if it has done so in good order.
std::string ending(int status) {
  if (WIFSIGNALED(status)) {
    return std::string{"by signal "} + std::to_string(WTERMSIG(status)) + " (" +
           ::strsignal(WTERMSIG(status)) + ")";
  }
  return WIFEXITED(status) && WEXITSTATUS(status) != 0
             ? "with exit code " + std::to_string(WEXITSTATUS(status))
             : "";
}

int wait_for(pid_t child) {
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return status;
}

/// All that it says until it closes its end.
std::string hear(unique_fd const& word, broker_log const& log) {
  auto const until = std::chrono::steady_clock::now() + start_patience;
  std::string said;
  for (;;) {
    if (!await_ready(word.get(), POLLIN, until)) {
      throw error{error_kind::deadline_exceeded,
                  "the broker did not come up within a minute; see " + log.path()};
    }
    std::array<char, 512> buffer{};
    auto const got = ::read(word.get(), buffer.data(), buffer.size());
    if (got > 0) {
      said.append(buffer.data(), static_cast<std::size_t>(got));
    } else if (got == 0 || errno != EINTR) {
      return said;
    }
  }
}

}  // namespace

void start_broker(broker_options const& options, std::string const& runtime_dir) {
  auto [word, theirs] = make_pipe("the broker's word that it listens");
  broker_log const log{runtime_dir};
  auto const child = spawn(command_line(program_of(options), options, runtime_dir), log, theirs);
  theirs.reset();
  auto const status = wait_for(child);
  auto const said = hear(word, log);
  if (said.rfind("ok", 0) == 0) {
    return;
  }
  if (said.empty()) {
    auto const how = ending(status);
    auto const last = log.last_line();
    throw error{error_kind::unavailable,
                "the broker ended before it was ready" + (how.empty() ? "" : ", " + how) +
                    (last.empty() ? ", and left no word in " : ": " + last + "; see ") +
                    log.path()};
  }
  auto const space = said.find(' ');
  auto const kind = static_cast<error_kind>(std::atoi(said.c_str()));
  throw error{kind, said.substr(space + 1)};
}

}  // namespace sluice::memhandover::detail
