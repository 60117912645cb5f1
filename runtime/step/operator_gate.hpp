/// Keeps memory from being taken under a running operator of the host backend.
///
/// What an operator computes with its memory gone would not matter: it is thrown away. But operators
/// keep in it what steers them as well (oneDNN: the counters of its barriers, pointers), and one that
/// finds zeroes there never ends, or reads where nothing is. So an operator is to the host what a
/// kernel is to the device: once it has begun, it is waited for.
///
/// The arena is taken between operators that use it. All other memory is given up between operators of any kind:
///
///   open ──close──► closed to those in the arena ──wait_idle──► none of them runs ──┐
///    │ └─close_all──► closed to all ──wait_idle──► none runs at all ────────────────┤
///    └──────────────────────────────────open◄───────────────────────────────────────┘
///
/// Once closed to all, it stays so until it is opened. While memory is parked behind it, who is held asks for that.
///
/// A collective that other ranks have agreed to passes a closed gate, since they make it as well and would wait: whoever
/// closes the gate ends such grants first.
///
/// Thread-safety: begin, pass, end and `agree_with` from the threads that compute; the rest from one other thread,
/// `on_held_parked` before anybody computes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "runtime/step/launch_gate.hpp"

namespace sluice::step {

class rank_agreement;

/// Of an operator: whether it uses the arena, or what lasts alone.
enum class operator_memory : std::uint8_t { lasting, arena };

class operator_gate final : public launch_gate {
 public:
  /// The calling thread is about to run an operator, and returns when it may.
  void operator_begin(operator_memory uses = operator_memory::arena);
  /// The same for a collective that has been granted: it may at once. It counts as one in the arena.
  void operator_pass() noexcept;
  void operator_end(operator_memory uses = operator_memory::arena) noexcept;

  /// From now on collectives are agreed on with those ranks. They stay.
  void agree_with(rank_agreement& ranks) noexcept { ranks_.store(&ranks); }
  /// To be called whenever an operator is held while memory is parked; it may not wait.
  void on_held_parked(std::function<void()> wanted) { on_held_parked_ = std::move(wanted); }

  /// From now on no operator in the arena begins.
  bool close(std::int64_t deadline_ns) override;
  /// From now on no operator begins.
  bool close_all(std::int64_t deadline_ns) override;
  /// Waits until none is running of those that may not begin.
  bool wait_idle(std::int64_t deadline_ns) override;
  void open() override;
  void set_parked(bool parked) override;
  [[nodiscard]] std::int64_t unit_ended_ns() const override { return ended_ns_.load(); }

  /// Whether an operator is running, or about to.
  [[nodiscard]] bool any_runs() const noexcept {
    return in_arena_.load() != 0 || elsewhere_.load() != 0;
  }

  // What Python does between two operators is not stopped, and there is nothing to be dropped.
  void abort_begin() override {}
  void abort_end() override {}
  void set_urgent(bool /*urgent*/) override {}
  void run_again() override;

 private:
  enum class closed_to : std::uint8_t { nobody, arena, all };

  [[nodiscard]] std::atomic<std::uint32_t>& running(operator_memory uses) noexcept {
    return uses == operator_memory::arena ? in_arena_ : elsewhere_;
  }
  [[nodiscard]] bool holds(operator_memory uses) const noexcept;
  [[nodiscard]] bool is_idle() const noexcept;
  void shut(closed_to whom) noexcept;
  void await_opening(operator_memory uses);
  void leave(operator_memory uses) noexcept;

  /// Each side writes its own word before it reads the other's, and all in one order. Operators that are running:
  std::atomic<std::uint32_t> in_arena_{0};
  std::atomic<std::uint32_t> elsewhere_{0};
  std::atomic<closed_to> closed_{closed_to::nobody};
  std::mutex mutex_;  ///< guards the waiting
  std::condition_variable opened_;
  std::condition_variable none_runs_;
  std::uint64_t parkings_ = 0;  ///< odd: memory is parked; guarded by the mutex
  std::function<void()> on_held_parked_;
  /// When one that it waits for ended since the gate was closed; 0: none did.
  std::atomic<std::int64_t> ended_ns_{0};
  std::atomic<rank_agreement*> ranks_{nullptr};
  rank_agreement* paused_ = nullptr;  ///< of whoever closes the gate
};

}  // namespace sluice::step
