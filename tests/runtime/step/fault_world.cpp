#include "tests/runtime/step/fault_world.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/device/cuda_driver.hpp"
#include "runtime/step/training_memory.hpp"
#include "tests/fake_driver/fake_driver.h"
#include "tests/patience.hpp"
#include "tests/runtime/gate/built_files.hpp"
#include "tests/runtime/step/injected_calls.hpp"

namespace sluice::test {
namespace {

namespace fs = std::filesystem;
using namespace sluice::literals;
using namespace std::chrono_literals;
using std::chrono::steady_clock;

void* fake_driver = nullptr;

template <typename Function>
Function* fake_function(char const* name) {
  auto* const found = reinterpret_cast<Function*>(::dlsym(fake_driver, name));
  if (found == nullptr) {
    throw std::runtime_error{std::string{"the fake driver has no "} + name};
  }
  return found;
}
#define SLUICE_FAKE(name) fake_function<decltype(::name)>(#name)

}  // namespace

std::string to_string(holdings const& what) {
  return std::to_string(what.descriptors) + " descriptors, " + std::to_string(what.mapped_bytes) +
         " bytes mapped, of the driver " + std::to_string(what.driver_reservations) +
         " reservations, " + std::to_string(what.driver_mappings) + " mappings, " +
         std::to_string(what.driver_handles) + " handles";
}

void load_fake_driver() {
  fake_driver = ::dlopen(gate::fake_driver_path().c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (fake_driver == nullptr) {
    throw std::runtime_error{::dlerror()};
  }
}

void fail_driver_call(std::string const& symbol, int code, unsigned skip) {
  SLUICE_FAKE(fake_fail_once)(symbol.c_str(), code, skip);
}

std::uint64_t driver_calls(std::string const& symbol) {
  return SLUICE_FAKE(fake_calls)(symbol.c_str());
}

std::uint64_t driver_failures(std::string const& symbol) {
  return SLUICE_FAKE(fake_failures)(symbol.c_str());
}

fault_world::fault_world(std::string backend, std::uint32_t pool_chunks)
    : backend_(std::move(backend)), pool_chunks_(pool_chunks) {
  auto pattern = (fs::temp_directory_path() / "sluice-faults-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) {
    throw std::runtime_error{"cannot create a folder"};
  }
  folder_ = pattern;
  ::setenv("SLUICE_BROKER", "/proc/self/exe", 1);
  ::setenv("SLUICE_BROKER_IDLE_EXIT_MS", "60000", 1);
}

fault_world::~fault_world() {
  end_broker();
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

memhandover::broker_options fault_world::broker() const {
  memhandover::broker_options options;
  options.runtime_dir = folder_;
  options.backend = backend_;
  options.chunk_bytes = backend_ == "host" ? 64_KiB : 2_MiB;
  options.pool_bytes = pool_chunks_ * options.chunk_bytes;
  return options;
}

step::training_memory::options fault_world::job() const {
  step::training_memory::options options;
  options.broker = broker();
  options.name = "job";
  if (backend_ == "host") {
    options.persistent = memhandover::chunk_space::backing::process;
  } else {
    options.driver = memhandover::cuda_driver::open();
  }
  return options;
}

std::shared_ptr<memhandover::serving_pool> fault_world::join_server() const {
  auto const of = broker();
  return memhandover::serving_pool::join({.runtime_dir = of.runtime_dir,
                                          .pool_bytes = of.pool_bytes,
                                          .chunk_bytes = of.chunk_bytes,
                                          .backend = of.backend});
}

void fault_world::start_broker() {
  presence_ = memhandover::ensure_broker(broker());
}

void fault_world::end_broker() {
  presence_.reset();
  if (auto const broker = memhandover::broker_pid(folder_); broker > 0) {
    ::kill(broker, SIGKILL);
    while (memhandover::broker_pid(folder_) == broker) {
      ::poll(nullptr, 0, 1);
    }
  }
}

void fault_world::train_and_serve() {
  idle_gate gate;
  auto options = job();
  bool const host = backend_ == "host";
  options.gate = host ? nullptr : &gate;
  step::training_memory job{options};
  auto const chunk = options.broker.chunk_bytes;
  auto const server = join_server();
  auto take = [&](std::uint32_t chunks) {
    auto where = server->acquire(chunks * chunk, steady_clock::now() + 5s);
    if (host) {
      std::memset(where.data(), 0xb7, where.bytes());
    }
    return where;
  };
  auto* const weights = job.allocate_persistent(2 * chunk);
  for (int round = 0; round < 2; ++round) {
    job.begin();
    std::vector<std::byte*> blocks;
    for (int i = 0; i < 16; ++i) {
      blocks.push_back(job.allocate_arena(chunk));
      if (host) {
        for (std::size_t at = 0; at < chunk; at += 64) {
          auto const byte = blocks.back()[at];
          if (byte != std::byte{0} && byte != std::byte{0x5a}) {
            throw std::logic_error{"training was given memory that holds the server's contents"};
          }
        }
        job.operators().operator_begin();  // not held for ever, whatever has failed
        std::memset(blocks.back(), 0x5a, chunk);
        job.operators().operator_end();
      }
    }
    if (host) {
      job.before_fork();
      job.after_fork_in_parent();
    }
    {
      auto const first = take(6);
      auto const second = take(6);
      // Every other piece given back, so that the next acquisition is of scattered chunks.
      std::vector<memhandover::placement> pieces;
      for (int i = 0; i < 8; ++i) {
        pieces.push_back(take(1));
      }
      for (std::size_t i = 0; i < pieces.size(); i += 2) {
        pieces[i] = {};
      }
      auto const scattered = take(5);
    }
    bool const kept = job.commit_begin(false) == step::commit_start::begun;
    for (auto* const block : blocks) {
      if (!job.free(block)) {
        throw std::logic_error{"a block could not be freed"};
      }
    }
    kept ? job.commit_end(false) : job.discard();
  }
  if (!job.free(weights)) {
    throw std::logic_error{"persistent memory could not be freed"};
  }
}

outcome fault_world::live() {
  outcome result;
  auto const begin = steady_clock::now();
  try {
    train_and_serve();
    result.went_well = true;
  } catch (error const& why) {
    result.error = std::string{why.what()};
    if (result.error.find(' ') == std::string::npos) {
      result.problem = "an error that is no sentence: " + result.error;
    }
  } catch (std::exception const& why) {
    result.problem = std::string{"an error without a kind: "} + why.what();
  }
  if (steady_clock::now() - begin > 8s) {
    result.problem += " it took too long";
  }
  return result;
}

outcome fault_world::live_in_child() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw std::runtime_error{"cannot create a pipe"};
  }
  memhandover::unique_fd const ours{ends[0]};
  memhandover::unique_fd theirs{ends[1]};
  auto const child = ::fork();
  if (child == 0) {
    auto const life = live();
    auto const text = std::string{life.went_well ? "1" : "0"} + life.problem + '\n' + life.error;
    (void)!::write(theirs.get(), text.data(), text.size());
    ::_exit(0);
  }
  theirs.reset();
  std::string text;
  char buffer[1024];
  for (ssize_t got = 0; (got = ::read(ours.get(), buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<std::size_t>(got));
  }
  ::waitpid(child, nullptr, 0);
  auto const line = text.find('\n');
  if (line == std::string::npos) {
    return {false, "the process ended early", ""};
  }
  return {text[0] == '1', text.substr(1, line - 1), text.substr(line + 1)};
}

std::string fault_world::resolve() {
  auto const deadline = steady_clock::now() + patience;
  for (std::string wrong;;) {
    try {
      auto const now = memhandover::query_status(folder_);
      auto const& pool = now["pool"];
      auto const free =
          pool["free_bytes"].get<std::uint64_t>() + pool["dirty_bytes"].get<std::uint64_t>();
      if (now["clients"].empty() && free == pool["bytes"].get<std::uint64_t>()) {
        return "";
      }
      wrong = now.dump();
    } catch (error const& why) {
      wrong = why.what();
      start_broker();  // a broker that cannot go on has ended
    }
    if (steady_clock::now() > deadline) {
      return "not everything came free: " + wrong;
    }
    ::poll(nullptr, 0, 1);
  }
}

holdings fault_world::count() const {
  holdings now;
  now.descriptors = static_cast<std::size_t>(
      std::distance(fs::directory_iterator{"/proc/self/fd"}, fs::directory_iterator{}));
  now.mapped_bytes = mapped_bytes();
  if (fake_driver != nullptr) {
    now.driver_reservations = SLUICE_FAKE(fake_reservations)();
    now.driver_mappings = SLUICE_FAKE(fake_mappings)();
    now.driver_handles = SLUICE_FAKE(fake_handles)();
  }
  return now;
}

}  // namespace sluice::test
