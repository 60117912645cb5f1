/// Keeps memory from being taken under a running operator of the host backend.
///
/// What an operator computes with its memory gone would not matter: it is thrown away. But operators
/// keep in it what steers them as well (oneDNN: the counters of its barriers, pointers), and one that
/// finds zeroes there never ends, or reads where nothing is. So an operator is to the host what a
/// kernel is to the device: once it has begun, it is waited for.
///
/// A collective that other ranks have agreed to passes a closed gate, since they make it as well and would wait: whoever
/// closes the gate ends such grants first.
///
/// Thread-safety: begin, pass, end and `agree_with` from the threads that compute; the rest from one other thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "runtime/step/launch_gate.hpp"

namespace sluice::step {

class rank_agreement;

class operator_gate final : public launch_gate {
 public:
  /// The calling thread is about to run an operator, and returns when it may.
  void operator_begin();
  /// The same for a collective that has been granted: it may at once.
  void operator_pass() noexcept;
  void operator_end() noexcept;

  /// From now on collectives are agreed on with those ranks. They stay.
  void agree_with(rank_agreement& ranks) noexcept { ranks_.store(&ranks); }

  /// From now on no operator begins.
  bool close(std::int64_t deadline_ns) override;
  /// Waits until none is running.
  bool wait_idle(std::int64_t deadline_ns) override;
  void open() override;
  [[nodiscard]] std::int64_t unit_ended_ns() const override { return ended_ns_.load(); }

  // What Python does between two operators is not stopped, and there is nothing to be dropped.
  void abort_begin() override {}
  void abort_end() override {}
  void set_urgent(bool /*urgent*/) override {}
  void run_again() override;

 private:
  void leave() noexcept;

  /// Each side writes its own word before it reads the other's, and all in one order.
  std::atomic<std::uint32_t> running_{0};
  std::atomic<bool> closed_{false};
  std::mutex mutex_;  ///< guards the waiting
  std::condition_variable opened_;
  std::condition_variable none_runs_;
  /// When one ended since the gate was closed; 0: none did.
  std::atomic<std::int64_t> ended_ns_{0};
  std::atomic<rank_agreement*> ranks_{nullptr};
  rank_agreement* paused_ = nullptr;  ///< of whoever closes the gate
};

}  // namespace sluice::step
