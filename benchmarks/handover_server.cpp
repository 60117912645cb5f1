/// Takes memory from a training job again and again, and says how long each phase took.
///
/// Joins the pool as its inference server. Before each acquisition it waits until training's arena
/// holds at least the size, then for a random time, so that the demand meets training at a random
/// instant. It takes what the tensors of a language model of that size need, as a server does, or one
/// range. It may pause training meanwhile, for as long as it takes. What it gets it uses at once: on
/// a GPU by a kernel. One JSON object a line on standard output.

#include <poll.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "benchmarks/first_kernel.hpp"
#include "benchmarks/model_sizes.hpp"
#include "memhandover/allocation/tensor_heap.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/client/serving_pool.hpp"

namespace {

using namespace sluice;
using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::chrono::seconds patience{60};
/// For a job's first commits: it may have to compile its model.
constexpr std::chrono::seconds start_patience{300};
/// Of the size, so many percent must come from a micro-batch that was running for a handover to count.
constexpr std::uint64_t least_live_percent = 90;
constexpr int most_missed = 2000;
/// After so long of a pause most jobs have come to rest.
constexpr int at_rest_ms = 10;
/// Micro-batches after which optimizer and libraries have what they need for good.
constexpr std::uint64_t warmed_up = 6;

double us(std::chrono::nanoseconds value) {
  return duration<double, std::micro>{value}.count();
}

struct pool_name {
  std::string runtime_dir;
  std::optional<int> device;
};

/// What the broker says of the pool's training job, or of the process of it that has the largest arena; null while
/// there is none.
nlohmann::json training_job(pool_name const& where) {
  try {
    auto const status = memhandover::query_status(where.runtime_dir, where.device);
    nlohmann::json found;
    for (auto const& client : status["clients"]) {
      if (client["kind"] == "training" &&
          (found.is_null() || client["arena_bytes"] > found["arena_bytes"])) {
        found = client;
      }
    }
    return found;
  } catch (error const& why) {
    if (why.kind() != error_kind::unavailable && why.kind() != error_kind::not_found) {
      throw;
    }
  }
  return nullptr;
}

/// Asks until the training job is so.
template <typename Condition>
void await_job(pool_name const& where, std::string const& what, Condition&& holds,
               std::chrono::seconds at_most = patience) {
  auto const deadline = steady_clock::now() + at_most;
  for (;;) {
    auto const job = training_job(where);
    if (job.is_object() && holds(job)) {
      return;
    }
    if (steady_clock::now() > deadline) {
      throw error{error_kind::deadline_exceeded,
                  "waited in vain for " + what + "; the job says " + job.dump()};
    }
    ::poll(nullptr, 0, 2);
  }
}

/// Waits until training's arena has `bytes`; if it is to be `full`, in use, and next to nothing idle
/// beside them (less than `bytes`, if that stays so).
void await_arena(pool_name const& where, std::uint64_t bytes, bool full) {
  auto const what = "an arena of " + std::to_string(bytes) + " bytes";
  auto const long_enough = steady_clock::now() + milliseconds{1500};
  await_job(where, what, [&](auto const& job) {
    auto const spare = job["spare_bytes"].template get<std::uint64_t>();
    auto const held = job["arena_bytes"].template get<std::uint64_t>();
    return full ? held - spare >= bytes &&
                      (spare * 10 <= bytes || (spare < bytes && steady_clock::now() > long_enough))
                : held >= bytes;
  });
}

/// Waits until training has completed `more` micro-batches, and so has back what it needs.
void await_commits(pool_name const& where, std::uint64_t more) {
  auto const commits = [](auto const& job) { return job["commits"].template get<std::uint64_t>(); };
  std::optional<std::uint64_t> first;
  await_job(where, "commits", [&](auto const& job) {
    first = first.value_or(commits(job));
    return commits(job) >= *first + more;
  });
}

/// Waits for the next instant (CLOCK_MONOTONIC) that is a multiple of so long: the same one in every
/// process.
void await_multiple(std::chrono::nanoseconds of) {
  auto const next = (steady_clock::now().time_since_epoch() / of + 1) * of;
  std::this_thread::sleep_until(steady_clock::time_point{next});
}

/// Memory that a handover has brought, and what is to know of it.
struct taken_memory {
  memhandover::placement range;
  memhandover::loaded_tensors tensors;
  std::byte* first = nullptr;     ///< what the server's first kernel touches …
  std::uint64_t first_bytes = 0;  ///< … and how much of it
  std::uint64_t stitched = 0;     ///< ranges that had to be mapped a second time
  memhandover::handover_report report;
};

/// Takes `bytes`: as the tensors of a model, or as one range.
class taker {
 public:
  taker(std::shared_ptr<memhandover::serving_pool> pool, std::uint64_t bytes, bool one_range)
      : pool_(std::move(pool)), bytes_(bytes) {
    if (!one_range) {
      heap_.emplace(pool_, 256);
      sizes_ = benchmarks::language_model(bytes);
    }
  }

  [[nodiscard]] taken_memory take() {
    taken_memory result;
    auto const deadline = steady_clock::now() + patience;
    if (heap_) {
      auto const before = heap_->count().stitched_ranges;
      result.tensors = heap_->load({sizes_, "benchmark"}, deadline, &result.report);
      result.first = result.tensors.addresses().front();
      result.first_bytes = sizes_.front();
      result.stitched = heap_->count().stitched_ranges - before;
      return result;
    }
    // What is free would cost nothing: ask for so much more that `bytes` come from training.
    result.range = pool_->acquire(bytes_ + pool_->usage().free_bytes, deadline, &result.report);
    result.first = result.range.data();
    result.first_bytes = result.range.bytes();
    auto* const whole = pool_->whole_view();
    result.stitched =
        result.first < whole || result.first >= whole + pool_->shape().bytes() ? 1 : 0;
    return result;
  }

