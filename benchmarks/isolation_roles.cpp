#include "benchmarks/isolation_roles.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <deque>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "benchmarks/pool_device.hpp"
#include "memhandover/error.hpp"
#include "memhandover/serving_pool.hpp"
#include "memhandover/unique_fd.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::bench {
namespace {

using memhandover::backend_kind;
using std::chrono::steady_clock;

constexpr int values_of_a_trainer = 100;
constexpr int first_of_the_server = 2 * values_of_a_trainer + 1;
constexpr std::size_t touched_at_once = 4096;
/// Micro-batches whose revoked memory is kept, so that its addresses are not used again.
constexpr std::size_t kept_micro_batches = 4;

struct block {
  std::byte* where = nullptr;
  std::size_t bytes = 0;
};

/// A training process of one micro-batch after the other.
class trainer {
 public:
  explicit trainer(isolation_options const& how)
      : how_(how),
        counts_(map_counts(how.counts)),
        random_(std::random_device{}()),
        device_(
            open_pool_device(how.broker.backend == "cuda" ? backend_kind::cuda : backend_kind::host,
                             how.broker.device.value_or(0))) {
    step::training_memory::options options;
    options.broker = how.broker;
    options.name = "job " + std::to_string(how.number);
    if (device_->driver() != nullptr) {
      gate_ = std::make_unique<draining_gate>(*device_);
      options.alignment = 512;
      options.driver = device_->driver();
      options.gate = gate_.get();
    } else {
      options.persistent = memhandover::chunk_space::backing::process;
    }
    memory_ = std::make_unique<step::training_memory>(options);
    chunk_ = memory_->client().view().shape().chunk_bytes;
    size_ = how.bytes;
  }

  [[nodiscard]] pool_device& device() noexcept { return *device_; }
  /// A word of memory that nobody takes away.
  [[nodiscard]] std::byte* persistent_word() { return memory_->allocate_persistent(512); }

  template <typename Work>
  bool pass(Work&& work) {
    if (gate_ != nullptr) {
      return gate_->pass(std::forward<Work>(work));
    }
    work();
    return true;
  }

  /// One micro-batch. Returns what was taken away in it, still allocated; nothing if it committed
  /// or ran short.
  std::vector<block> micro_batch() {
    std::vector<block> blocks;
    memory_->begin();
    bool committed = false;
    try {
      for (std::uint64_t used = 0; used < size_;) {
        block const next{nullptr, chunk_ / 16 + random_() % (2 * chunk_)};
        blocks.push_back({memory_->allocate_arena(next.bytes), next.bytes});
        look_at_grant(blocks.back());
        pass([&] { (void)device_->fill(blocks.back().where, next.bytes, own_value()); });
        {
          std::lock_guard const lock{mutex_};
          live_.push_back(blocks.back());
        }
        used += next.bytes;
      }
      ::poll(nullptr, 0, static_cast<int>(random_() % 2));  // others touch it meanwhile
      committed = memory_->commit_begin();
    } catch (error const& why) {
      if (why.kind() != error_kind::cancelled && why.kind() != error_kind::out_of_memory) {
        throw;
      }
    }
    bool const revoked = memory_->state() == step::arena_state::revoked;
    {
      std::lock_guard const lock{mutex_};
      live_.clear();
    }
    if (committed) {
      free(blocks);
      memory_->commit_end(false);
      size_ = std::min<std::uint64_t>(how_.bytes, size_ + size_ / 4);
      return {};
    }
    if (!revoked) {
      size_ = std::max<std::uint64_t>(size_ / 2, 4 * chunk_);
      free(blocks);
      memory_->discard();
      return {};
    }
    memory_->discard();
    ++counts_.revocations;
    return blocks;
  }

  void free(std::vector<block> const& blocks) {
    for (auto const& one : blocks) {
      if (!memory_->free(one.where)) {
        throw error{error_kind::internal, "a block could not be freed"};
      }
    }
  }

