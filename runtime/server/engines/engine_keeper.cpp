#include "runtime/server/engines/engine_keeper.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/socket_address.hpp"
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

/// Whoever reads it may have gone, or be stopped.
void notify(int server, json const& what) {
  try {
    (void)memhandover::try_send_message(server, what);
  } catch (error const&) {
  }
}

/// Where a successor of the server finds the keeper.
class meeting_place {
 public:
  explicit meeting_place(std::string path) : path_(std::move(path)) {
    if (path_.empty()) return;
    // Whoever finds its name can connect; one that cannot would take it for a dead keeper's.
    std::filesystem::path const named{path_};
    auto const draft = (named.parent_path() / ("~" + named.filename().string())).string();
    auto const address = memhandover::socket_address(draft);
    if (!address) {
      throw error{error_kind::invalid_argument,
                  "the path of the runtime folder is too long for " + path_};
    }
    constexpr int backlog = 8;
    socket_.reset(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_ ||
        ::bind(socket_.get(), reinterpret_cast<sockaddr const*>(&*address), sizeof *address) != 0 ||
        ::listen(socket_.get(), backlog) != 0 || std::rename(draft.c_str(), path_.c_str()) != 0) {
      throw memhandover::system_error("cannot listen on " + path_);
    }
  }
  meeting_place(meeting_place const&) = delete;
  meeting_place& operator=(meeting_place const&) = delete;
  meeting_place(meeting_place&&) = delete;
  meeting_place& operator=(meeting_place&&) = delete;
  ~meeting_place() { close(); }

  [[nodiscard]] int socket() const noexcept { return socket_.get(); }
  [[nodiscard]] unique_fd accept() const {
    return unique_fd{::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC)};
  }
  /// Nobody is met here any more.
  void close() noexcept {
    if (socket_) ::unlink(path_.c_str());
    socket_.reset();
  }

 private:
  std::string path_;
  unique_fd socket_;
};

/// The servers that know of the engine, and whose it is.
class shared_engine {
 public:
  using clock = std::chrono::steady_clock;

  shared_engine(int first, json order)
      : order_(std::move(order)), place_(order_.value("meeting", std::string{})) {
    parties_.push_back({memhandover::duplicate(first), role::owns});
  }

  [[nodiscard]] json const& order() const noexcept { return order_; }

  void notify_all(json const& what) const {
    for (auto const& each : parties_) notify(each.socket.get(), what);
  }

  /// Until the engine has ended; nothing: whose it is has, or wants no more of it.
  std::optional<int> watch_over(pid_t engine, int signals) {
    engine_ = engine;
    while (!is_over_) {
      std::vector<pollfd> waited{{signals, POLLIN, 0}, {place_.socket(), POLLIN, 0}};
      for (auto const& each : parties_) waited.push_back({each.socket.get(), POLLIN, 0});
      (void)::poll(waited.data(), waited.size(), until_deadline());
      if (waited[0].revents != 0) {
        signalfd_siginfo info{};
        (void)!::read(signals, &info, sizeof info);
        if (auto const status = reap(engine)) return status;
      }
      auto next = parties_.begin();
      for (std::size_t i = 2; i < waited.size(); ++i) {
        auto const who = next++;
        if (waited[i].revents != 0) hear(who);
      }
      if (waited[1].revents != 0) meet();
      if (deadline_ && clock::now() >= *deadline_) on_deadline();
    }
    return std::nullopt;
  }
  void close() noexcept { place_.close(); }

 private:
  enum class role { asks, owns, has_left };
  struct party {
    unique_fd socket;
    role is = role::asks;
  };
  using place_of_party = std::list<party>::iterator;

  [[nodiscard]] place_of_party find(role wanted) {
    return std::find_if(parties_.begin(), parties_.end(),
                        [wanted](party const& each) { return each.is == wanted; });
  }
  [[nodiscard]] bool has(role wanted) { return find(wanted) != parties_.end(); }

