/// Tells ranks on other hosts that this one lives, and finds those that have fallen silent.
///
/// Each rank counts under "beat/RANK" in the store, by a thread of its own. One that is silent for as long as
/// the store's patience (`silences`) is lost: it has died, or its host, or what lies between, or it has been
/// stopped. A rank that leaves in good order says so, and is not missed.
///
/// Thread-safety: `lost` is called by the thread, while this lives.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nccl_shim/agreement/silences.hpp"
#include "nccl_shim/agreement/store.hpp"

namespace sluice::nccl_shim {

class heartbeat {
 public:
  heartbeat(store& in, std::string const& prefix, unsigned rank, unsigned ranks,
            std::function<void(unsigned rank)> lost);
  heartbeat(heartbeat const&) = delete;
  heartbeat& operator=(heartbeat const&) = delete;
  /// Leaves.
  ~heartbeat();

  /// Makes the key of one rank, where it is not yet; all have to be there.
  static void make(store& in, std::string const& prefix, unsigned rank);
  static void remove(store& in, std::string const& prefix, unsigned ranks);

 private:
  void run(std::stop_token const& ends);
  void look();

  store& in_;
  std::vector<std::string> keys_;
  unsigned rank_;
  std::function<void(unsigned rank)> lost_;
  silences silences_;  // the thread's alone
  std::mutex lock_;
  std::condition_variable_any ended_;
  std::jthread thread_;  // the last: it uses the rest
};

}  // namespace sluice::nccl_shim
