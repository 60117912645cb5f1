#include "memhandover/broker_launch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/wait.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "memhandover/broker.hpp"
#include "memhandover/descriptor_limit.hpp"
#include "memhandover/detail/conversation.hpp"
#include "memhandover/error.hpp"
#include "memhandover/wire.hpp"

extern char** environ;

namespace sluice::memhandover {
namespace {

constexpr int start_timeout_ms = 60'000;  // creating the chunks of a whole GPU takes a second or so
/// How long a broker is waited for that does not listen any more and has not ended.
constexpr std::chrono::seconds ending_patience{10};
constexpr int look_again_ms = 5;

std::string environment(char const* name) {
  char const* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// A time that a variable sets. Throws `invalid_argument` if it is set to none.
std::chrono::milliseconds milliseconds_in(char const* name, std::chrono::milliseconds otherwise) {
  auto const text = environment(name);
  if (text.empty()) {
    return otherwise;
  }
  std::int64_t count = -1;
  auto const [end, failed] = std::from_chars(text.data(), text.data() + text.size(), count);
  constexpr std::int64_t a_week = 7LL * 24 * 3600 * 1000;
  if (failed != std::errc{} || end != text.data() + text.size() || count < 0 || count > a_week) {
    throw error{error_kind::invalid_argument, std::string{name} + " is " + text +
                                                  ", must be a number of milliseconds, at most " +
                                                  std::to_string(a_week)};
  }
  return std::chrono::milliseconds{count};
}

std::string program_of(broker_options const& options) {
  if (!options.sluice_binary.empty()) {
    return options.sluice_binary;
  }
  auto const named = environment("SLUICE_BROKER");
  return named.empty() ? "sluice" : named;
}

/// Starts `sluice broker` in a session of its own and waits for its word.
void start_broker(broker_options const& options, std::string const& runtime_dir) {
  int pipe_ends[2];
  if (::pipe2(pipe_ends, O_CLOEXEC) != 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot create a pipe: "} + std::strerror(errno)};
  }
  unique_fd word{pipe_ends[0]};
  unique_fd theirs{pipe_ends[1]};
  constexpr int ready_fd = 3;
  auto const program = program_of(options);
  std::vector<std::string> arguments{program,     "broker",     "--runtime-dir",
                                     runtime_dir, "--ready-fd", std::to_string(ready_fd)};
  auto add = [&arguments](char const* name, std::string const& value) {
    arguments.emplace_back(name);
    arguments.push_back(value);
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
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (auto& argument : arguments) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  // The broker outlives whoever starts it, so it must not carry what its starter preloads for
  // training.
  std::vector<char*> environment_entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, "LD_PRELOAD=", 11) != 0) {
      environment_entries.push_back(*entry);
    }
  }
  environment_entries.push_back(nullptr);

  auto const log = runtime_dir + "/broker.log";
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  ::posix_spawn_file_actions_addopen(&actions, 2, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), ready_fd);
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
  pid_t starter = 0;
  int const failed = ::posix_spawnp(&starter, program.c_str(), &actions, &attributes, argv.data(),
                                    environment_entries.data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  theirs.reset();
  if (failed != 0) {
    throw error{error_kind::unavailable,
                "cannot start the broker as `" + program + " broker`: " + std::strerror(failed) +
                    "; put sluice on the PATH or name it in SLUICE_BROKER"};
  }
  ::waitpid(starter, nullptr, 0);
  std::string said;
  for (;;) {
    pollfd ready{word.get(), POLLIN, 0};
    if (::poll(&ready, 1, start_timeout_ms) == 0) {
      throw error{error_kind::deadline_exceeded,
                  "the broker did not come up within a minute; see " + log};
    }
    char buffer[512];
    auto const got = ::read(word.get(), buffer, sizeof buffer);
    if (got <= 0) {
      break;
    }
    said.append(buffer, static_cast<std::size_t>(got));
  }
  if (said.rfind("ok", 0) == 0) {
    return;
  }
  if (said.empty()) {
    throw error{error_kind::unavailable, "the broker ended before it was ready; see " + log};
  }
  auto const space = said.find(' ');
  auto const kind = static_cast<error_kind>(std::atoi(said.c_str()));
  throw error{kind, said.substr(space + 1)};
}

void say(int ready_fd, std::string const& text) {
  if (ready_fd >= 0) {
    (void)!::write(ready_fd, text.data(), text.size());
    ::close(ready_fd);
  }
}

}  // namespace

