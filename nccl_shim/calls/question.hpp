/// A call as the gate's queue has it: what other ranks are asked before it is made, and what becomes of it.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "abi/gate_api.h"
#include "abi/nccl_abi.hpp"
#include "nccl_shim/calls/collective.hpp"
#include "nccl_shim/calls/known_communicator.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {

/// What the ranks are asked about.
class question {
 public:
  /// What becomes of it, as the gate calls that.
  enum answer : int { not_yet = 0, agreed = 1, dropped = 2 };

  question() = default;
  question(question const&) = delete;
  question& operator=(question const&) = delete;
  virtual ~question() = default;

  /// As the gate sees it. `make` and `drop` end it.
  [[nodiscard]] sluice_agreed_call as_call(stream where);

 protected:
  virtual void ask() = 0;
  [[nodiscard]] virtual answer is_agreed() = 0;
  /// Whether it has been agreed to in between.
  [[nodiscard]] virtual bool withdraw() = 0;
  /// All have agreed, or never will: why is known of the communicator.
  virtual void make() = 0;
  /// This process has dropped it, or all have.
  virtual void drop() = 0;
};

/// Hands calls over to the gate, which makes them in their turn. Returns `result`, as it is then, if the calling thread has made
/// them; else `otherwise`: what has been left has its errors come later, and what has been dropped succeeds undone.
[[nodiscard]] int hand_over(std::unique_ptr<question> calls, stream where, int const& result,
                            int otherwise);

/// The result of a call: its thread's, as long as that waits for it, and else the communicator's.
class call_result {
 public:
  explicit call_result(int& of_thread) noexcept;
  void is(int result, known_communicator& of) const noexcept;

 private:
  int& of_thread_;  // only that thread's to use
  pthread_t thread_;
};

/// Calls NCCL, unless there is trouble.
[[nodiscard, gnu::hot]] inline int make_calls(std::span<collective const> calls,
                                              calling const& now) noexcept {
  if (int const trouble = now.trouble(); trouble != success) {
    return trouble;
  }
  inside_nccl const here;
  return perform(calls);
}

/// A call of NCCL's, or a group of some, that is made later. Its thread has the result, or the communicator.
class waiting_calls {
 public:
  waiting_calls(std::span<collective const> calls, int& of_thread);
  void make(known_communicator& of) const;

 private:
  collective first_;
  std::vector<collective> others_;  // most calls are alone, and nothing is to be allocated for that
  call_result result_;
};

/// The launch of a graph, which ends with this. Its thread has the driver's error, or the communicator one.
class graph_launch {
 public:
  explicit graph_launch(sluice_graph_launch const& what) noexcept : what_{what} {}
  graph_launch(graph_launch const&) = delete;
  graph_launch& operator=(graph_launch const&) = delete;
  ~graph_launch() { what_.end(what_.of); }
  void make(known_communicator& of) const noexcept;

 private:
  sluice_graph_launch what_;
  int of_thread_ = success;  // who launches it has it from the driver
  call_result result_{of_thread_};
};

/// What somebody who waits for other ranks does now and then.
class waiting_time {
 public:
  void begin() noexcept;
  /// Whether it is time again to look whether one of them has died.
  [[nodiscard]] bool looks() noexcept;
  /// … to tell who is waited for.
  [[nodiscard]] bool reports() noexcept;
  /// … to say on the board for whom, or to see who waits for this process.
  [[nodiscard]] bool looks_around() noexcept;

 private:
  std::int64_t look_at_ = 0;
  std::int64_t report_at_ = 0;
  std::int64_t look_around_at_ = 0;
};

/// "0, 1, 5".
[[nodiscard]] std::string list(std::vector<unsigned> const& ranks);

}  // namespace sluice::nccl_shim
