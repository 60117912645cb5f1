#include "benchmarks/kills_controller.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <optional>
#include <random>
#include <span>

#include "benchmarks/kills_watch.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"

namespace sluice::bench {
namespace {

using memhandover::unique_fd;
using std::chrono::steady_clock;
using namespace std::chrono_literals;

/// Nothing that a healthy pool does takes as long; who shows nothing for so long hangs. A GPU's
/// teardown and start take parts of a second, a Python job's start seconds.
constexpr auto patience = 60s;
constexpr auto free_patience = 10s;
/// What came free later than this is told.
constexpr double late_us = 20'000;

/// One training process, and the next in its place when it has been killed.
struct job {
  pid_t started = 0;                  ///< what this program started
  std::optional<std::uint32_t> slot;  ///< once it has joined
  std::uint64_t commits_at_start = 0;
  std::uint64_t progress = 0;
  steady_clock::time_point since{};  ///< when it last showed progress
  bool ready = false;                ///< has committed
};

struct samples {
  std::vector<double> free_us, free_without_broker_us, free_with_server_us, serving_free_us,
      teardown_us, broker_us;
};

double us_since(steady_clock::time_point when) {
  return std::chrono::duration<double, std::micro>{steady_clock::now() - when}.count();
}

class controller {
 public:
  explicit controller(kills_options how)
      : how_(std::move(how)),
        random_(how_.seed),
        keeper_(memhandover::ensure_broker(how_.broker)),
        broker_(memhandover::broker_pid(how_.broker.runtime_dir)) {
    watch_.emplace(broker_);
    progress_fd_ = unique_fd{::memfd_create("progress", 0)};
    if (!progress_fd_ || ::ftruncate(progress_fd_.get(), 4096) != 0) {
      throw error{error_kind::unavailable, "cannot create the progress page"};
    }
    auto* const page =
        ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, progress_fd_.get(), 0);
    if (page == MAP_FAILED) {
      throw error{error_kind::unavailable, "cannot map the progress page"};
    }
    progress_ = static_cast<server_progress*>(page);
  }

  nlohmann::json run() {
    trainers_.resize(static_cast<std::size_t>(how_.trainers));
    std::for_each(trainers_.begin(), trainers_.end(), [this](job& one) { start_trainer(one); });
    start_server();
    auto const end = steady_clock::now() + std::chrono::seconds{how_.seconds};
    while (kills_ < how_.kills && steady_clock::now() < end && hangs_ == 0) {
      ::poll(nullptr, 0, static_cast<int>(random_() % static_cast<unsigned>(how_.most_delay_ms)));
      look();
      kill_somebody();
      leaked_ += watch_->leaked();
    }
    finish();
    return {{"kills", kills_},
            {"killed_trainers", killed_trainers_},
            {"killed_servers", killed_servers_},
            {"killed_brokers", killed_brokers_},
            {"failed_starts", failed_starts_},
            {"leaked_chunks", leaked_},
            {"hangs", hangs_},
            {"server_errors", progress_->failed.load()},
            {"wrong_contents", progress_->wrong.load()},
            {"served", progress_->served.load()},
            {"free_after_last_exit_us", samples_.free_us},
            {"free_without_broker_us", samples_.free_without_broker_us},
            {"free_with_server_us", samples_.free_with_server_us},
            {"serving_free_us", samples_.serving_free_us},
            {"teardown_us", samples_.teardown_us},
            {"broker_back_us", samples_.broker_us}};
  }

 private:
  void start_trainer(job& one) {
    one = job{};
    auto command = how_.trainer;
    if (command.empty()) {
      command = {"/proc/self/exe",
                 "--runtime-dir",
                 how_.broker.runtime_dir,
                 "--bytes",
                 std::to_string(how_.role.bytes),
                 "--workers",
                 std::to_string(how_.role.workers),
                 "trainer"};
    }
    one.started = start(command);
    one.since = steady_clock::now();
  }

  void start_server() {
    progress_->joined = 0;
    server_ = start({"/proc/self/exe", "--runtime-dir", how_.broker.runtime_dir, "--bytes",
                     std::to_string(how_.server_bytes), "--progress-fd",
                     std::to_string(progress_fd_.get()), "server"});
    server_since_ = steady_clock::now();
  }

  void hang(std::string const& what) {
    ++hangs_;
    std::fprintf(stderr, "kills: waited in vain for %s\n", what.c_str());
  }

