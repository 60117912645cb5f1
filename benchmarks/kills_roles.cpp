#include "benchmarks/kills_roles.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "benchmarks/pool_training.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/serving_pool.hpp"

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
    chunk_ = pool["chunk_bytes"].get<std::uint64_t>();
    step::training_memory::options options;
    options.broker.runtime_dir = how.runtime_dir;
    options.name = "job";
    options.grow_by = 4;
    pool_.emplace(backend, std::max(0, pool.value("device", 0)), std::move(options));
  }

  void fork_workers() {
    for (int i = 0; i < how_.workers; ++i) {
      // A GPU's memory cannot be copied by a fork, and the runtime does not try either.
      if (!pool_->on_gpu()) {
        memory().before_fork();
      }
      if (::fork() == 0) {
        if (!pool_->on_gpu()) {
          memory().after_fork_in_child();
        }
        ::signal(SIGTERM, SIG_DFL);
        for (;;) {
          ::pause();
        }
      }
      if (!pool_->on_gpu()) {
        memory().after_fork_in_parent();
      }
    }
  }

  void train() {
    auto* const weights = memory().allocate_persistent(2 * chunk_);
    auto size = how_.bytes;
    while (!stopping) {
      if (micro_batch(size)) {
        memory().client().mailbox().commits.fetch_add(1, std::memory_order_relaxed);
        pool_->pass([&] {
          (void)pool_->device().fill(weights, chunk_, static_cast<std::uint8_t>(random_()));
        });
        size = std::min<std::uint64_t>(how_.bytes, size + size / 4);
      } else {
        memory().client().mailbox().discards.fetch_add(1, std::memory_order_relaxed);
        size = std::max<std::uint64_t>(size / 2, 4 * chunk_);
      }
      ::poll(nullptr, 0, static_cast<int>(random_() % 3));  // as a job waits for its samples
    }
  }

 private:
  [[nodiscard]] step::training_memory& memory() noexcept { return pool_->memory(); }

  /// Allocates, writes, and sees its own bytes again unless they were taken away. True: committed.
  bool micro_batch(std::uint64_t bytes) {
    std::vector<std::pair<std::byte*, std::size_t>> blocks;
    auto const mark = static_cast<std::uint8_t>(random_() % 255 + 1);
    bool committed = false;
    memory().begin();
    try {
      for (std::uint64_t used = 0; used < bytes;) {
        auto const size = chunk_ / 16 + random_() % (3 * chunk_);
        auto* const address = memory().allocate_arena(size);
        blocks.emplace_back(address, size);
        pool_->pass([&] { (void)pool_->device().fill(address, size, mark); });
        used += size;
      }
      bool intact = true;
      for (auto const& [address, size] : blocks) {
        std::uint8_t ends[2] = {};
        pool_->pass([&, at = address, length = size] {
          intact = pool_->device().read(at, {ends, 1}) &&
                   pool_->device().read(at + length - 1, {ends + 1, 1}) && ends[0] == mark &&
                   ends[1] == mark && intact;
        });
      }
      committed = memory().commit_begin(false) == sluice::step::commit_start::begun;
      if (committed && !intact) {
        throw error{error_kind::internal, "a committed micro-batch has lost its contents"};
      }
    } catch (error const& why) {
      if (why.kind() != error_kind::cancelled && why.kind() != error_kind::out_of_memory) {
        throw;
      }
    }
    for (auto const& [address, size] : blocks) {
      if (!memory().free(address)) {
        throw error{error_kind::internal, "a block could not be freed"};
      }
    }
    if (committed) {
      memory().commit_end(false);
    } else {
      memory().discard();
    }
    return committed;
  }

  role_options how_;
  std::mt19937 random_;
  std::uint64_t chunk_ = 0;
  std::optional<pool_training> pool_;
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
