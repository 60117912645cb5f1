#include "memhandover/broker_launch.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <vector>

#include "memhandover/broker.hpp"
#include "memhandover/bytes.hpp"
#include "memhandover/descriptor_limit.hpp"
#include "memhandover/detail/cuda_memory.hpp"
#include "memhandover/detail/host_memory.hpp"
#include "memhandover/error.hpp"

extern char** environ;

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;

constexpr std::uint64_t host_chunk_bytes = 2_MiB;
constexpr std::uint64_t cuda_chunk_bytes = 64_MiB;
constexpr int start_timeout_ms = 60'000;  // creating the chunks of a whole GPU takes a second or so

std::string environment(char const* name) {
  char const* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Host memory that can still be used: what the system has available, or less where a memory cgroup
/// says so.
std::uint64_t available_host_bytes() {
  std::uint64_t available = std::numeric_limits<std::uint64_t>::max();
  std::ifstream meminfo{"/proc/meminfo"};
  for (std::string key, unit; meminfo >> key;) {
    std::uint64_t kib = 0;
    meminfo >> kib;
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") {
      available = kib << 10U;
    }
  }
  std::ifstream group{"/proc/self/cgroup"};
  for (std::string line; std::getline(group, line);) {
    if (line.rfind("0::", 0) == 0) {
      auto const folder = "/sys/fs/cgroup" + line.substr(3);
      std::ifstream limit_file{folder + "/memory.max"};
      std::ifstream used_file{folder + "/memory.current"};
      std::uint64_t limit = 0;
      std::uint64_t used = 0;
      if (limit_file >> limit && used_file >> used) {  // "max" does not parse: no limit
        available = std::min(available, limit > used ? limit - used : 0);
      }
    }
  }
  return available;
}

pool_files make_host_pool(broker_options const& options) {
  auto const available = available_host_bytes();
  auto const bytes = options.pool_bytes == 0 ? available / 2 : options.pool_bytes;
  if (bytes > available) {
    throw error{error_kind::out_of_memory, "the pool is to have " + format_bytes(bytes) +
                                               " but this machine has " + format_bytes(available) +
                                               " of memory available; ask for less"};
  }
  pool_shape shape{backend_kind::host, -1,
                   options.chunk_bytes == 0 ? host_chunk_bytes : options.chunk_bytes, 0};
  if (shape.chunk_bytes % 4096 != 0) {
    throw error{error_kind::invalid_argument, "the chunk size must be a multiple of 4 KiB"};
  }
  shape.chunk_count = static_cast<std::uint32_t>(bytes / shape.chunk_bytes);
  if (shape.chunk_count == 0) {
    throw error{error_kind::invalid_argument, "the pool is to have " + format_bytes(bytes) +
                                                  ", less than one chunk of " +
                                                  format_bytes(shape.chunk_bytes)};
  }
  auto files = create_ledger(shape);
  files.chunks = detail::create_host_chunks(shape);
  return files;
}

/// Chunks are created by a child that exits: the broker itself never opens CUDA.
pool_files make_cuda_pool(broker_options const& options) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot create a socket: "} + std::strerror(errno)};
  }
  unique_fd ours{pair[0]};
  unique_fd theirs{pair[1]};
  auto const child = ::fork();
  if (child < 0) {
    throw error{error_kind::unavailable,
                std::string{"cannot start a process: "} + std::strerror(errno)};
  }
  if (child == 0) {
    ours.reset();
    try {
      auto const chunk_bytes = options.chunk_bytes == 0 ? cuda_chunk_bytes : options.chunk_bytes;
      auto const created =
          detail::create_cuda_chunks(options.device, options.pool_bytes, chunk_bytes);
      send_message(theirs.get(), {{"type", "shape"},
                                  {"chunk_bytes", created.shape.chunk_bytes},
                                  {"chunk_count", created.shape.chunk_count}});
      for (std::size_t first = 0; first < created.descriptors.size(); first += max_descriptors) {
        std::vector<int> batch;
        for (auto i = first; i < std::min(first + max_descriptors, created.descriptors.size());
             ++i) {
          batch.push_back(created.descriptors[i].get());
        }
        send_message(theirs.get(), {{"type", "chunks"}}, batch);
      }
      // The descriptors are on their way; they stay alive until the parent has taken them.
      (void)receive_message(theirs.get());
    } catch (error const& why) {
      try {
        send_message(
            theirs.get(),
            {{"type", "error"}, {"kind", static_cast<int>(why.kind())}, {"message", why.what()}});
      } catch (error const&) {
        ::_exit(1);
      }
    }
    ::_exit(0);
  }
  theirs.reset();
  auto next = [&ours] {
    auto received = receive_message(ours.get());
    if (!received) {
      throw error{error_kind::unavailable,
                  "the process that creates the pool's chunks ended early"};
    }
    if (received->body["type"] == "error") {
      throw error{static_cast<error_kind>(received->body["kind"].get<int>()),
                  received->body["message"].get<std::string>()};
    }
    return std::move(*received);
  };
  std::optional<pool_files> files;
  try {
    auto const first = next();
    pool_shape const shape{backend_kind::cuda, options.device,
                           first.body["chunk_bytes"].get<std::uint64_t>(),
                           first.body["chunk_count"].get<std::uint32_t>()};
    files = create_ledger(shape);
    while (files->chunks.size() < shape.chunk_count) {
      auto batch = next();
      std::move(batch.descriptors.begin(), batch.descriptors.end(),
                std::back_inserter(files->chunks));
    }
  } catch (...) {
    ours.reset();
    ::waitpid(child, nullptr, 0);
    throw;
  }
  ours.reset();
  ::waitpid(child, nullptr, 0);
  return std::move(*files);
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
  std::vector<std::string> arguments{program,         "broker",
                                     "--runtime-dir", runtime_dir,
                                     "--device",      std::to_string(options.device),
                                     "--ready-fd",    std::to_string(ready_fd)};
  auto add = [&arguments](char const* name, std::string const& value) {
    arguments.emplace_back(name);
    arguments.push_back(value);
  };
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
  start_broker(options, runtime_dir);
  if (auto socket = connect_to_broker(runtime_dir)) {
    return std::move(*socket);
  }
  throw error{error_kind::unavailable,
              "the broker ended as soon as it was ready; see " + runtime_dir + "/broker.log"};
}

