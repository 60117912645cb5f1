/// Takes memory from a training job again and again, and says how long each phase took.
///
/// Joins the pool as its inference server. Before each acquisition it waits until training holds at
/// least the size, then for a random time, so that the demand meets training at a random instant.
/// One JSON object a line on standard output.

#include <poll.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "memhandover/broker_queries.hpp"
#include "memhandover/error.hpp"
#include "memhandover/serving_pool.hpp"

namespace {

using namespace sluice;
using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::chrono::seconds patience{60};

double us(std::chrono::nanoseconds value) {
  return duration<double, std::micro>{value}.count();
}

/// Bytes that the training jobs' arenas hold in all; 0 while there is no broker yet.
std::uint64_t arena_bytes(std::string const& runtime_dir) {
  std::uint64_t held = 0;
  try {
    auto const status = memhandover::query_status(runtime_dir);
    for (auto const& client : status["clients"]) {
      held += client.value("arena_bytes", std::uint64_t{0});
    }
  } catch (error const& why) {
    if (why.kind() != error_kind::unavailable) {
      throw;
    }
  }
  return held;
}

/// Waits until the training jobs' arenas hold `bytes` in all.
void await_arena(std::string const& runtime_dir, std::uint64_t bytes) {
  auto const deadline = steady_clock::now() + patience;
  for (;;) {
    auto const held = arena_bytes(runtime_dir);
    if (held >= bytes) {
      return;
    }
    if (steady_clock::now() > deadline) {
      throw error{error_kind::deadline_exceeded, "training's arena has " + std::to_string(held) +
                                                     " bytes, " + std::to_string(bytes) +
                                                     " are needed for a handover of this size"};
    }
    ::poll(nullptr, 0, 2);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Takes memory from training and times it"};
  std::string runtime_dir;
  std::uint64_t bytes = 0;
  int count = 0;
  int most_delay_ms = 0;
  unsigned seed = 1;
  app.add_option("--runtime-dir", runtime_dir)->required();
  app.add_option("--bytes", bytes)->required();
  app.add_option("--count", count)->required();
  app.add_option("--delay-ms", most_delay_ms, "random time before each demand, at most")
      ->required();
  app.add_option("--seed", seed);
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::warn);
  try {
    // The job makes the pool: one made here would have another size.
    await_arena(runtime_dir, bytes);
    auto const pool =
        memhandover::serving_pool::join({.name = "benchmark", .runtime_dir = runtime_dir});
    std::mt19937 random{seed};
    for (int taken = 0, tries = 0; taken < count;) {
      // What is free would cost nothing: ask for so much more that `bytes` come from training.
      await_arena(runtime_dir, bytes);
      ::poll(nullptr, 0, static_cast<int>(random() % static_cast<unsigned>(most_delay_ms + 1)));
      memhandover::handover_report report;
      auto const wanted = bytes + pool->usage().free_bytes;
      auto const demanded = steady_clock::now();
      memhandover::placement where;
      try {
        where = pool->acquire(wanted, steady_clock::now() + patience, &report);
      } catch (error const& why) {
        // Training has made some of it persistent since it was counted.
        if (why.kind() != error_kind::out_of_memory || ++tries > count) {
          throw;
        }
        continue;
      }
      ++taken;
      nlohmann::json const line{{"demanded_ns", demanded.time_since_epoch().count()},
                                {"bytes_reclaimed", report.bytes_reclaimed},
                                {"notify_us", us(report.notify)},
                                {"gate_us", us(report.gate)},
                                {"drain_us", us(report.drain)},
                                {"revoke_us", us(report.revoke)},
                                {"ledger_us", us(report.ledger)},
                                {"map_us", us(report.map)},
                                {"latency_us", us(report.total)}};
      std::printf("%s\n", line.dump().c_str());
      std::fflush(stdout);
    }
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice-bench-handover: %s\n", why.what());
    return 1;
  }
}