  /// Remembers what has been revoked, and frees what has been remembered longest.
  void remember(std::vector<block> blocks) {
    std::vector<block> oldest;
    {
      std::lock_guard const lock{mutex_};
      revoked_.push_back(std::move(blocks));
      if (revoked_.size() > kept_micro_batches) {
        oldest = std::move(revoked_.front());
        revoked_.pop_front();
      }
    }
    free(oldest);
  }

  /// Touches live and revoked memory until `done`: what a running kernel does that nobody stops.
  void touch_all_the_time() {
    std::mt19937 random{std::random_device{}()};
    while (counts_.done == 0) {
      {
        std::lock_guard const lock{mutex_};
        if (!live_.empty()) {
          touch(live_[random() % live_.size()], false, random);
        }
        if (!revoked_.empty()) {
          auto const& micro_batch = revoked_[random() % revoked_.size()];
          touch(micro_batch[random() % micro_batch.size()], true, random);
        }
      }
      std::this_thread::yield();
    }
  }

 private:
  [[nodiscard]] std::uint8_t own_value() {
    return static_cast<std::uint8_t>(1 + how_.number * values_of_a_trainer +
                                     static_cast<int>(random_() % values_of_a_trainer));
  }

  /// Bytes that are neither zero nor this trainer's.
  [[nodiscard]] std::uint64_t strange(std::vector<std::uint8_t> const& bytes) const {
    auto const first = 1 + how_.number * values_of_a_trainer;
    return static_cast<std::uint64_t>(
        std::count_if(bytes.begin(), bytes.end(), [first](std::uint8_t byte) {
          return byte != 0 && (byte < first || byte >= first + values_of_a_trainer);
        }));
  }

  /// What comes from the pool is zero; what the arena has had before is this trainer's own.
  void look_at_grant(block const& granted) {
    std::vector<std::uint8_t> seen(granted.bytes);
    bool read = false;
    if (pass([&] { read = device_->read(granted.where, seen); }) && read) {
      counts_.granted_bytes += granted.bytes;
      counts_.leaked_bytes += strange(seen);
    }
  }

  void touch(block const& one, bool revoked, std::mt19937& random) {
    auto const bytes = std::min(one.bytes, touched_at_once);
    auto* const where = one.where + random() % (one.bytes - bytes + 1);
    auto const value = static_cast<std::uint8_t>(1 + how_.number * values_of_a_trainer +
                                                 static_cast<int>(random() % values_of_a_trainer));
    std::vector<std::uint8_t> seen(bytes);
    bool read = false;
    bool written = false;
    bool const passed = pass([&] {
      // A copy to a revoked address is refused; what else does on a GPU would end the context.
      written = revoked ? device_->write(where, std::vector<std::uint8_t>(bytes, value))
                        : device_->fill(where, bytes, value);
      read = device_->read(where, seen);
    });
    if (passed && revoked) {
      counts_.probes += 2;
      counts_.refused += (read ? 0U : 1U) + (written ? 0U : 1U);
    }
    if (passed && read && strange(seen) > 0) {
      ++counts_.probes_that_saw;
    }
  }

  isolation_options how_;
  isolation_counts& counts_;
  std::mt19937 random_;
  std::unique_ptr<pool_device> device_;
  std::unique_ptr<draining_gate> gate_;
  std::unique_ptr<step::training_memory> memory_;
  std::uint64_t chunk_ = 0;
  std::uint64_t size_ = 0;
  std::mutex mutex_;  ///< guards what follows
  std::vector<block> live_;
  std::deque<std::vector<block>> revoked_;
};

/// Waits a moment for training to hold so much that an acquisition has to take some of it.
void let_training_grow(memhandover::serving_pool const& pool) {
  auto const enough = pool.shape().bytes() / 2;
  for (int i = 0; i < 30 && pool.usage().training_bytes < enough; ++i) {
    ::poll(nullptr, 0, 1);
  }
}

/// The server's memory holds `value` and nothing else.
void look_for_foreign_bytes(pool_device& device, memhandover::placement const& where,
                            std::uint8_t value, isolation_counts& counts) {
  std::vector<std::uint8_t> seen(where.bytes());
  if (!device.read(where.data(), seen)) {
    throw error{error_kind::internal, "the server cannot read its own memory"};
  }
  counts.checked_bytes += seen.size();
  counts.foreign_bytes +=
      seen.size() - static_cast<std::uint64_t>(std::count(seen.begin(), seen.end(), value));
}

}  // namespace

