#include "runtime/server/engines/engine_keeper.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/wire.hpp"
#include "runtime/launcher/descendants.hpp"
#include "runtime/launcher/environment.hpp"

namespace sluice::server {
namespace {

using memhandover::unique_fd;
using nlohmann::json;

struct started_engine {
  pid_t pid = 0;
  int failed = 0;  ///< of its exec
};

/// In the engine's process: only what may be called after a fork.
[[noreturn]] void become(std::vector<char*> const& words, std::vector<char*> const& variables,
                         char const* folder, int log, int null, pid_t keeper, int report) {
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  bool const is_orphan = ::getppid() != keeper;  // it has died before it could be asked about
  if (!is_orphan && ::dup2(null, STDIN_FILENO) >= 0 && ::dup2(log, STDOUT_FILENO) >= 0 &&
      ::dup2(log, STDERR_FILENO) >= 0 && ::chdir(folder) == 0) {
    ::execvpe(words.front(), words.data(), variables.data());
  }
  int const why = is_orphan ? ESRCH : errno;
  (void)!::write(report, &why, sizeof why);
  ::_exit(127);
}

started_engine start(json const& order, int log) {
  auto command = order.at("command").get<std::vector<std::string>>();
  launcher::environment variables{order.at("environment").get<std::vector<std::string>>()};
  auto const folder = order.at("folder").get<std::string>();
  std::vector<char*> words;
  words.reserve(command.size() + 1);
  for (auto& word : command) {
    words.push_back(word.data());
  }
  words.push_back(nullptr);
  auto const pointers = variables.pointers();
  unique_fd const null{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
  std::array<int, 2> ends{};
  if (!null || ::pipe2(ends.data(), O_CLOEXEC) != 0) {
    memhandover::throw_system_error("cannot start an engine");
  }
  unique_fd const read_end{ends[0]};
  unique_fd write_end{ends[1]};
  // What the command's lookup goes by is the engine's own, as in a shell.
  if (auto const path = variables.get("PATH")) {
    (void)::setenv("PATH", path->c_str(), 1);
  }
  auto const keeper = ::getpid();
  started_engine made;
  made.pid = ::fork();
  if (made.pid < 0) {
    memhandover::throw_system_error("cannot start an engine");
  }
  if (made.pid == 0) {
    become(words, pointers, folder.c_str(), log, null.get(), keeper, write_end.get());
  }
  write_end.reset();
  while (::read(read_end.get(), &made.failed, sizeof made.failed) < 0 && errno == EINTR) {
  }
  return made;
}

std::string text_of(int status) {
  return WIFSIGNALED(status) ? fmt::format("was ended by signal {}", WTERMSIG(status))
                             : fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

/// How the engine has ended; nothing: it has not.
std::optional<int> reap(pid_t engine) {
  std::optional<int> found;
  int status = 0;
  for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    if (pid == engine) {
      found = status;
    }
  }
  return found;
}

/// Until the engine has ended; nothing: the server has, or wants no more of it.
std::optional<int> watch_over(pid_t engine, int server, int signals) {
  for (;;) {
    std::array<pollfd, 2> waited{pollfd{server, POLLIN, 0}, pollfd{signals, POLLIN, 0}};
    (void)::poll(waited.data(), waited.size(), -1);
    if (waited[1].revents != 0) {
      signalfd_siginfo info{};
      (void)!::read(signals, &info, sizeof info);
      if (auto const status = reap(engine)) {
        return status;
      }
    }
    if (waited[0].revents != 0) {
      if (!memhandover::receive_message(server)) {
        return std::nullopt;
      }
      (void)::kill(-engine, SIGTERM);
    }
  }
}

/// Whoever reads them may have gone.
void report(int server, json const& what) {
  try {
    memhandover::send_message(server, what);
  } catch (error const&) {
  }
}

int keep(int server) {
  auto const order = memhandover::receive_message(server);
  if (!order || order->descriptors.empty()) {
    return 0;
  }
  sigset_t handled;
  ::sigemptyset(&handled);
  ::sigaddset(&handled, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &handled, nullptr);
  unique_fd const signals{::signalfd(-1, &handled, SFD_CLOEXEC)};
  auto const engine = start(order->body, order->descriptors.front().get());
  if (engine.failed != 0) {
    (void)::waitpid(engine.pid, nullptr, 0);
    report(server, {{"type", "ended"},
                    {"text", fmt::format("cannot be started: {}: {}",
                                         order->body.at("command").at(0).get<std::string>(),
                                         memhandover::reason_of(engine.failed))}});
    return 0;
  }
  report(server, {{"type", "started"}, {"pid", engine.pid}});
  auto const status = watch_over(engine.pid, server, signals.get());
  (void)::kill(-engine.pid, SIGKILL);
  launcher::end_descendants();
  report(server, {{"type", "ended"}, {"text", status ? text_of(*status) : "was ended"}});
  return 0;
}

}  // namespace

int keep_engine(unique_fd server) {
  // The terminal's signals are the server's, which ends the engine in order.
  (void)::setpgid(0, 0);
  (void)std::signal(SIGPIPE, SIG_IGN);
  (void)::fcntl(server.get(), F_SETFD, FD_CLOEXEC);  // which the engine must not hold
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
    memhandover::throw_system_error("cannot become a child subreaper");
  }
  try {
    return keep(server.get());
  } catch (std::exception const& failure) {
    launcher::end_descendants();
    report(server.get(), {{"type", "ended"}, {"text", failure.what()}});
    return 1;
  }
}

}  // namespace sluice::server
