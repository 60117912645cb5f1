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
#include <stop_token>
#include <thread>
#include <vector>

#include "benchmarks/isolation_watch.hpp"
#include "benchmarks/pool_training.hpp"
#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/client/serving_pool.hpp"

namespace sluice::bench {
namespace {

using memhandover::backend_kind;
using std::chrono::steady_clock;

constexpr std::size_t touched_at_once = 4096;
/// Micro-batches whose revoked memory is kept, so that its addresses are not used again.
constexpr std::size_t kept_micro_batches = 4;

struct block {
  std::byte* where = nullptr;
  std::size_t bytes = 0;
};

/// A lock for the thread that trains and the one that touches memory. Training goes first: whoever
/// takes a lock again right after giving it back keeps others from it for many rounds, and a round
/// takes long where several processes share the device.
class right_of_way {
 public:
  [[nodiscard]] std::unique_lock<std::mutex> first() {
    waiting_.fetch_add(1);
    std::unique_lock lock{mutex_};
    waiting_.fetch_sub(1);
    waiting_.notify_all();
    return lock;
  }
  [[nodiscard]] std::unique_lock<std::mutex> second() {
    for (auto others = waiting_.load(); others != 0; others = waiting_.load()) {
      waiting_.wait(others);
    }
    return std::unique_lock{mutex_};
  }

 private:
  std::atomic<int> waiting_{0};
  std::mutex mutex_;
};

std::string name_of(isolation_options const& how) {
  return role_names.at(static_cast<std::size_t>(how.number));
}

/// A training process of one micro-batch after the other.
class trainer {
 public:
  trainer(isolation_options const& how, role_watch& watch)
      : how_(how),
        counts_(map_counts(how.counts)),
        watch_(watch),
        random_(std::random_device{}()),
        pool_(how.broker.backend == "cuda" ? backend_kind::cuda : backend_kind::host,
              how.broker.device.value_or(0), memory_options(how)),
        chunk_(memory().client().view().shape().chunk_bytes),
        size_(how.bytes) {
    watch_.explain_by([this] { return memory().shortage(); });
  }
  trainer(trainer const&) = delete;
  trainer& operator=(trainer const&) = delete;
  ~trainer() {
    watch_.doing(activity::leaving);
    watch_.explain_by(nullptr);
  }

  [[nodiscard]] pool_training& pool() noexcept { return pool_; }
  /// A word of memory that nobody takes away.
  [[nodiscard]] std::byte* persistent_word() {
    watch_.doing(activity::persistent);
    return memory().allocate_persistent(512);
  }

  /// One micro-batch. Returns what was taken away in it, still allocated; nothing if it committed
  /// or ran short.
  std::vector<block> micro_batch() {
    std::vector<block> blocks;
    memory().begin();
    bool committed = false;
    try {
      for (std::uint64_t used = 0; used < size_;) {
        auto const bytes = chunk_ / 16 + random_() % (2 * chunk_);
        watch_.doing(activity::allocating);
        blocks.push_back({memory().allocate_arena(bytes), bytes});
        watch_.doing(activity::using_memory);
        look_at_grant(blocks.back());
        pool_.pass([&] { (void)pool_.device().fill(blocks.back().where, bytes, own_value()); });
        watch_.doing(activity::own_turn);
        {
          auto const lock = turns_.first();
          live_.push_back(blocks.back());
        }
        used += bytes;
      }
      watch_.doing(activity::committing);
      ::poll(nullptr, 0, static_cast<int>(random_() % 2));  // others touch it meanwhile
      committed = memory().commit_begin(false) == sluice::step::commit_start::begun;
    } catch (error const& why) {
      if (why.kind() != error_kind::cancelled && why.kind() != error_kind::out_of_memory) {
        throw;
      }
    }
    bool const revoked = memory().state() == step::arena_state::revoked;
    watch_.doing(activity::own_turn);
    {
      auto const lock = turns_.first();
      live_.clear();
    }
    watch_.doing(activity::committing);
    if (committed) {
      free(blocks);
      memory().commit_end(false);
      size_ = std::min<std::uint64_t>(how_.bytes, size_ + size_ / 4);
      return {};
    }
    if (!revoked) {
      size_ = std::max<std::uint64_t>(size_ / 2, 4 * chunk_);
      free(blocks);
      memory().discard();
      return {};
    }
    memory().discard();
    ++counts_.revocations;
    return blocks;
  }