  /// Sees who has joined, committed, served or ended by itself.
  void look() {
    for (auto& one : trainers_) {
      if (::waitpid(one.started, nullptr, WNOHANG) == one.started) {
        ++failed_starts_;  // it met a moment without broker
        start_trainer(one);
      }
      if (!one.slot) {
        one.slot = watch_->slot_of(one.started);
        if (one.slot) {
          keeper_.reset();
          one.commits_at_start = watch_->view().mailbox(*one.slot).commits.load();
        }
      }
      if (one.slot) {
        auto const& box = watch_->view().mailbox(*one.slot);
        one.ready = one.ready || box.commits.load() > one.commits_at_start;
        auto const now = box.commits.load() + box.discards.load();
        if (now != one.progress) {
          one.progress = now;
          one.since = steady_clock::now();
        }
      }
      if (steady_clock::now() - one.since > patience) {
        hang("a trainer's next micro-batch");
      }
    }
    if (::waitpid(server_, nullptr, WNOHANG) == server_) {
      ++failed_starts_;
      start_server();
    }
    if (auto const now = progress_->served + progress_->failed; now != server_last_) {
      server_last_ = now;
      server_since_ = steady_clock::now();
    } else if (steady_clock::now() - server_since_ > patience) {
      hang("the server's next acquisition");
    }
  }

  /// Kills a process or several at once, but leaves one that has joined: where nobody is left to keep
  /// the pool it is given up, and what the dead have forked is for `sluice pool clean` to end.
  void kill_somebody() {
    std::vector<job*> ready;
    for (auto& one : trainers_) {
      if (one.ready) {
        ready.push_back(&one);
      }
    }
    if (ready.empty()) {
      return;
    }
    auto const choice = random_() % 100;
    bool const server_there = progress_->joined != 0;
    if (choice < 12) {
      if (server_there) {
        kill_server();
      }
    } else if (choice < 16) {
      kill_broker();
      await_broker();
    } else {
      auto& victim = *ready[random_() % ready.size()];
      bool const broker_too = choice < 18;
      bool const server_too = choice >= 18 && choice < 21 && server_there;
      if (ready.size() == 1 && (server_too || !server_there)) {
        return;
      }
      if (broker_too) {
        kill_broker();
      }
      // Clients look for a new broker a few times a second, and without one nobody hears of deaths.
      bool const broker_was_there = !broker_too && steady_clock::now() - broker_back_ > 500ms;
      if (server_too) {
        ::kill(server_, SIGKILL);
        ++kills_;
        ++killed_servers_;
      }
      kill_trainer(victim, server_too         ? samples_.free_with_server_us
                           : broker_was_there ? samples_.free_us
                                              : samples_.free_without_broker_us);
      if (server_too) {
        ::waitpid(server_, nullptr, 0);
        start_server();
      }
      if (broker_too) {
        await_broker();
      }
    }
  }

  [[nodiscard]] std::uint32_t pid_in(std::uint32_t slot) const {
    return watch_->view().clients()[slot].pid.load();
  }

