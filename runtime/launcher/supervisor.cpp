#include "runtime/launcher/supervisor.hpp"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "runtime/launcher/descendants.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::launcher {
namespace {

using memhandover::unique_fd;

constexpr std::array forwarded{SIGINT,  SIGTERM,  SIGHUP,  SIGQUIT, SIGUSR1,
                               SIGUSR2, SIGWINCH, SIGTSTP, SIGCONT};

[[noreturn]] void fail(std::string const& what) {
  throw error{error_kind::unavailable, what + ": " + std::strerror(errno)};
}

/// Blocks what the launcher handles, and remembers what the command is to inherit instead.
class signal_state {
 public:
  signal_state() {
    sigset_t handled;
    ::sigemptyset(&handled);
    ::sigaddset(&handled, SIGCHLD);
    for (int const signal : forwarded) {
      ::sigaddset(&handled, signal);
    }
    ::sigprocmask(SIG_BLOCK, &handled, &mask_);
    struct sigaction change {};
    // Ignored, it would make the kernel reap children before their exit code is seen.
    change.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &change, &child_action_);
    // A log line into a closed pipe or a full file must not end the launcher before its command.
    change.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &change, &pipe_action_);
    ::sigaction(SIGXFSZ, &change, &file_action_);
    events_.reset(::signalfd(-1, &handled, SFD_CLOEXEC));
    if (!events_) {
      fail("cannot watch for signals");
    }
  }

  /// In the child: everything as it was.
  void restore() const {
    ::sigaction(SIGCHLD, &child_action_, nullptr);
    ::sigaction(SIGPIPE, &pipe_action_, nullptr);
    ::sigaction(SIGXFSZ, &file_action_, nullptr);
    ::sigprocmask(SIG_SETMASK, &mask_, nullptr);
  }

  [[nodiscard]] signalfd_siginfo next() const {
    signalfd_siginfo info{};
    while (::read(events_.get(), &info, sizeof info) != static_cast<ssize_t>(sizeof info)) {
      if (errno != EINTR) {
        fail("cannot read signals");
      }
    }
    return info;
  }

 private:
  sigset_t mask_{};
  struct sigaction child_action_ {};
  struct sigaction pipe_action_ {};
  struct sigaction file_action_ {};
  unique_fd events_;
};

struct started {
  pid_t pid = -1;
  int exec_errno = 0;
};

started start(std::vector<std::string>& command, environment& env, signal_state const& signals) {
  // Everything that allocates happens before the fork.
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (auto& argument : command) {
    arguments.push_back(argument.data());
  }
  arguments.push_back(nullptr);
  auto variables = env.pointers();

  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    fail("cannot create a pipe");
  }
  unique_fd read_end{ends[0]};
  unique_fd write_end{ends[1]};
  auto const pid = ::fork();
  if (pid < 0) {
    fail("cannot start a process");
  }
  if (pid == 0) {
    signals.restore();
    ::execvpe(arguments.front(), arguments.data(), variables.data());
    int const why = errno;
    (void)!::write(write_end.get(), &why, sizeof why);
    ::_exit(telemetry::exit_not_found);
  }
  write_end.reset();
  started result{pid, 0};
  // A successful exec closes the other end; until then nothing else happens.
  while (::read(read_end.get(), &result.exec_errno, sizeof result.exec_errno) < 0 &&
         errno == EINTR) {
  }
  return result;
}

class supervision {
 public:
  supervision(pid_t child, signal_state const& signals) : child_(child), signals_(signals) {}

  int run() {
    while (!exit_code_) {
      auto const info = signals_.next();
      if (info.ssi_signo == SIGCHLD) {
        reap();
      } else {
        pass_on(info);
      }
      if (!exit_code_ && stop_wanted_ && child_stopped_) {
        stop_wanted_ = false;
        ::kill(::getpid(),
               SIGSTOP);  // returns when somebody continues us; SIGCONT then waits to be read
      }
    }
    return *exit_code_;
  }

 private:
  void pass_on(signalfd_siginfo const& info) {
    auto const signal = static_cast<int>(info.ssi_signo);
    // Only a stop that was asked of the launcher too stops it: whoever stops the command alone,
    // continues it alone.
    if (signal == SIGTSTP) {
      stop_wanted_ = true;
    } else if (signal == SIGCONT) {
      stop_wanted_ = false;
    }
    bool const from_terminal = info.ssi_code == SI_KERNEL;
    if (!from_terminal) {
      ::kill(child_, signal);
    }
  }

  /// One SIGCHLD may stand for many events, also of processes that have come to us from dead
  /// parents.
  void reap() {
    int status = 0;
    for (pid_t pid = 0; (pid = ::waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0;) {
      if (pid != child_) {
        continue;
      }
      if (WIFEXITED(status)) {
        exit_code_ = WEXITSTATUS(status);
      } else if (WIFSIGNALED(status)) {
        exit_code_ = telemetry::exit_signal_base + WTERMSIG(status);
      } else {
        child_stopped_ = WIFSTOPPED(status);
      }
    }
  }

  pid_t child_;
  signal_state const& signals_;
  bool stop_wanted_ = false;
  bool child_stopped_ = false;
  std::optional<int> exit_code_;
};

}  // namespace

int supervise(std::vector<std::string> command, environment env) {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
    fail("cannot become a child subreaper");
  }
  signal_state const signals;
  auto const child = start(command, env, signals);
  if (child.exec_errno != 0) {
    ::waitpid(child.pid, nullptr, 0);
    bool const missing = child.exec_errno == ENOENT;
    spdlog::error("the command cannot be started command={} reason={}",
                  telemetry::quoted(command.front()),
                  telemetry::quoted(missing ? "no such command, or no such interpreter of a script"
                                            : std::strerror(child.exec_errno)));
    return missing ? telemetry::exit_not_found : telemetry::exit_not_executable;
  }
  auto const exit_code = supervision{child.pid, signals}.run();
  end_descendants();
  return exit_code;
}

}  // namespace sluice::launcher