unique_fd ensure_broker(broker_options const& options) {
  auto const runtime_dir = prepare_runtime_dir(options.runtime_dir);
  if (auto socket = connect_to_broker(runtime_dir)) {
    return std::move(*socket);
  }
  unique_fd const lock{
      ::open((runtime_dir + "/start.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)};
  while (!lock || ::flock(lock.get(), LOCK_EX) != 0) {
    if (!lock || errno != EINTR) {
      throw error{error_kind::unavailable,
                  "cannot lock " + runtime_dir + "/start.lock: " + std::strerror(errno)};
    }
  }
  if (auto socket = connect_to_broker(runtime_dir)) {
    return std::move(*socket);
  }
  auto const patience_ends = std::chrono::steady_clock::now() + ending_patience;
  for (;;) {
    bool started = true;
    try {
      start_broker(options, runtime_dir);
    } catch (error const& why) {
      started = why.kind() != error_kind::already_exists;
      if (started || std::chrono::steady_clock::now() > patience_ends) {
        throw;
      }
    }
    if (auto socket = connect_to_broker(runtime_dir)) {
      return std::move(*socket);
    }
    if (started) {
      throw error{error_kind::unavailable,
                  "the broker ended as soon as it was ready; see " + runtime_dir + "/broker.log"};
    }
    // An earlier one that does not listen any more has its place until its process has ended.
    ::poll(nullptr, 0, look_again_ms);
  }
}

pool_presence open_pool(broker_options const& options) {
  pool_presence presence{ensure_broker(options), backend_kind::host, 0};
  send_message(presence.connection.get(), detail::wish_message("open", options));
  auto const opened = detail::expect(presence.connection.get(), "open").body;
  presence.backend =
      detail::field(opened, "backend", std::string{}) == to_string(backend_kind::cuda)
          ? backend_kind::cuda
          : backend_kind::host;
  presence.device = detail::field(opened, "device", 0);
  return presence;
}

int broker_main(broker_options const& options, int ready_fd) {
  if (ready_fd >= 0) {
    ::fcntl(ready_fd, F_SETFD, FD_CLOEXEC);
  }
  sigset_t stop_signals;
  ::sigemptyset(&stop_signals);
  ::sigaddset(&stop_signals, SIGTERM);
  ::sigaddset(&stop_signals, SIGINT);
  ::sigprocmask(SIG_BLOCK, &stop_signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  ::signal(SIGCHLD, SIG_IGN);  // those who create chunks are not waited for
  ::signal(SIGHUP, SIG_IGN);
  if (ready_fd >= 0 && ::fork() != 0) {
    ::_exit(0);  // nobody's child: whoever started it neither waits for it nor ends it
  }
  try {
    raise_descriptor_limit();
    unique_fd const stop{::signalfd(-1, &stop_signals, SFD_CLOEXEC)};
    broker::options how;
    how.runtime_dir = prepare_runtime_dir(options.runtime_dir);
    how.idle_exit = milliseconds_in("SLUICE_BROKER_IDLE_EXIT_MS", how.idle_exit);
    how.server_grace = milliseconds_in("SLUICE_SERVER_GRACE_MS", how.server_grace);
    how.pools = {options.backend, options.device.value_or(0), options.pool_bytes,
                 options.chunk_bytes};
    broker serving{how};
    say(ready_fd, "ok\n");
    serving.run(stop.get());
    return 0;
  } catch (error const& why) {
    say(ready_fd, std::to_string(static_cast<int>(why.kind())) + " " + why.what());
    spdlog::error("the broker cannot go on reason=\"{}\"", why.what());
    return 1;
  } catch (std::exception const& why) {
    say(ready_fd, std::to_string(static_cast<int>(error_kind::internal)) + " " + why.what());
    spdlog::error("the broker cannot go on reason=\"{}\"", why.what());
    return 1;
  }
}

}  // namespace sluice::memhandover
