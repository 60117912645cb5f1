/// A server that takes memory from jobs which are parked for it, again and again at random instants, writes all over it,
/// and gives it back.
///
/// One JSON object an acquisition on standard output: {"bytes", "reclaimed", "latency_ms", "refused", "retry_after_ms"}; `refused`
/// is null or why nothing was had. With --gives-back it does what a server does: what is owed to a job it gives back.

#include <poll.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace {

using namespace sluice;
using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int overwritten = 0xA5;

/// Memory that has been taken and not been zeroed by anybody shows in whoever maps it next.
class overwriter {
 public:
  explicit overwriter(memhandover::pool_shape const& shape) {
    if (shape.backend == memhandover::backend_kind::host) {
      return;
    }
    driver_ = memhandover::cuda_driver::open();
    CUcontext context = nullptr;
    CUdevice handle = 0;
    driver_->check(driver_->cuDeviceGet(&handle, shape.device), "no GPU");
    driver_->check(driver_->cuDevicePrimaryCtxRetain(&context, handle), "no context");
    driver_->check(driver_->cuCtxSetCurrent(context), "no context");
    driver_->check(driver_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                   "no stream");
  }
  void run(memhandover::placement const& range) {
    if (driver_ == nullptr) {
      std::memset(range.data(), overwritten, range.bytes());
      return;
    }
    driver_->check(driver_->cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(range.data()),
                                            overwritten, range.bytes(), stream_),
                   "cannot write");
    driver_->check(driver_->cuStreamSynchronize(stream_), "cannot write");
  }

 private:
  std::shared_ptr<memhandover::cuda_driver const> driver_;  ///< null on the host
  CUstream stream_ = nullptr;
};

/// An acquisition as a line of output, and what it brought.
class taker {
 public:
  taker(std::shared_ptr<memhandover::serving_pool> pool, std::chrono::seconds patience)
      : pool_(std::move(pool)), over_(pool_->shape()), patience_(patience) {}

  /// Nothing if it is refused.
  [[nodiscard]] std::optional<memhandover::placement> take(std::uint64_t bytes) {
    nlohmann::json line{{"bytes", bytes}, {"refused", nullptr}};
    std::optional<memhandover::placement> range;
    try {
      memhandover::handover_report report;
      auto const began = steady_clock::now();
      range = pool_->acquire(bytes, began + patience_, &report);
      auto const ended = steady_clock::now();
      line["latency_ms"] = duration<double, std::milli>{ended - began}.count();
      line["reclaimed"] = report.bytes_reclaimed;
      over_.run(*range);
    } catch (error const& why) {
      if (why.kind() != error_kind::out_of_memory) {
        throw;
      }
      line["refused"] = why.what();
      if (auto const after = why.retry_after()) {
        line["retry_after_ms"] = after->count();
      }
    }
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
    return range;
  }
  [[nodiscard]] std::uint64_t free_bytes() const { return pool_->usage().free_bytes; }
  /// A job waits for what others have of its memory.
  [[nodiscard]] bool owed_now() const {
    auto const owed = pool_->owed();
    return owed && owed->at <= steady_clock::now();
  }

 private:
  std::shared_ptr<memhandover::serving_pool> pool_;
  overwriter over_;
  std::chrono::seconds patience_;
};

/// Each line of standard input asks for so many bytes more than are free, and gives back what the one before brought. "rest" takes
/// what is free, and keeps it until 0 bytes are asked for.
void take_as_asked(taker& from) {
  std::optional<memhandover::placement> range;
  std::optional<memhandover::placement> rest;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "rest") {
      rest = from.take(from.free_bytes());
      continue;
    }
    range.reset();
    if (auto const bytes = std::stoull(line); bytes > 0) {
      range = from.take(bytes + from.free_bytes());
    } else {
      rest.reset();
      std::printf("{}\n");
      std::fflush(stdout);
    }
  }
}

/// How one of those who ask does it.
struct demander {
  std::uint64_t least = 0;
  std::uint64_t most = 0;
  int count = 0;
  int hold_ms = 0;
  int apart_ms = 0;
  int patience_s = 60;
  bool gives_back = false;
  unsigned seed = 1;
};

void take_again_and_again(taker& from, demander const& how) {
  std::mt19937_64 random{how.seed};
  auto const up_to = [&random](int limit) {
    return static_cast<int>(random() % static_cast<std::uint64_t>(limit + 1));
  };
  auto const hold = [&](int ms) {
    if (!how.gives_back) {
      ::poll(nullptr, 0, ms);
      return;
    }
    auto const until = steady_clock::now() + milliseconds{ms};
    while (steady_clock::now() < until && !from.owed_now()) {
      ::poll(nullptr, 0, 1);
    }
  };
  for (int taken = 0; taken < how.count;) {
    ::poll(nullptr, 0, up_to(how.apart_ms));
    auto const range =
        from.take(how.least + (how.most > how.least ? random() % (how.most - how.least + 1) : 0));
    hold(range ? up_to(how.hold_ms) : 1);
    taken += range ? 1 : 0;
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Takes memory from jobs that are parked for it"};
  memhandover::serving_pool::options how;
  how.name = "parker";
  how.park_stay = 1;
  demander one;
  unsigned demanders = 1;
  double window_s = 60.0;
  bool asked = false;
  app.add_option("--runtime-dir", how.runtime_dir);
  app.add_option("--device", how.device, "whose pool it is; default: the first one's");
  app.add_option("--least", one.least, "bytes of an acquisition");
  app.add_option("--most", one.most, "default: the same");
  app.add_option("--count", one.count, "of acquisitions");
  app.add_option("--hold-ms", one.hold_ms, "random, at most");
  app.add_option("--apart-ms", one.apart_ms, "random, at most, between two");
  app.add_option("--stay", how.park_stay, "times that going and coming takes");
  app.add_option("--share", how.resident_share, "of every window, of a job that is parked");
  app.add_option("--window-s", window_s, "length of these windows");
  app.add_option("--demanders", demanders, "that ask beside each other");
  app.add_flag("--gives-back", one.gives_back, "what is owed to a job");
  app.add_flag("--from-engines", how.demands_from_engines,
               "when jobs have given all that they can");
  app.add_flag("--asked", asked,
               "as standard input says, a line for each: bytes from others, or 0");
  app.add_option("--patience-s", one.patience_s, "of an acquisition");
  app.add_option("--seed", one.seed);
  CLI11_PARSE(app, argc, argv);
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "parker", std::make_shared<spdlog::sinks::stderr_sink_mt>()));
  spdlog::set_level(spdlog::level::warn);
  try {
    how.resident_window = std::chrono::round<std::chrono::nanoseconds>(duration<double>{window_s});
    auto const pool = memhandover::serving_pool::join(how);
    if (asked) {
      taker from{pool, std::chrono::seconds{one.patience_s}};
      take_as_asked(from);
      return 0;
    }
    std::vector<std::jthread> threads;
    threads.reserve(demanders);
    for (unsigned number = 0; number < demanders; ++number) {
      threads.emplace_back([&pool, how_it = one, number]() mutable {
        how_it.seed += number;
        try {
          taker from{pool, std::chrono::seconds{how_it.patience_s}};
          take_again_and_again(from, how_it);
        } catch (std::exception const& why) {
          std::fprintf(stderr, "sluice-bench-parker: %s\n", why.what());
          std::_Exit(EXIT_FAILURE);
        }
      });
    }
    threads.clear();
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice-bench-parker: %s\n", why.what());
    return 1;
  }
}