 private:
  std::shared_ptr<memhandover::serving_pool> pool_;
  std::uint64_t bytes_;
  std::optional<memhandover::tensor_heap> heap_;
  benchmarks::tensor_sizes sizes_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Takes memory from training and times it"};
  pool_name where;
  std::uint64_t bytes = 0;
  int count = 0;
  int most_delay_ms = 0;
  int multiple_ms = 0;
  bool fill = false;
  bool live_only = false;
  bool reclaimed_only = false;
  bool one_range = false;
  bool paused = false;
  unsigned seed = 1;
  int most_seconds = 0;
  app.add_option("--runtime-dir", where.runtime_dir)->required();
  app.add_option("--device", where.device, "of the pool; default: the only one there is");
  app.add_option("--bytes", bytes)->required();
  app.add_option("--count", count)->required();
  app.add_option("--delay-ms", most_delay_ms, "random time before each demand, at most")
      ->required();
  app.add_option("--at-multiples-ms", multiple_ms,
                 "then wait for an instant that is a multiple of so many, as other servers do");
  app.add_flag("--fill", fill, "take what training does not use first, and wait for a full arena");
  app.add_flag("--live", live_only, "count handovers out of a running micro-batch only");
  app.add_flag("--reclaimed", reclaimed_only, "count handovers out of training only");
  app.add_flag("--range", one_range, "take one range instead of a model's tensors");
  app.add_flag("--paused", paused,
               "hold training's launches before each demand and until it is met");
  app.add_option("--seed", seed);
  app.add_option("--seconds", most_seconds, "end with fewer after so long");
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::warn);
  try {
    // The job makes the pool: one made here would have another size.
    await_job(
        where, "training to settle",
        [&](auto const& job) {
          auto const needed = fill ? warmed_up : 0;
          return job["commits"].template get<std::uint64_t>() >= needed &&
                 job["arena_bytes"].template get<std::uint64_t>() >= bytes;
        },
        start_patience);
    auto const pool = memhandover::serving_pool::join(
        {.name = "benchmark", .runtime_dir = where.runtime_dir, .device = where.device});
    std::optional<benchmarks::first_kernel> kernel;
    if (pool->shape().backend == memhandover::backend_kind::cuda) {
      kernel.emplace(pool->shape().device);
    }
    // What training does not use stays with other models, so that demands have to be met by it.
    std::vector<memhandover::placement> others;
    auto const take_unused = [&] {
      if (auto const free = fill ? pool->usage().free_bytes : 0; free > 0) {
        others.push_back(pool->acquire(free, steady_clock::now() + patience));
      }
    };
    take_unused();
    taker from_training{pool, bytes, one_range};
    std::mt19937 random{seed};
    auto const end = most_seconds > 0 ? steady_clock::now() + std::chrono::seconds{most_seconds}
                                      : steady_clock::time_point::max();
    for (int taken = 0, tries = 0, missed = 0; taken < count && steady_clock::now() < end;) {
      await_arena(where, bytes, fill);
      ::poll(nullptr, 0, static_cast<int>(random() % static_cast<unsigned>(most_delay_ms + 1)));
      if (multiple_ms > 0) {
        await_multiple(milliseconds{multiple_ms});
      }
      auto claim = paused ? pool->claim_compute() : memhandover::compute_claim{};
      if (paused && random() % 2 == 0) {
        ::poll(nullptr, 0,
               at_rest_ms);  // the demand meets threads that are held, or else on their way
      }
      auto const demanded = steady_clock::now();
      taken_memory memory;
      try {
        memory = from_training.take();
      } catch (error const& why) {
        // Training has made some of it persistent since it was counted.
        if (why.kind() != error_kind::out_of_memory || ++tries > count) {
          throw;
        }
        continue;
      }
      if (kernel) {
        kernel->run(memory.first, memory.first_bytes, pool->shape().chunk_bytes);
      }
      auto const used = steady_clock::now();
      claim = {};
      auto const& report = memory.report;
      // Between two micro-batches what training gives up is no live memory.
      bool const live = report.bytes_live * 100 >= bytes * least_live_percent;
      bool const reclaimed = report.bytes_reclaimed * 100 >= bytes * least_live_percent;
      bool const counts = (live || !live_only) && (reclaimed || !reclaimed_only);
      taken += counts ? 1 : 0;
      if (!counts && ++missed > most_missed) {
        throw error{error_kind::unavailable, std::to_string(missed) +
                                                 " demands met no micro-batch that held " +
                                                 std::to_string(bytes) + " bytes"};
      }
      nlohmann::json const line{{"demanded_ns", demanded.time_since_epoch().count()},
                                {"bytes_reclaimed", report.bytes_reclaimed},
                                {"live", live},
                                {"counts", counts},
                                {"stitched", memory.stitched},
                                {"first_kernel_us", us(used - demanded)},
                                {"unit_us", us(report.unit)},
                                {"notify_us", us(report.notify)},
                                {"gate_us", us(report.gate)},
                                {"drain_us", us(report.drain)},
                                {"revoke_us", us(report.revoke)},
                                {"ledger_us", us(report.ledger)},
                                {"map_us", us(report.map)},
                                {"latency_us", us(report.total)}};
      std::printf("%s\n", line.dump().c_str());
      std::fflush(stdout);
      memory = {};
      if (fill && !reclaimed) {
        await_commits(where, 2);
        take_unused();
      }
    }
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice-bench-handover: %s\n", why.what());
    return 1;
  }
}
