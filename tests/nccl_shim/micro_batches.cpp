#include "tests/nccl_shim/micro_batches.hpp"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

#include "tests/nccl_shim/pausing.hpp"
#include "tests/runtime/gate/test_runtime.h"

namespace sluice::nccl_shim::testing {
namespace {

using namespace std::chrono_literals;

/// As training_memory: who discards, who takes memory, and who hears of others' discards.
class micro_batch {
 public:
  micro_batch(sluice_gate_api const& gate, bool secretly)
      : gate_{gate}, others_{*gate.agreement()}, secretly_{secretly} {
    others_.allow_inside(1);
  }

  void begin() {
    std::lock_guard const guard{lock_};
    running_ = true;
    others_know_ = false;
    gate_.expendable_thread(1);
  }

  [[nodiscard]] bool is_sound() {
    std::lock_guard const guard{lock_};
    return sound_;
  }

  /// Whether it counts; if not, it has been discarded.
  [[nodiscard]] bool end() {
    gate_.flush();
    bool const kept =
        is_sound() &&
        others_.keep([](void* of) { static_cast<micro_batch*>(of)->keep(); }, this) != 0;
    gate_.expendable_thread(0);
    if (!kept) {
      discard();
    }
    return kept;
  }

  /// What has lost its memory is left where it is.
  void leave() {
    gate_.expendable_thread(0);
    discard();
  }

  /// Takes its memory, if it is running. The server has it before launches are let through again; it may have been
  /// discarded by then.
  void take(std::chrono::nanoseconds patience) {
    if (gate_.close(in(patience)) != 0) {
      std::printf("a thread stays inside of the gate\n");
      return;
    }
    bool const rests = gate_.wait_idle(in(patience)) == 0;
    if (!rests) {
      std::printf("the device does not come to rest\n");
    }
    if (rests) {
      std::unique_lock lock{lock_};
      if (bool const takes = running_ && sound_; takes) {
        int const which = discarded_;
        sound_ = false;
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds{which % 4 * 50});
        lock.lock();
        if (running_ && discarded_ == which) {
          gate_.abort_begin();
          notify_others();
        }
      }
    }
    gate_.open();
  }

  /// Others have dropped it, if it still is the one that they mean.
  template <typename IsRunning>
  void drop(IsRunning is_running) {
    std::lock_guard const guard{lock_};
    if (running_ && sound_ && is_running()) {
      others_know_ = true;
      sound_ = false;
      gate_.abort_begin();
    }
  }

 private:
  void discard() {
    std::lock_guard const guard{lock_};
    running_ = false;
    notify_others();
    sound_ = true;
    ++discarded_;
    gate_.abort_end();
  }
  void keep() {
    std::lock_guard const guard{lock_};
    if (!sound_) {
      std::printf("kept what had been taken\n");
    }
    running_ = false;
  }
  void notify_others() {
    if (!others_know_ && !secretly_) {
      others_know_ = true;
      others_.run_again();
    }
  }

  sluice_gate_api const& gate_;
  sluice_agreement const& others_;
  bool secretly_;
  std::mutex lock_;  // guards the rest
  bool running_ = false;
  bool sound_ = true;
  bool others_know_ = true;
  int discarded_ = 0;
};

}  // namespace

void train_together(training const& job, int micro_batches, bool secretly) {
  static micro_batch current{*job.gate, secretly};
  void* const runtime = ::dlopen(std::getenv("SLUICE_RUNTIME_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
  reinterpret_cast<decltype(&test_runtime_on_drop)>(::dlsym(runtime, "test_runtime_on_drop"))(
      [](void* of, int (*is_running)(void const* which), void const* which) {
        static_cast<micro_batch*>(of)->drop([&] { return is_running(which) != 0; });
      },
      &current);
  static std::atomic<bool> over{false};
  static std::atomic<int> kept{0};
  std::thread taker{[&job] {
    std::minstd_rand random{static_cast<unsigned>(job.rank + 1)};
    for (int taken = 0; !over.load();) {
      std::this_thread::sleep_for(std::chrono::microseconds{random() % 4000});
      if (job.loses_memory &&
          taken < 2 * (kept.load() + 1)) {  // however slow the machine is, some are kept
        current.take(job.patience);
        ++taken;
      }
    }
  }};
  std::minstd_rand random{static_cast<unsigned>(job.rank + 100)};
  struct sum {
    int from;
    int to;
    int expected;
  };
  static std::deque<sum> all;  // of every try: what was launched may be under way until the end
  int error = 0;
  int again = 0;
  auto const call = [&](adders const& with, int round) {
    int const number = kept.load() * 100 + with.name * 10 + round;
    int expected = 0;
    for (int const rank : with.ranks) {
      expected += number * (rank + 1);
    }
    sum& own = all.emplace_back(sum{number * (job.rank + 1), 0, expected});
    error = error != 0 ? error : with.reduce(own.from, own.to);
    if (random() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds{random() % 400});
    }
  };
  while (kept < micro_batches && error == 0) {
    std::size_t const first = all.size();
    current.begin();
    bool leaves = false;
    for (int round = 0; round < job.rounds && !leaves; ++round) {
      for (adders const& with : job.with) {
        call(with, round);
      }
      leaves = random() % 2 == 0 && !current.is_sound();
    }
    if (leaves) {
      current.leave();
    }
    if (leaves || !current.end()) {
      ++again;
      continue;
    }
    for (adders const& with : job.with) {  // between micro-batches
      call(with, job.rounds);
    }
    if (error != 0) {
      break;
    }
    job.synchronise();
    for (std::size_t i = first; i < all.size(); ++i) {
      if (all[i].to != all[i].expected) {
        std::printf("sum %zu of %d is %d\n", i - first, kept.load(), all[i].to);
      }
    }
    ++kept;
  }
  over = true;
  taker.join();
  if (error != 0) {
    std::printf("ended with %d\n", error);
  } else {
    std::printf("kept %d, %s again\n", kept.load(), again > 0 ? "some" : "none");
  }
}

}  // namespace sluice::nccl_shim::testing
