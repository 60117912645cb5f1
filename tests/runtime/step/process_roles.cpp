#include "tests/runtime/step/process_roles.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "runtime/step/training_memory.hpp"
#include "tests/runtime/step/engine_role.hpp"
#include "tests/runtime/step/parker_role.hpp"
#include "tests/runtime/step/run_ahead_role.hpp"
#include "tests/runtime/step/warm_role.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using namespace std::chrono_literals;
using std::chrono::steady_clock;

std::atomic<bool> stopping{false};
std::atomic<bool> asked_for_commits{false};

void say(std::string const& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

int broker_role(std::vector<std::string> const& arguments) {
  memhandover::broker_options options;
  int ready_fd = -1;
  std::map<std::string, std::string> named;
  for (std::size_t i = 0; i + 1 < arguments.size(); i += 2) {
    named[arguments[i]] = arguments[i + 1];
  }
  options.runtime_dir = named["--runtime-dir"];
  options.backend = named.contains("--backend") ? named["--backend"] : "host";
  if (named.contains("--device")) {
    options.device = std::stoi(named["--device"]);
  }
  options.pool_bytes = std::stoull(named.contains("--memory") ? named["--memory"] : "67108864");
  options.chunk_bytes = std::stoull(named.contains("--chunk") ? named["--chunk"] : "65536");
  if (named.contains("--host-memory")) {
    options.host_copy_bytes = std::stoull(named["--host-memory"]);
  }
  if (named.contains("--host-disk")) {
    options.host_copy_disk = {named["--host-disk-path"], std::stoull(named["--host-disk"])};
  }
  if (named.contains("--ready-fd")) {
    ready_fd = std::stoi(named["--ready-fd"]);
  }
  return memhandover::broker_main(options, ready_fd);
}

/// The device that a role is given, if it is given one.
std::optional<int> device_of(std::vector<std::string> const& arguments, std::size_t at) {
  auto const device = at < arguments.size() ? std::stoi(arguments[at]) : -1;
  return device < 0 ? std::nullopt : std::optional{device};
}

std::unique_ptr<step::training_memory> join_training(std::string const& folder,
                                                     std::optional<int> device) {
  step::training_memory::options options;
  options.broker.runtime_dir = folder;
  options.broker.device = device;
  options.name = "job";
  options.grow_by = 4;
  options.persistent = memhandover::chunk_space::backing::process;
  return std::make_unique<step::training_memory>(options);
}

/// One micro-batch: allocates, writes, and sees its own bytes again unless they were taken away.
/// True: committed.
bool micro_batch(step::training_memory& memory, std::mt19937& random, std::size_t bytes) {
  std::vector<std::pair<std::byte*, std::size_t>> blocks;
  auto drop = [&] {
    for (auto const& [address, size] : blocks) {
      if (!memory.free(address)) {
        say("error: a block could not be freed");
      }
    }
    blocks.clear();
  };
  memory.begin();
  try {
    auto const mark = static_cast<int>(random() % 255 + 1);
    for (std::size_t used = 0; used < bytes;) {
      auto const size = 4096 + random() % 200'000;
      auto* const address = memory.allocate_arena(size);
      std::memset(address, mark, size);
      blocks.emplace_back(address, size);
      used += size;
    }
    bool intact = true;
    for (auto const& [address, size] : blocks) {
      intact = intact && address[0] == static_cast<std::byte>(mark) &&
               address[size - 1] == static_cast<std::byte>(mark);
    }
    if (memory.commit_begin(false) == step::commit_start::begun) {
      if (!intact) {
        say("error: a committed micro-batch has lost its contents");
      }
      drop();
      memory.commit_end(false);
      return true;
    }
  } catch (error const& why) {
    if (why.kind() != error_kind::cancelled && why.kind() != error_kind::out_of_memory) {
      say(std::string{"error: "} + why.what());
    }
  }
  drop();
  memory.discard();
  return false;
}

/// trainer FOLDER BYTES WORKERS [DEVICE]: trains for ever, with so many forked workers that only
/// wait. SIGUSR1 makes it say how often it has committed.
int trainer_role(std::vector<std::string> const& arguments) {
  auto const memory = join_training(arguments.at(0), device_of(arguments, 3));
  auto const bytes = std::stoull(arguments.at(1));
  for (int i = 0; i < std::stoi(arguments.at(2)); ++i) {
    memory->before_fork();
    if (::fork() == 0) {
      memory->after_fork_in_child();
      for (;;) {
        ::pause();
      }
    }
    memory->after_fork_in_parent();
  }
  std::mt19937 random{static_cast<std::uint32_t>(::getpid())};
  say("joined");
  std::uint64_t committed = 0;
  auto size = bytes;
  while (!stopping) {
    if (asked_for_commits.exchange(false)) {
      say("commits " + std::to_string(committed));
    }
    if (micro_batch(*memory, random, size)) {
      if (++committed == 1) {
        say("committed");
      }
      size = std::min<std::uint64_t>(bytes, size + size / 4);
    } else {
      size = std::max<std::uint64_t>(size / 2, 256_KiB);
    }
  }
  return 0;
}

/// server FOLDER BYTES [DEVICE…]: takes memory, writes and checks it, gives it back, for ever; of
/// the pools of several devices in turn; from engines, too, where there are some.
int server_role(std::vector<std::string> const& arguments) {
  std::vector<std::shared_ptr<memhandover::serving_pool>> pools;
  try {
    for (std::size_t i = 2; i < std::max<std::size_t>(arguments.size(), 3); ++i) {
      memhandover::serving_pool::options options;
      options.runtime_dir = arguments.at(0);
      options.device = device_of(arguments, i);
      options.demands_from_engines = true;
      pools.push_back(memhandover::serving_pool::join(options));
    }
  } catch (error const& why) {
    say(std::string{to_string(why.kind())} + ": " + why.what());
    return 3;
  }
  auto const bytes = std::stoull(arguments.at(1));
  std::mt19937 random{static_cast<std::uint32_t>(::getpid())};
  say("joined");
  std::uint64_t served = 0;
  while (!stopping) {
    auto const& pool = pools[served % pools.size()];
    try {
      memhandover::handover_report report;
      auto const where =
          pool->acquire(bytes / 2 + random() % (bytes / 2), steady_clock::now() + 5s, &report);
      auto const mark = static_cast<int>(random() % 255 + 1);
      std::memset(where.data(), mark, where.bytes());
      auto const claim = pool->claim_compute();
      for (std::size_t i = 0; i < where.bytes(); i += 997) {
        if (where.data()[i] != static_cast<std::byte>(mark)) {
          say("error: serving memory has changed under the server");
          return 4;
        }
      }
      say("served " + std::to_string(++served) + " " + std::to_string(report.bytes_reclaimed));
    } catch (error const& why) {
      say(std::string{"failed "} + std::string{to_string(why.kind())} + " " + why.what());
    }
  }
  return 0;
}

}  // namespace

