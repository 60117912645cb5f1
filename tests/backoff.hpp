#pragma once

#include <sched.h>

#include <chrono>
#include <thread>

namespace sluice {

/// Between two looks at what another thread or process brings about: leaves the processor to others, and what is not there soon is
/// looked for less often.
class backoff {
 public:
  void wait() {
    if (looks_ < at_once) {
      ++looks_;
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds{100});
    }
  }

 private:
  static constexpr int at_once = 500;
  int looks_ = 0;
};

}  // namespace sluice
