#include "benchmarks/kills_roles.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "benchmarks/pool_device.hpp"
#include "memhandover/broker_queries.hpp"
#include "memhandover/error.hpp"
#include "memhandover/serving_pool.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::bench {
namespace {

using std::chrono::steady_clock;

std::atomic<bool> stopping{false};

void stop_on_sigterm() {
  ::signal(SIGTERM, [](int) { stopping = true; });
}

/// A training process without torch: what it writes is what kernels would write.
class trainer {
 public:
  explicit trainer(role_options const& how) : how_(how), random_(std::random_device{}()) {
    auto const pool = memhandover::query_status(how.runtime_dir)["pool"];
    auto const backend = pool["backend"] == "cuda" ? memhandover::backend_kind::cuda
                                                   : memhandover::backend_kind::host;
    device_ = open_pool_device(backend, std::max(0, pool.value("device", 0)));
    step::training_memory::options options;
    options.broker.runtime_dir = how.runtime_dir;
    options.name = "job";
    options.grow_by = 4;
    chunk_ = pool["chunk_bytes"].get<std::uint64_t>();
    if (backend == memhandover::backend_kind::cuda) {
      gate_ = std::make_unique<draining_gate>(*device_);
      options.alignment = 512;
      options.driver = device_->driver();
      options.gate = gate_.get();
    } else {
      options.persistent = memhandover::chunk_space::backing::process;
    }
    memory_ = std::make_unique<step::training_memory>(options);
  }

  void fork_workers() {
    for (int i = 0; i < how_.workers; ++i) {
      // A GPU's memory cannot be copied by a fork, and the runtime does not try either.
      if (gate_ == nullptr) {
        memory_->before_fork();
      }
      if (::fork() == 0) {
        if (gate_ == nullptr) {
          memory_->after_fork_in_child();
        }
        ::signal(SIGTERM, SIG_DFL);
        for (;;) {
          ::pause();
        }
      }
      if (gate_ == nullptr) {
        memory_->after_fork_in_parent();
      }
    }
  }

  void train() {
    auto* const weights = memory_->allocate_persistent(2 * chunk_);
    auto size = how_.bytes;
    while (!stopping) {
      if (micro_batch(size)) {
        memory_->client().mailbox().commits.fetch_add(1, std::memory_order_relaxed);
        pass([&] { (void)device_->fill(weights, chunk_, static_cast<std::uint8_t>(random_())); });
        size = std::min<std::uint64_t>(how_.bytes, size + size / 4);
      } else {
        memory_->client().mailbox().discards.fetch_add(1, std::memory_order_relaxed);
        size = std::max<std::uint64_t>(size / 2, 4 * chunk_);
      }
      ::poll(nullptr, 0, static_cast<int>(random_() % 3));  // as a job waits for its samples
    }
  }

 private:
  template <typename Work>
  bool pass(Work&& work) {
    if (gate_ != nullptr) {
      return gate_->pass(std::forward<Work>(work));
    }
    work();
    return true;
  }

  /// Allocates, writes, and sees its own bytes again unless they were taken away. True: committed.
  bool micro_batch(std::uint64_t bytes) {
    std::vector<std::pair<std::byte*, std::size_t>> blocks;
    auto const mark = static_cast<std::uint8_t>(random_() % 255 + 1);
    bool committed = false;
    memory_->begin();
    try {
      for (std::uint64_t used = 0; used < bytes;) {
        auto const size = chunk_ / 16 + random_() % (3 * chunk_);
        auto* const address = memory_->allocate_arena(size);
        blocks.emplace_back(address, size);
        pass([&] { (void)device_->fill(address, size, mark); });
        used += size;
      }
      bool intact = true;
      for (auto const& [address, size] : blocks) {
        std::uint8_t ends[2] = {};
        pass([&, at = address, length = size] {
          intact = device_->read(at, {ends, 1}) && device_->read(at + length - 1, {ends + 1, 1}) &&
                   ends[0] == mark && ends[1] == mark && intact;
        });
      }
      committed = memory_->commit_begin();
      if (committed && !intact) {
        throw error{error_kind::internal, "a committed micro-batch has lost its contents"};
      }
    } catch (error const& why) {
      if (why.kind() != error_kind::cancelled && why.kind() != error_kind::out_of_memory) {
        throw;
      }
    }
    for (auto const& [address, size] : blocks) {
      if (!memory_->free(address)) {
        throw error{error_kind::internal, "a block could not be freed"};
      }
    }
    if (committed) {
      memory_->commit_end(false);
    } else {
      memory_->discard();
    }
    return committed;
  }

  role_options how_;
  std::mt19937 random_;
  std::unique_ptr<pool_device> device_;
  std::unique_ptr<draining_gate> gate_;
  std::uint64_t chunk_ = 0;
  std::unique_ptr<step::training_memory> memory_;
};

/// Fills what it got, looks whether it stays so, gives it back.
void serve_once(memhandover::serving_pool& pool, pool_device& device, std::uint64_t bytes,
                std::mt19937& random, server_progress& progress) {
  auto const where = pool.acquire(bytes, steady_clock::now() + std::chrono::seconds{5});
  auto const mark = static_cast<std::uint8_t>(random() % 255 + 1);
  auto const claim = pool.claim_compute();
  bool intact = device.fill(where.data(), where.bytes(), mark);
  for (std::uint64_t i = 0; i < 64; ++i) {
    std::uint8_t seen = 0;
    auto const offset = (where.bytes() - 1) * i / 63;
    intact = device.read(where.data() + offset, {&seen, 1}) && seen == mark && intact;
  }
  progress.wrong += intact ? 0 : 1;
}

}  // namespace

int trainer_role(role_options const& options) {
  stop_on_sigterm();
  trainer job{options};
  job.fork_workers();
  job.train();
  ::raise(SIGSTOP);
  return 0;
}

int server_role(role_options const& options) {
  stop_on_sigterm();
  auto* const page =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, options.progress_fd, 0);
  if (page == MAP_FAILED) {
    throw std::runtime_error{"cannot map the progress page"};
  }
  auto& progress = *static_cast<server_progress*>(page);
  auto const pool = memhandover::serving_pool::join({.runtime_dir = options.runtime_dir});
  auto const device = open_pool_device(pool->shape().backend, std::max(0, pool->shape().device));
  std::mt19937 random{std::random_device{}()};
  progress.joined = static_cast<std::uint64_t>(::getpid());
  while (!stopping) {
    try {
      serve_once(*pool, *device, options.bytes / 4 + random() % (options.bytes - options.bytes / 4),
                 random, progress);
      ++progress.served;
    } catch (error const& why) {
      ++progress.failed;
      std::fprintf(stderr, "server: %s: %s\n", std::string{to_string(why.kind())}.c_str(),
                   why.what());
    }
    ::poll(nullptr, 0, static_cast<int>(random() % 4));
  }
  return 0;
}

}  // namespace sluice::bench