int run_role(int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') {
    return -1;
  }
  std::string const role = argv[1];
  std::vector<std::string> const arguments(argv + 2, argv + argc);
  if (role == "broker") {
    return broker_role(arguments);
  }
  ::signal(SIGTERM, [](int) { stopping = true; });
  ::signal(SIGUSR1, [](int) { asked_for_commits = true; });
  return role == "trainer"     ? trainer_role(arguments)
         : role == "server"    ? server_role(arguments)
         : role == "engine"    ? engine_role(arguments, stopping)
         : role == "warm"      ? warm_role(arguments)
         : role == "bounded"   ? bounded_role(arguments)
         : role == "parker"    ? parker_role(arguments, stopping, asked_for_commits)
         : role == "taker"     ? taker_role(arguments, stopping, asked_for_commits)
         : role == "publisher" ? publisher_role(arguments)
                               : 2;
}

child::child(std::string const& role, std::vector<std::string> arguments) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::runtime_error{"pipe"};
  }
  output_ = memhandover::unique_fd{ends[0]};
  memhandover::unique_fd const theirs{ends[1]};
  std::vector<char*> argv;
  arguments.insert(arguments.begin(), {"/proc/self/exe", role});
  for (auto& argument : arguments) {
    argv.push_back(argument.data());
  }
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(theirs.get(), 1);
    ::execv("/proc/self/exe", argv.data());
    ::_exit(127);
  }
}

child& child::operator=(child&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(output_, other.output_);
  std::swap(pending_, other.pending_);
  return *this;
}

child::~child() {
  kill();
}

std::string child::line() {
  constexpr int patience_ms = 30'000;
  for (;;) {
    if (auto const end = pending_.find('\n'); end != std::string::npos) {
      auto text = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return text;
    }
    pollfd ready{output_.get(), POLLIN, 0};
    if (::poll(&ready, 1, patience_ms) == 0) {
      ADD_FAILURE() << "process " << pid_ << " says nothing any more";
      return "";
    }
    char buffer[4096];
    auto const got = ::read(output_.get(), buffer, sizeof buffer);
    if (got <= 0) {
      return "";
    }
    pending_.append(buffer, static_cast<std::size_t>(got));
  }
}

void child::kill() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
}

void child::hold() const {
  int state = 0;
  EXPECT_EQ(::kill(pid_, SIGSTOP), 0);
  EXPECT_EQ(::waitpid(pid_, &state, WUNTRACED), pid_);
  EXPECT_TRUE(WIFSTOPPED(state)) << "process " << pid_ << " has ended";
}

int child::stop() {
  int status = -1;
  if (pid_ > 0) {
    ::kill(pid_, SIGTERM);
    while (!line().empty()) {
    }
    ::waitpid(pid_, &status, 0);
    pid_ = 0;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace sluice::test