  /// Waits until nothing stands as `slot`'s any more that the process `pid` held there, and says how
  /// long that took. A slot becomes another's only afterwards, and that one may hold chunks before
  /// this looks.
  void await_free(std::uint32_t slot, std::uint32_t pid, std::vector<double>& into) {
    auto const ended = steady_clock::now();
    while (pid_in(slot) == pid && watch_->held_by(slot) > 0) {
      if (steady_clock::now() - ended > free_patience) {
        leaked_ += watch_->held_by(slot);
        hang("a dead client's chunks");
        return;
      }
      timespec const pause{0, 50'000};
      ::nanosleep(&pause, nullptr);
    }
    into.push_back(us_since(ended));
    if (into.back() > late_us) {
      std::fprintf(
          stderr,
          "kills: slot %u came free after %.1f ms, %.0f ms after the broker came back and %.0f ms "
          "after the server began or served; the writer is slot %u\n",
          slot, into.back() / 1e3, us_since(broker_back_) / 1e3, us_since(server_since_) / 1e3,
          watch_->view().writer_slot());
    }
  }

  void kill_trainer(job& victim, std::vector<double>& into) {
    auto const pid = static_cast<pid_t>(pid_in(*victim.slot));
    auto const family = family_of(pid);
    auto const killed = steady_clock::now();
    ::kill(pid, SIGKILL);
    ++kills_;
    ++killed_trainers_;
    if (family.empty() || !await_ends(std::span{family}.first(1), killed + patience)) {
      return hang("a killed trainer's end");
    }
    samples_.teardown_us.push_back(us_since(killed));
    if (!await_ends(family, killed + patience)) {
      return hang("the end of a killed trainer's descendants");
    }
    await_free(*victim.slot, static_cast<std::uint32_t>(pid), into);
    // Whoever launched the victim ends because of it.
    ::waitpid(victim.started, nullptr, 0);
    start_trainer(victim);
  }

  void kill_server() {
    auto const slot = watch_->slot_of(server_);
    ::kill(server_, SIGKILL);
    ++kills_;
    ++killed_servers_;
    ::waitpid(server_, nullptr, 0);
    if (slot) {
      await_free(*slot, static_cast<std::uint32_t>(server_), samples_.serving_free_us);
    }
    start_server();
  }

  void kill_broker() {
    broker_ = memhandover::broker_pid(how_.broker.runtime_dir);
    if (broker_ <= 0) {
      return hang("the broker that was to be killed");
    }
    ::kill(broker_, SIGKILL);
    broker_killed_ = steady_clock::now();
    ++kills_;
    ++killed_brokers_;
  }

  void await_broker() {
    for (;;) {
      try {
        auto const now = memhandover::broker_pid(how_.broker.runtime_dir);
        if (now > 0 && now != broker_) {
          break;
        }
      } catch (error const&) {
        // It died between listening and answering.
      }
      if (steady_clock::now() - broker_killed_ > patience) {
        return hang("another broker");
      }
      ::poll(nullptr, 0, 1);
    }
    broker_back_ = steady_clock::now();
    samples_.broker_us.push_back(us_since(broker_killed_));
  }

  /// Ends everybody in order and counts what stands as somebody's although he does not know of it.
  void finish() {
    if (hangs_ == 0) {
      ::kill(server_, SIGTERM);
      ::waitpid(server_, nullptr, 0);
      if (auto const slot = watch_->slot_of(server_)) {
        await_free(*slot, static_cast<std::uint32_t>(server_), samples_.serving_free_us);
      }
    }
    for (auto& one : trainers_) {
      if (hangs_ == 0 && one.ready && how_.trainer.empty()) {
        compare_holdings(one);
      }
      ::kill(one.started, how_.trainer.empty() ? SIGKILL : SIGTERM);
      ::waitpid(one.started, nullptr, 0);
    }
    auto const begin = steady_clock::now();
    auto held = [this] {
      std::uint32_t sum = 0;
      for (std::uint32_t slot = 0; slot < memhandover::max_clients; ++slot) {
        sum += watch_->held_by(slot);
      }
      return sum;
    };
    while (held() > 0 && steady_clock::now() - begin < free_patience) {
      ::poll(nullptr, 0, 1);
    }
    leaked_ += held();
    if (hangs_ > 0) {
      ::kill(server_, SIGKILL);
      ::waitpid(server_, nullptr, 0);
    }
  }

  /// A trainer that has stopped with nothing under way knows of every chunk that stands as its own.
  void compare_holdings(job const& one) {
    ::kill(one.started, SIGTERM);
    ::waitpid(one.started, nullptr, WUNTRACED);
    auto const& box = watch_->view().mailbox(*one.slot);
    auto unknown = [&] {
      return static_cast<std::int64_t>(watch_->held_by(*one.slot)) - box.arena_chunks.load() -
             box.persistent_chunks.load();
    };
    auto const begin = steady_clock::now();
    while (unknown() != 0 && steady_clock::now() - begin < free_patience) {
      ::poll(nullptr, 0, 1);  // its last releases are still in its mailbox
    }
    leaked_ += static_cast<std::uint64_t>(std::abs(unknown()));
  }

  kills_options how_;
  std::mt19937 random_;
  unique_fd keeper_;  ///< keeps the broker until there is a client
  pid_t broker_ = 0;
  steady_clock::time_point broker_killed_{};
  steady_clock::time_point broker_back_{};
  std::optional<ledger_watch> watch_;
  unique_fd progress_fd_;
  server_progress* progress_ = nullptr;
  std::vector<job> trainers_;
  pid_t server_ = 0;
  steady_clock::time_point server_since_{};
  std::uint64_t server_last_ = 0;
  samples samples_;
  int kills_ = 0, killed_trainers_ = 0, killed_servers_ = 0, killed_brokers_ = 0;
  int failed_starts_ = 0, hangs_ = 0;
  std::uint64_t leaked_ = 0;
};

}  // namespace

nlohmann::json run_kills(kills_options const& how) {
  return controller{how}.run();
}

}  // namespace sluice::bench