isolation_counts& map_counts(std::string const& file) {
  memhandover::unique_fd const opened{::open(file.c_str(), O_RDWR | O_CLOEXEC)};
  void* const page = ::mmap(nullptr, sizeof(isolation_counts), PROT_READ | PROT_WRITE, MAP_SHARED,
                            opened.get(), 0);
  if (page == MAP_FAILED) {
    throw error{error_kind::invalid_argument, "cannot map the counts in " + file};
  }
  return *static_cast<isolation_counts*>(page);
}

int isolation_trainer(isolation_options const& options) {
  auto& counts = map_counts(options.counts);
  trainer job{options};
  std::thread toucher{[&job] { job.touch_all_the_time(); }};
  while (counts.done == 0) {
    if (auto lost = job.micro_batch(); !lost.empty()) {
      job.remember(std::move(lost));
    }
  }
  toucher.join();
  return 0;
}

int isolation_fault(isolation_options const& options) {
  auto& counts = map_counts(options.counts);
  trainer job{options};
  while (counts.done == 0) {
    auto const lost = job.micro_batch();
    if (lost.empty()) {
      continue;
    }
    // A word of its own first: the kernel works, so a failure is the address's. Through the gate:
    // it opens when the mappings have been removed.
    auto* const word = job.persistent_word();
    int sound = -1;
    int fault = -1;
    job.pass([&] {
      sound = job.device().add_one_by_kernel(word);
      fault = job.device().add_one_by_kernel(lost.front().where);
    });
    std::printf("%d %d\n", sound, fault);
    std::fflush(stdout);
    ::_exit(0);  // what is left of this process's context can clean up nothing
  }
  return 0;
}

int isolation_server(isolation_options const& options) {
  auto& counts = map_counts(options.counts);
  auto const pool = memhandover::serving_pool::join({.runtime_dir = options.broker.runtime_dir,
                                                     .pool_bytes = options.broker.pool_bytes,
                                                     .chunk_bytes = options.broker.chunk_bytes,
                                                     .backend = options.broker.backend,
                                                     .device = options.broker.device});
  auto const device = open_pool_device(pool->shape().backend, pool->shape().device);
  std::mt19937 random{std::random_device{}()};
  while (counts.handovers < options.handovers) {
    try {
      memhandover::handover_report report;
      let_training_grow(*pool);
      ::poll(nullptr, 0, static_cast<int>(random() % 2));
      auto const where = pool->acquire(options.bytes / 2 + random() % (options.bytes / 2),
                                       steady_clock::now() + std::chrono::seconds{5}, &report);
      auto const value =
          static_cast<std::uint8_t>(first_of_the_server + random() % (256 - first_of_the_server));
      if (!device->fill(where.data(), where.bytes(), value)) {
        throw error{error_kind::internal, "the server cannot write its own memory"};
      }
      look_for_foreign_bytes(*device, where, value, counts);
      ::poll(nullptr, 0, static_cast<int>(random() % 3));
      look_for_foreign_bytes(*device, where, value, counts);
      counts.handovers += report.bytes_reclaimed > 0 ? 1 : 0;
    } catch (error const& why) {
      ++counts.server_errors;
      std::fprintf(stderr, "server: %s\n", why.what());
    }
  }
  counts.done = 1;
  return 0;
}

}  // namespace sluice::bench
