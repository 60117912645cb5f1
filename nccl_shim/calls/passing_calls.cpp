/// Calls that nobody is asked about: they pass the gate in their turn.
#include <memory>
#include <span>
#include <utility>

#include "nccl_shim/calls/pending_calls.hpp"
#include "nccl_shim/calls/question.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {
namespace {

class passing_call final : public question {
 public:
  passing_call(std::span<collective const> calls, std::shared_ptr<known_communicator> first,
               int& direct)
      : calls_{calls, direct}, first_{std::move(first)} {}

 private:
  void ask() override {}
  [[nodiscard]] answer is_agreed() override { return agreed; }
  [[nodiscard]] bool withdraw() override { return false; }
  void make() override { calls_.make(*first_); }
  void drop() override {}

  waiting_calls calls_;
  std::shared_ptr<known_communicator> first_;
};

/// `otherwise`: the result of what the calling thread has not made.
int pass(std::span<collective const> calls, std::shared_ptr<known_communicator> first,
         int otherwise) {
  int result = success;
  return hand_over(std::make_unique<passing_call>(calls, std::move(first), result),
                   calls.front().where, result, otherwise);
}

}  // namespace

int make(std::span<collective const> calls, passing_group one) {
  return pass(calls, std::move(one.first), success);
}

int make(std::span<collective const> calls, captured_group one) {
  // Beside a capture nothing is left for later. A graph must not lack what has been dropped.
  int const result = pass(calls, std::move(one.first), system_error);
  bool const is_recorded = result == success || result == in_progress;
  if (is_recorded && gate()->attach_to_capture(calls.front().where, one.held.get()) != 0) {
    static_cast<void>(one.held.release());  // the graph's, until `release_graph`
  }
  return result;
}

}  // namespace sluice::nccl_shim
