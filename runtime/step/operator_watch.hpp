/// When an engine's process computes on the host: what a kernel is on a GPU an operator is here (operator_gate.hpp).
///
///   resting ──an operator begins──► working ──none for a while──► resting
///
///   auto& watch = *new operator_watch{report, operators};   // it stays
///   operators.operator_begin();
///   watch.operator_begins();   // by whoever runs one, when the gate has let it
///   operators.operator_end();
///
/// The first of a burst says so, and a thread that looks every millisecond says when no operator has run since the look before:
/// Python needs some time from one to the next.
///
/// Thread-safety: `operator_begins` any thread. It is never destroyed, like the state that it belongs to.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "memhandover/client/work_report.hpp"
#include "runtime/step/operator_gate.hpp"

namespace sluice::step {

class operator_watch {
 public:
  /// Both must outlive this object. Throws `unavailable` if there can be no thread.
  operator_watch(memhandover::work_report& report, operator_gate const& operators);
  operator_watch(operator_watch const&) = delete;
  operator_watch& operator=(operator_watch const&) = delete;
  ~operator_watch() = delete;  // its thread ends with the process

  void operator_begins() noexcept {
    begun_.fetch_add(1);
    if (works_.load() == 0) [[unlikely]] {
      something_begins();
    }
  }

 private:
  void something_begins() noexcept;
  void run() noexcept;
  [[nodiscard]] bool rest_since(std::uint64_t seen) noexcept;

  memhandover::work_report& report_;
  operator_gate const& operators_;
  std::atomic<std::uint64_t> begun_{0};
  std::atomic<std::uint32_t> works_{0};  ///< 1: working
  std::mutex mutex_;                     ///< of who changes that
};

}  // namespace sluice::step