  void free(std::vector<block> const& blocks) {
    for (auto const& one : blocks) {
      if (!memory().free(one.where)) {
        throw error{error_kind::internal, "a block could not be freed"};
      }
    }
  }

  /// Remembers what has been revoked, and frees what has been remembered longest.
  void remember(std::vector<block> blocks) {
    std::vector<block> oldest;
    watch_.doing(activity::own_turn);
    {
      auto const lock = turns_.first();
      revoked_.push_back(std::move(blocks));
      if (revoked_.size() > kept_micro_batches) {
        oldest = std::move(revoked_.front());
        revoked_.pop_front();
      }
    }
    watch_.doing(activity::freeing);
    free(oldest);
  }

  /// Touches live and revoked memory until told to stop: what a running kernel does that nobody
  /// stops.
  void touch_all_the_time(std::stop_token const& stop) {
    std::mt19937 random{std::random_device{}()};
    while (!stop.stop_requested()) {
      {
        auto const lock = turns_.second();
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
  static step::training_memory::options memory_options(isolation_options const& how) {
    step::training_memory::options options;
    options.broker = how.broker;
    options.name = name_of(how);
    return options;
  }

  [[nodiscard]] step::training_memory& memory() noexcept { return pool_.memory(); }

  [[nodiscard]] std::uint8_t own_value() {
    return static_cast<std::uint8_t>(first_value(how_.number) + random_() % values_of_a_role);
  }

  /// Bytes that are neither zero nor this trainer's.
  [[nodiscard]] std::uint64_t strange(std::vector<std::uint8_t> const& bytes) const {
    auto const first = first_value(how_.number);
    return static_cast<std::uint64_t>(
        std::count_if(bytes.begin(), bytes.end(), [first](std::uint8_t byte) {
          return byte != 0 && (byte < first || byte >= first + values_of_a_role);
        }));
  }

  /// What comes from the pool is zero; what the arena has had before is this trainer's own.
  void look_at_grant(block const& granted) {
    std::vector<std::uint8_t> seen(granted.bytes);
    bool read = false;
    if (pool_.pass([&] { read = pool_.device().read(granted.where, seen); }) && read) {
      counts_.granted_bytes += granted.bytes;
      counts_.leaked_bytes += strange(seen);
    }
  }

  void touch(block const& one, bool revoked, std::mt19937& random) {
    auto const bytes = std::min(one.bytes, touched_at_once);
    auto* const where = one.where + random() % (one.bytes - bytes + 1);
    auto const value =
        static_cast<std::uint8_t>(first_value(how_.number) + random() % values_of_a_role);
    std::vector<std::uint8_t> seen(bytes);
    bool read = false;
    bool written = false;
    bool const passed = pool_.pass([&] {
      // A copy to a revoked address is refused; what else does on a GPU would end the context.
      written = revoked ? pool_.device().write(where, std::vector<std::uint8_t>(bytes, value))
                        : pool_.device().fill(where, bytes, value);
      read = pool_.device().read(where, seen);
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
  role_watch& watch_;
  std::mt19937 random_;
  pool_training pool_;
  std::uint64_t chunk_;
  std::uint64_t size_;
  right_of_way turns_;  ///< guards what follows
  std::vector<block> live_;
  std::deque<std::vector<block>> revoked_;
};

/// Waits a moment for the others to hold so much that an acquisition has to take some of it.
void let_tenants_grow(memhandover::serving_pool const& pool) {
  auto const enough = pool.shape().bytes() / 2;
  for (int i = 0; i < 30 && pool.usage().tenant_bytes() < enough; ++i) {
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

std::string shares(memhandover::serving_pool const& pool) {
  auto const now = pool.usage();
  return "training holds " + format_bytes(now.training_bytes) + ", the engine " +
         format_bytes(now.engine_bytes) + ", " + format_bytes(now.free_bytes) + " are free";
}

/// Takes memory, fills it and looks at it twice. Whether others had to give some of it.
bool serve_once(memhandover::serving_pool& pool, pool_device& device,
                isolation_options const& options, std::mt19937& random, role_watch& watch,
                isolation_counts& counts) {
  watch.doing(activity::growth);
  let_tenants_grow(pool);
  ::poll(nullptr, 0, static_cast<int>(random() % 2));
  watch.doing(activity::acquiring);
  memhandover::handover_report report;
  auto const where = pool.acquire(options.bytes / 2 + random() % (options.bytes / 2),
                                  steady_clock::now() + std::chrono::seconds{5}, &report);
  watch.doing(activity::using_memory);
  auto const value =
      static_cast<std::uint8_t>(first_value(server_number) + random() % values_of_a_role);
  if (!device.fill(where.data(), where.bytes(), value)) {
    throw error{error_kind::internal, "the server cannot write its own memory"};
  }
  look_for_foreign_bytes(device, where, value, counts);
  ::poll(nullptr, 0, static_cast<int>(random() % 3));
  look_for_foreign_bytes(device, where, value, counts);
  return report.bytes_reclaimed > 0;
}

std::atomic<std::uint64_t>& shown_for(isolation_counts& counts, int number) {
  return counts.doing.at(static_cast<std::size_t>(number));
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
  role_watch watch{name_of(options), shown_for(counts, options.number), options.patience};
  trainer job{options, watch};
  std::jthread const toucher{[&job](std::stop_token const& stop) { job.touch_all_the_time(stop); }};
  while (counts.done == 0) {
    if (auto lost = job.micro_batch(); !lost.empty()) {
      job.remember(std::move(lost));
    }
    watch.got_on();
  }
  return 0;
}

int isolation_fault(isolation_options const& options) {
  auto& counts = map_counts(options.counts);
  role_watch watch{name_of(options), shown_for(counts, options.number), options.patience};
  trainer job{options, watch};
  // A word of its own as well: if the kernel works there, a failure is the address's.
  auto* const word = job.persistent_word();
  watch.got_on();
  while (counts.done == 0) {
    auto const lost = job.micro_batch();
    if (lost.empty()) {
      continue;
    }
    watch.doing(activity::kernel);
    auto& device = job.pool().device();
    int sound = -1;
    int fault = -1;
    // Through the gate: it opens when the mappings have been removed.
    job.pool().pass([&] {
      sound = device.add_one_by_kernel(word);
      fault = device.add_one_by_kernel(lost.front().where);
    });
    std::printf("%d %d\n", sound, fault);
    std::fflush(stdout);
    ++counts.faults;
    watch.doing(activity::nothing);
    ::_exit(0);  // what is left of this process's context can clean up nothing
  }
  return 0;
}

int isolation_server(isolation_options const& options) {
  auto& counts = map_counts(options.counts);
  role_watch watch{"server", shown_for(counts, server_number), options.patience};
  auto const end = steady_clock::now() + options.longest;
  auto const pool = memhandover::serving_pool::join({.runtime_dir = options.broker.runtime_dir,
                                                     .pool_bytes = options.broker.pool_bytes,
                                                     .chunk_bytes = options.broker.chunk_bytes,
                                                     .backend = options.broker.backend,
                                                     .device = options.broker.device,
                                                     .demands_from_engines = true});
  auto const device = open_pool_device(pool->shape().backend, pool->shape().device);
  watch.explain_by([&pool] { return shares(*pool); });
  std::mt19937 random{std::random_device{}()};
  while (steady_clock::now() < end &&
         (counts.handovers < options.handovers || counts.faults < options.faults)) {
    try {
      if (serve_once(*pool, *device, options, random, watch, counts)) {
        ++counts.handovers;
        watch.got_on();
      }
    } catch (error const& why) {
      ++counts.server_errors;
      std::fprintf(stderr, "server: %s\n", why.what());
    }
  }
  counts.done = 1;
  watch.explain_by(nullptr);
  watch.doing(activity::leaving);
  return 0;
}

}  // namespace sluice::bench