  [[nodiscard]] int until_deadline() const {
    if (!deadline_) return -1;
    auto const left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - clock::now());
    return static_cast<int>(std::max(left.count(), std::chrono::milliseconds::rep{0}));
  }

  void meet() {
    auto came = place_.accept();
    if (!came) return;
    auto answer = json{{"type", "who"}, {"pid", engine_}};
    for (auto const* const key : {"identity", "address", "log", "log_begin"}) {
      answer[key] = order_.value(key, json{});
    }
    notify(came.get(), answer);
    parties_.push_back({std::move(came), role::asks});
  }

  void hear(place_of_party who) {
    std::string type;
    auto notes = json::object();
    try {
      auto const said = memhandover::receive_message(who->socket.get());
      if (!said) return on_gone(who);
      type = said->body.value("type", "");
      notes = said->body.value("notes", notes);
      if (!notes.is_object()) return on_gone(who);
    } catch (std::exception const&) {  // one who cannot be understood is gone
      return on_gone(who);
    }
    if (type == "adopt") return offer();
    if (who->is != role::owns) return;
    if (type == "stop") (void)::kill(-engine_, SIGTERM);
    if (type == "end") is_over_ = true;
    if (type == "leave") {
      who->is = role::has_left;
      notes_ = std::move(notes);
      offer();
    }
  }

  /// To whom has asked for it first, if it is nobody's.
  void offer() {
    auto const next = find(role::asks);
    if (has(role::owns) || next == parties_.end() || is_ending_) return;
    next->is = role::owns;
    deadline_.reset();
    notify(next->socket.get(),
           {{"type", "yours"}, {"notes", notes_}, {"shared", has(role::has_left)}});
  }

  void on_gone(place_of_party who) {
    auto const was = who->is;
    parties_.erase(who);
    if (was == role::asks) return;
    bool const is_shared = has(role::has_left);
    if (was == role::owns) {
      // One that has not left had it end with itself, but for who waits for it, or uses it still.
      if (!is_shared && !has(role::asks)) is_over_ = true;
      return offer();
    }
    if (is_shared) return;
    if (auto const owner = find(role::owns); owner != parties_.end()) {
      return notify(owner->socket.get(), {{"type", "alone"}});
    }
    deadline_ = clock::now() + std::chrono::milliseconds{order_.value("patience_ms", 0)};
  }

  /// Nobody has come for it.
  void on_deadline() {
    if (is_ending_) {
      is_over_ = true;
      return;
    }
    constexpr std::chrono::seconds grace{2};
    is_ending_ = true;
    place_.close();
    (void)::kill(-engine_, SIGTERM);
    deadline_ = clock::now() + grace;
  }

  json order_;
  meeting_place place_;
  std::list<party> parties_;
  json notes_ = json::object();
  std::optional<clock::time_point> deadline_;  ///< of nobody's engine
  bool is_ending_ = false, is_over_ = false;
  pid_t engine_ = 0;
};

/// The engine's own socket, in a folder of its own.
void remove_socket(json const& order) {
  auto const path = order.value("/address/socket"_json_pointer, std::string{});
  if (path.empty()) return;
  std::error_code ignored;
  std::filesystem::remove(path, ignored);
  std::filesystem::remove(std::filesystem::path{path}.parent_path(), ignored);
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
  shared_engine all{server, order->body};
  auto const engine = start(order->body, order->descriptors.front().get());
  if (engine.failed != 0) {
    (void)::waitpid(engine.pid, nullptr, 0);
    all.close();
    remove_socket(order->body);
    all.notify_all({{"type", "ended"},
                    {"text", fmt::format("cannot be started: {}: {}",
                                         order->body.at("command").at(0).get<std::string>(),
                                         memhandover::reason_of(engine.failed))}});
    return 0;
  }
  all.notify_all({{"type", "started"}, {"pid", engine.pid}});
  auto const status = all.watch_over(engine.pid, signals.get());
  all.close();
  (void)::kill(-engine.pid, SIGKILL);
  launcher::end_descendants();
  remove_socket(order->body);
  all.notify_all({{"type", "ended"}, {"text", status ? text_of(*status) : "was ended"}});
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
    notify(server.get(), {{"type", "ended"}, {"text", failure.what()}});
    return 1;
  }
}

}  // namespace sluice::server
