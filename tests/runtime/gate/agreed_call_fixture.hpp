/// A gate whose calls others have to agree to, who are the test.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

#include "tests/runtime/gate/submission_fixture.hpp"

namespace sluice::gate {

/// Something that is asked, and answers as the test says.
struct question {
  std::atomic<bool> agreed{false};
  std::atomic<bool> owed{false};  ///< they agree just before it is withdrawn
  std::atomic<int> asked{0};
  std::atomic<int> withdrawn{0};
  std::atomic<int> made{0};
  std::atomic<int> dropped{0};
  std::function<void()> launch;

  [[nodiscard]] sluice_agreed_call call(CUstream stream) {
    return {.stream = stream,
            .of = this,
            .ask = [](void* of) { ++self(of).asked; },
            .is_agreed = [](void* of) { return self(of).agreed ? 1 : 0; },
            .withdraw =
                [](void* of) {
                  ++self(of).withdrawn;
                  return self(of).owed ? 1 : 0;
                },
            .make =
                [](void* of) {
                  self(of).launch();
                  ++self(of).made;
                },
            .drop = nullptr};
  }
  static question& self(void* of) { return *static_cast<question*>(of); }
};

class agreed_call : public submission {
 protected:
  agreed_call() {
    comm = stream();
    other = stream();
  }
  ~agreed_call() override {
    asked.agreed = second.agreed = true;
    gate.flush();
  }

  /// One that the legacy stream is ordered with.
  [[nodiscard]] CUstream blocking() const {
    CUstream made = nullptr;
    EXPECT_EQ(cuda.create_stream(&made, CU_STREAM_DEFAULT), CUDA_SUCCESS);
    note(-1, made);
    EXPECT_EQ(cuda.synchronise(made), CUDA_SUCCESS);
    take_entries();
    return made;
  }
  /// Leaves a call that notes `number` on the stream when it is made.
  void leave(question& of, int number, CUstream stream) {
    of.launch = [this, number, stream] { note(number, stream); };
    sluice_agreed_call const call = of.call(stream);
    ASSERT_EQ(gate.make_agreed(&call), 0);
  }
  /// And waits until it has been asked for.
  void leave_and_ask(question& of, int number, CUstream stream) {
    leave(of, number, stream);
    ASSERT_TRUE(eventually([&] { return of.asked > 0; }));
  }
  void record(CUevent which, CUstream stream) const {
    EXPECT_EQ(cuda.record(which, stream), CUDA_SUCCESS);
  }
  void wait_for(CUevent which, CUstream stream) const {
    EXPECT_EQ(cuda.wait_event(stream, which, 0), CUDA_SUCCESS);
  }
  /// Whether calls go straight, sooner or later.
  [[nodiscard]] bool eventually_straight() const {
    bool const straight = eventually([this] { return gate.enter_at_once() != 0; });
    if (straight) {
      gate.leave();
    }
    return straight;
  }
  /// What has been written once everything is done.
  [[nodiscard]] std::vector<int> all_entries() const {
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    return take_entries();
  }

  question asked;
  question second;
  CUstream comm = nullptr;
  CUstream other = nullptr;
};

}  // namespace sluice::gate
