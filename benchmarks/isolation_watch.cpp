#include "benchmarks/isolation_watch.hpp"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace sluice::bench {

char const* to_string(activity what) noexcept {
  switch (what) {
    case activity::nothing:
      return "nothing";
    case activity::joining:
      return "the pool and the device, at its start";
    case activity::persistent:
      return "persistent memory";
    case activity::allocating:
      return "memory of the step arena";
    case activity::using_memory:
      return "the gate, or the device that copies and writes";
    case activity::own_turn:
      return "its turn beside the thread that touches memory";
    case activity::committing:
      return "the end of its micro-batch";
    case activity::freeing:
      return "memory to be freed";
    case activity::growth:
      return "training to grow";
    case activity::acquiring:
      return "memory of the pool";
    case activity::kernel:
      return "the gate, or a kernel";
    case activity::leaving:
      return "its leave of the pool";
  }
  return "something unknown";
}

role_watch::role_watch(std::string role, std::atomic<std::uint64_t>& shown,
                       std::chrono::seconds patience)
    : role_(std::move(role)),
      patience_(patience),
      shown_(shown),
      got_on_(std::chrono::steady_clock::now()),
      thread_([this] { run(); }) {
  doing(activity::joining);
}

role_watch::~role_watch() {
  {
    std::lock_guard const lock{mutex_};
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
  doing(activity::nothing);
}

void role_watch::got_on() {
  std::lock_guard const lock{mutex_};
  got_on_ = std::chrono::steady_clock::now();
}

void role_watch::explain_by(std::function<std::string()> words) {
  std::lock_guard const lock{mutex_};
  words_ = std::move(words);
}

void role_watch::run() {
  std::unique_lock lock{mutex_};
  while (!ended_) {
    auto const until = got_on_ + patience_;
    if (std::chrono::steady_clock::now() < until) {
      changed_.wait_until(lock, until);
      continue;
    }
    auto const what = static_cast<activity>(shown_.load());
    std::fprintf(stderr, "%s: got nowhere for %lld s; it waits for %s%s%s\n", role_.c_str(),
                 static_cast<long long>(patience_.count()), to_string(what), words_ ? ". Now " : "",
                 words_ ? words_().c_str() : "");
    ::_exit(1);  // whoever hangs would not answer a request to end
  }
}

}  // namespace sluice::bench