int broker_pid(std::string const& runtime_dir) {
  auto const socket = connect_to_broker(prepare_runtime_dir(runtime_dir));
  return socket ? peer_pid(socket->get()) : 0;
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
  ::signal(SIGHUP, SIG_IGN);
  if (ready_fd >= 0 && ::fork() != 0) {
    ::_exit(0);  // nobody's child: whoever started it neither waits for it nor ends it
  }
  try {
    raise_descriptor_limit();
    unique_fd const stop{::signalfd(-1, &stop_signals, SFD_CLOEXEC)};
    broker::options how;
    how.runtime_dir = prepare_runtime_dir(options.runtime_dir);
    if (auto const idle = environment("SLUICE_BROKER_IDLE_EXIT_MS"); !idle.empty()) {
      how.idle_exit = std::chrono::milliseconds{std::strtol(idle.c_str(), nullptr, 10)};
    }
    broker serving{
        how, [options] {
          auto const& backend = options.backend;
          if (!backend.empty() && backend != "auto" && backend != "host" && backend != "cuda") {
            throw error{error_kind::invalid_argument,
                        "there is no backend " + backend + "; use host, cuda or auto"};
          }
          // The look for a GPU opens CUDA, so it happens in the child that creates the chunks.
          bool const cuda = backend == "cuda" || (backend != "host" && detail::cuda_in_child());
          return cuda ? make_cuda_pool(options) : make_host_pool(options);
        }};
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

namespace {

/// A conversation with the broker of a folder in which only questions are asked.
class questions {
 public:
  explicit questions(std::string const& runtime_dir) : dir_(prepare_runtime_dir(runtime_dir)) {
    auto socket = connect_to_broker(dir_);
    if (!socket) {
      throw error{error_kind::unavailable,
                  "no broker runs in " + dir_ + "; `sluice run` and `sluice serve` start one"};
    }
    socket_ = std::move(*socket);
  }

  /// The answer to a question has the question's type.
  [[nodiscard]] nlohmann::json ask(nlohmann::json const& question) const {
    constexpr int patience_ms = 5000;
    send_message(socket_.get(), question);
    auto answer = receive_message(socket_.get(), patience_ms);
    if (answer && answer->body["type"] == "error") {
      throw error{error_kind::unsupported, "the broker in " + dir_ +
                                               " is of another version and cannot answer: " +
                                               answer->body.value("message", std::string{})};
    }
    if (!answer || answer->body["type"] != question["type"]) {
      throw error{error_kind::unavailable, "the broker in " + dir_ + " ended while it was asked"};
    }
    answer->body.erase("type");
    return std::move(answer->body);
  }

 private:
  std::string dir_;
  unique_fd socket_;
};

}  // namespace

nlohmann::json query_status(std::string const& runtime_dir) {
  return questions{runtime_dir}.ask({{"type", "status"}});
}

nlohmann::json query_chunks(std::string const& runtime_dir) {
  questions const broker{runtime_dir};
  auto result = broker.ask({{"type", "status"}});
  auto runs = nlohmann::json::array();
  for (nlohmann::json from = 0; !from.is_null();) {
    auto const page = broker.ask({{"type", "show"}, {"from", from}});
    runs.insert(runs.end(), page["runs"].begin(), page["runs"].end());
    from = page["next"];
  }
  result["runs"] = std::move(runs);
  return result;
}

nlohmann::json query_address(std::string const& runtime_dir, std::uint64_t address) {
  return questions{runtime_dir}.ask({{"type", "address"}, {"address", address}});
}

}  // namespace sluice::memhandover
