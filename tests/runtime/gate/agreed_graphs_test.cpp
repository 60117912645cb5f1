/// What graphs hold that others have to agree to: carried from captures to launches, and no further.
#include <gmock/gmock.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/runtime/gate/submission_fixture.hpp"

namespace sluice::gate {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// What a test attaches to captures: numbers.
struct attached {
  explicit attached(std::vector<int> held) : numbers{std::move(held)} { ++alive; }
  attached(attached const&) = delete;
  attached& operator=(attached const&) = delete;
  ~attached() { --alive; }

  static attached& self(void* of) { return *static_cast<attached*>(of); }
  static std::atomic<int> alive;
  std::vector<int> const numbers;
};
std::atomic<int> attached::alive{0};

/// Whoever agrees on launches, as the test says.
struct other_ranks {
  std::mutex lock;
  std::vector<std::vector<int>> launches;  // that were asked about; guarded by lock
  std::atomic<sluice_graph_result> answer{SLUICE_GRAPH_AGREED};
  std::atomic<bool> agree{true};
  std::atomic<bool> ever{true};  ///< false: they never will
  std::atomic<int> asked{0};
  std::atomic<int> ended{0};

  [[nodiscard]] std::vector<std::vector<int>> take() {
    std::lock_guard const guard{lock};
    return std::exchange(launches, {});
  }
};
other_ranks& others() {
  static other_ranks one;
  return one;
}

/// A launch that they are asked about.
struct asked_launch {
  sluice_graph_launch launch;

  static void end(void* of) {
    std::unique_ptr<asked_launch> const self{static_cast<asked_launch*>(of)};
    ++others().ended;
    self->launch.end(self->launch.of);
  }
  [[nodiscard]] static sluice_agreed_call as_call(sluice_graph_launch const& launch) {
    return {.stream = launch.stream,
            .of = std::make_unique<asked_launch>(asked_launch{launch}).release(),
            .ask = [](void*) { ++others().asked; },
            .is_agreed = [](void*) { return others().agree ? 1 : 0; },
            .withdraw = [](void*) { return 0; },
            .make =
                [](void* of) {
                  if (others().ever) {
                    auto const& one = static_cast<asked_launch*>(of)->launch;
                    static_cast<void>(one.make(one.of));
                  }
                  end(of);
                },
            .drop = end};
  }
};

constexpr sluice_agreement agreement{
    .size = sizeof(sluice_agreement),
    .may_pause = nullptr,
    .resolve = nullptr,
    .allow_inside = nullptr,
    .end_with = nullptr,
    .keep = nullptr,
    .run_again = nullptr,
    .join = [](void* one, void* other) -> void* {
      std::vector<int> both = attached::self(one).numbers;
      both.insert(both.end(), attached::self(other).numbers.begin(),
                  attached::self(other).numbers.end());
      return std::make_unique<attached>(std::move(both)).release();
    },
    .release = [](void* held) { std::unique_ptr<attached> const gone{&attached::self(held)}; },
    .agree_on_launch =
        [](void* held, sluice_graph_launch const* launch, sluice_agreed_call* call) {
          std::lock_guard const guard{others().lock};
          others().launches.push_back(attached::self(held).numbers);
          sluice_graph_result const answer = others().answer;
          if (answer == SLUICE_GRAPH_AGREED) {
            *call = asked_launch::as_call(*launch);
          }
          return answer;
        },
    .others_may_wait = nullptr};

/// Handles that the test's calls make; they end with it.
class agreed_graph : public submission {
 protected:
  agreed_graph() {
    others().agree = others().ever = true;
    others().answer = SLUICE_GRAPH_AGREED;
    others().asked = others().ended = 0;
    static_cast<void>(others().take());
    gate.set_agreement(&agreement);
    where = stream();
  }
  ~agreed_graph() override {
    others().agree = true;
    gate.flush();
    EXPECT_EQ(cuda.synchronise_all(), CUDA_SUCCESS);
    for (CUgraphExec const one : executables_) {
      EXPECT_EQ(cuda.destroy_exec(one), CUDA_SUCCESS);
    }
    for (CUgraph const one : graphs_) {
      EXPECT_EQ(cuda.destroy_graph(one), CUDA_SUCCESS);
    }
    EXPECT_EQ(attached::alive, 0);
    gate.set_agreement(nullptr);
  }

  template <typename Function>
  [[nodiscard]] static Function call(char const* name) {
    return gate_library().get<Function>(name);
  }
  [[nodiscard]] CUgraph own(CUgraph graph) {
    graphs_.push_back(graph);
    return graph;
  }
  [[nodiscard]] CUgraphExec own(CUgraphExec executable) {
    executables_.push_back(executable);
    return executable;
  }
  void destroy(CUgraph graph) {
    std::erase(graphs_, graph);
    EXPECT_EQ(cuda.destroy_graph(graph), CUDA_SUCCESS);
  }
  void destroy(CUgraphExec executable) {
    std::erase(executables_, executable);
    EXPECT_EQ(cuda.destroy_exec(executable), CUDA_SUCCESS);
  }

  /// In a capture, as a library does.
  void attach(int number, CUstream to) const {
    auto held = std::make_unique<attached>(std::vector{number});
    ASSERT_EQ(gate.attach_to_capture(to, held.get()), 1);
    held.release();
  }
  /// A graph of a kernel for each number, which it notes; they are attached as well.
  [[nodiscard]] CUgraph capture(std::vector<int> const& numbers) {
    EXPECT_EQ(cuda.begin_capture(where, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    for (int const number : numbers) {
      attach(number, where);
      note(number, where);
    }
    return end_capture();
  }
  [[nodiscard]] CUgraph end_capture() {
    CUgraph graph = nullptr;
    EXPECT_EQ(cuda.end_capture(where, &graph), CUDA_SUCCESS);
    return own(graph);
  }
  [[nodiscard]] CUgraph plain() {
    EXPECT_EQ(cuda.begin_capture(where, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    note(0, where);
    return end_capture();
  }
  [[nodiscard]] CUgraphExec instantiate(CUgraph graph) {
    CUgraphExec made = nullptr;
    EXPECT_EQ(cuda.instantiate(&made, graph, 0), CUDA_SUCCESS);
    return own(made);
  }
  /// What others are asked about when it is launched; nothing if they are not.
  [[nodiscard]] std::vector<std::vector<int>> launch(CUgraphExec executable) const {
    EXPECT_EQ(cuda.launch_graph(executable, where), CUDA_SUCCESS);
    return others().take();
  }
  [[nodiscard]] std::vector<std::vector<int>> launch(CUgraph graph) {
    return launch(instantiate(graph));
  }

  CUstream where = nullptr;

 private:
  std::vector<CUgraph> graphs_;
  std::vector<CUgraphExec> executables_;
};

TEST_F(agreed_graph, what_was_attached_in_a_capture_is_asked_about_at_each_launch) {
  CUgraphExec const ready = instantiate(capture({1, 2}));
  EXPECT_THAT(others().take(), IsEmpty());
  EXPECT_THAT(launch(ready), ElementsAre(ElementsAre(1, 2)));
  EXPECT_THAT(launch(ready), ElementsAre(ElementsAre(1, 2)));
  EXPECT_EQ(cuda.synchronise(where), CUDA_SUCCESS);
  EXPECT_THAT(take_entries(), ElementsAre(1, 2, 1, 2));
  EXPECT_EQ(others().ended, 2);
}

TEST_F(agreed_graph, a_graph_that_holds_nothing_is_not_asked_about) {
  static_cast<void>(capture({1}));
  EXPECT_THAT(launch(plain()), IsEmpty());
}

TEST_F(agreed_graph, outside_of_a_capture_nothing_is_attached) {
  EXPECT_EQ(gate.attach_to_capture(where, nullptr), 0);
  attached held{{1}};
  EXPECT_EQ(gate.attach_to_capture(where, &held), 0);
}

TEST_F(agreed_graph, a_stream_that_has_joined_the_capture_is_part_of_it) {
  CUstream const forked = stream();
  CUevent const begun = event();
  CUevent const joined = event();
  EXPECT_EQ(cuda.begin_capture(where, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  EXPECT_EQ(gate.attach_to_capture(forked, nullptr), 0);
  EXPECT_EQ(cuda.record(begun, where), CUDA_SUCCESS);
  EXPECT_EQ(cuda.wait_event(forked, begun, 0), CUDA_SUCCESS);
  attach(1, forked);
  EXPECT_EQ(cuda.record(joined, forked), CUDA_SUCCESS);
  EXPECT_EQ(cuda.wait_event(where, joined, 0), CUDA_SUCCESS);
  EXPECT_THAT(launch(end_capture()), ElementsAre(ElementsAre(1)));
  EXPECT_EQ(gate.attach_to_capture(forked, nullptr), 0);
  EXPECT_EQ(cuda.destroy_event(begun), CUDA_SUCCESS);
  EXPECT_EQ(cuda.destroy_event(joined), CUDA_SUCCESS);
}

TEST_F(agreed_graph, a_clone_holds_what_the_graph_held_and_outlives_it) {
  CUgraph const first = capture({1, 2});
  CUgraph copy = nullptr;
  EXPECT_EQ(call<decltype(&cuGraphClone)>("cuGraphClone")(&copy, first), CUDA_SUCCESS);
  destroy(first);
  EXPECT_THAT(launch(own(copy)), ElementsAre(ElementsAre(1, 2)));
}

TEST_F(agreed_graph, a_graph_holds_its_own_and_then_its_childrens) {
  CUgraph const child = capture({3});
  CUgraph const parent = capture({1, 2});
  CUgraph empty = nullptr;
  CUgraphNode node = nullptr;
  auto const add = call<decltype(&cuGraphAddChildGraphNode)>("cuGraphAddChildGraphNode");
  EXPECT_EQ(call<decltype(&cuGraphCreate)>("cuGraphCreate")(&empty, 0), CUDA_SUCCESS);
  EXPECT_EQ(add(&node, parent, nullptr, 0, child), CUDA_SUCCESS);
  EXPECT_EQ(add(&node, own(empty), nullptr, 0, parent), CUDA_SUCCESS);
  destroy(child);
  EXPECT_THAT(launch(parent), ElementsAre(ElementsAre(1, 2, 3)));
  EXPECT_THAT(launch(empty), ElementsAre(ElementsAre(1, 2, 3)));
}

TEST_F(agreed_graph, a_launch_that_is_captured_is_asked_about_with_the_graph) {
  CUgraphExec const inner = instantiate(capture({1}));
  EXPECT_EQ(cuda.begin_capture(where, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  attach(2, where);
  EXPECT_THAT(launch(inner), IsEmpty());
  EXPECT_THAT(launch(end_capture()), ElementsAre(ElementsAre(2, 1)));
}

TEST_F(agreed_graph, a_capture_into_a_graph_adds_to_what_it_holds) {
  CUgraph const graph = capture({1});
  auto const begin = call<decltype(&cuStreamBeginCaptureToGraph)>("cuStreamBeginCaptureToGraph");
  EXPECT_EQ(begin(where, graph, nullptr, nullptr, 0, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
  attach(2, where);
  CUgraph same = nullptr;
  EXPECT_EQ(cuda.end_capture(where, &same), CUDA_SUCCESS);
  EXPECT_EQ(same, graph);
  EXPECT_THAT(launch(graph), ElementsAre(ElementsAre(1, 2)));
}

TEST_F(agreed_graph, an_executable_holds_what_it_was_updated_to) {
  CUgraph const first = capture({1});
  CUgraph const second = capture({2});
  CUgraph const longer = capture({3, 4});
  CUgraphExec const ready = instantiate(first);
  CUgraphExecUpdateResultInfo result{};
  auto const update = call<decltype(&cuGraphExecUpdate)>("cuGraphExecUpdate_v2");
  EXPECT_EQ(update(ready, second, &result), CUDA_SUCCESS);
  EXPECT_THAT(launch(ready), ElementsAre(ElementsAre(2)));
  EXPECT_EQ(update(ready, longer, &result), CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
  EXPECT_THAT(launch(ready), ElementsAre(ElementsAre(2)));
  EXPECT_EQ(update(ready, plain(), &result), CUDA_SUCCESS);
  EXPECT_THAT(launch(ready), IsEmpty());
}

TEST_F(agreed_graph, every_way_to_instantiate_carries) {
  CUgraph const graph = capture({1});
  CUDA_GRAPH_INSTANTIATE_PARAMS parameters{};
  CUgraphExec made = nullptr;
  EXPECT_EQ(call<decltype(&cuGraphInstantiateWithParams)>("cuGraphInstantiateWithParams")(
                &made, graph, &parameters),
            CUDA_SUCCESS);
  EXPECT_THAT(launch(own(made)), ElementsAre(ElementsAre(1)));
}

TEST_F(agreed_graph, an_executable_outlives_its_graph_and_nothing_outlives_both) {
  CUgraph const graph = capture({1});
  CUgraphExec const ready = instantiate(graph);
  destroy(graph);
  EXPECT_EQ(attached::alive, 1);
  EXPECT_THAT(launch(ready), ElementsAre(ElementsAre(1)));
  destroy(ready);
  EXPECT_EQ(attached::alive, 0);
}

TEST_F(agreed_graph, handles_that_come_again_hold_nothing) {
  CUgraph const graph = capture({1});
  CUgraphExec const ready = instantiate(graph);
  static_cast<void>(capture({2}));  // so that there is something to be looked for
  destroy(ready);
  destroy(graph);
  for (int i = 0; i < 20; ++i) {  // an allocator gives them out again sooner or later
    EXPECT_THAT(launch(plain()), IsEmpty());
  }
}

TEST_F(agreed_graph, a_capture_that_fails_leaves_nothing) {
  EXPECT_EQ(cuda.begin_capture(where, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  attach(1, where);
  EXPECT_NE(cuda.synchronise(where), CUDA_SUCCESS);  // which a capture forbids
  CUgraph graph = nullptr;
  EXPECT_NE(cuda.end_capture(where, &graph), CUDA_SUCCESS);
  EXPECT_EQ(attached::alive, 0);
}

TEST_F(agreed_graph, it_is_launched_in_its_turn_when_all_have_agreed) {
  CUgraphExec const ready = instantiate(capture({1}));
  std::uint64_t const before = driver.calls("cuGraphLaunch");
  others().agree = false;
  note(0, where);
  EXPECT_THAT(launch(ready), ElementsAre(ElementsAre(1)));
  note(2, where);
  EXPECT_TRUE(eventually([] { return others().asked > 0; }));
  EXPECT_EQ(cuda.query_stream(where), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(driver.calls("cuGraphLaunch"), before);
  close();
  others().agree = true;
  EXPECT_EQ(gate.wait_idle(in(10s)), 0);
  EXPECT_EQ(driver.calls("cuGraphLaunch"), before);
  gate.open();
  EXPECT_EQ(cuda.synchronise(where), CUDA_SUCCESS);
  EXPECT_THAT(take_entries(), ElementsAre(0, 1, 2));
}

TEST_F(agreed_graph, whoever_destroys_the_executable_waits_for_its_launch) {
  CUgraphExec const ready = instantiate(capture({1}));
  others().agree = false;
  static_cast<void>(launch(ready));
  EXPECT_TRUE(eventually([] { return others().asked > 0; }));
  std::atomic<bool> destroyed{false};
  auto const destroying = thread([&] {
    destroy(ready);
    destroyed = true;
  });
  others().agree = true;
  EXPECT_TRUE(eventually([&] { return destroyed.load(); }));
  EXPECT_EQ(cuda.synchronise(where), CUDA_SUCCESS);
  EXPECT_THAT(take_entries(), ElementsAre(1));
}

TEST_F(agreed_graph, the_error_of_a_launch_is_its_result_or_that_of_a_later_call) {
  CUgraphExec const ready = instantiate(capture({1}));
  driver.fail("cuGraphLaunch", CUDA_ERROR_LAUNCH_FAILED, 0);
  EXPECT_EQ(cuda.launch_graph(ready, where), CUDA_SUCCESS);
  EXPECT_EQ(cuda.synchronise(where), CUDA_ERROR_LAUNCH_FAILED);
  gate.set_run_ahead(0);
  EXPECT_EQ(cuda.launch_graph(ready, where), CUDA_ERROR_LAUNCH_FAILED);
  driver.fail("cuGraphLaunch", 0, 0);
  EXPECT_EQ(cuda.launch_graph(ready, where), CUDA_SUCCESS);
  others().ever = false;
  EXPECT_EQ(cuda.launch_graph(ready, where), CUDA_ERROR_NOT_PERMITTED);
  EXPECT_EQ(others().ended, 4);
}

TEST_F(agreed_graph, what_is_refused_is_not_launched_and_what_passes_is_as_usual) {
  CUgraphExec const ready = instantiate(capture({1}));
  others().answer = SLUICE_GRAPH_REFUSED;
  EXPECT_EQ(cuda.launch_graph(ready, where), CUDA_ERROR_NOT_PERMITTED);
  others().answer = SLUICE_GRAPH_PASSES;
  EXPECT_EQ(cuda.launch_graph(ready, where), CUDA_SUCCESS);
  EXPECT_EQ(cuda.synchronise(where), CUDA_SUCCESS);
  EXPECT_THAT(take_entries(), ElementsAre(1));
  EXPECT_EQ(others().asked, 0);
}

TEST_F(agreed_graph, an_exempt_thread_launches_without_asking) {
  CUgraphExec const ready = instantiate(capture({1}));
  gate.exempt_thread(1);
  EXPECT_THAT(launch(ready), IsEmpty());
  gate.exempt_thread(0);
}

TEST_F(agreed_graph, on_a_per_thread_stream_the_calling_thread_asks) {
  CUgraphExec const ready = instantiate(capture({1}));
  EXPECT_EQ(call<decltype(&cuGraphLaunch)>("cuGraphLaunch_ptsz")(ready, nullptr), CUDA_SUCCESS);
  EXPECT_THAT(others().take(), ElementsAre(ElementsAre(1)));
  EXPECT_EQ(others().ended, 1);
}

TEST_F(agreed_graph, of_a_micro_batch_that_is_discarded_it_is_not_launched) {
  CUgraphExec const ready = instantiate(capture({1}));
  gate.expendable_thread(1);
  others().agree = false;
  static_cast<void>(launch(ready));
  gate.abort_begin();
  gate.expendable_thread(0);
  gate.abort_end();
  EXPECT_EQ(cuda.synchronise(where), CUDA_SUCCESS);
  EXPECT_THAT(take_entries(), IsEmpty());
  EXPECT_EQ(others().ended, 1);
}

TEST_F(agreed_graph, threads_may_make_launch_and_end_graphs_at_once) {
  std::uint64_t const rounds = from_environment("SLUICE_TEST_GRAPHS", 200);
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.push_back(thread([this, i, rounds] {
      CUstream const own = stream();
      for (std::uint64_t round = 0; round < rounds; ++round) {
        CUgraph graph = nullptr;
        CUgraphExec ready = nullptr;
        EXPECT_EQ(cuda.begin_capture(own, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
        attach(i, own);
        note(i, own);
        EXPECT_EQ(cuda.end_capture(own, &graph), CUDA_SUCCESS);
        EXPECT_EQ(cuda.instantiate(&ready, graph, 0), CUDA_SUCCESS);
        EXPECT_EQ(cuda.destroy_graph(graph), CUDA_SUCCESS);
        EXPECT_EQ(cuda.launch_graph(ready, own), CUDA_SUCCESS);
        EXPECT_EQ(cuda.destroy_exec(ready), CUDA_SUCCESS);
      }
      EXPECT_EQ(cuda.synchronise(own), CUDA_SUCCESS);
      EXPECT_EQ(cuda.destroy_stream(own), CUDA_SUCCESS);
    }));
  }
  threads.clear();
  EXPECT_EQ(take_entries().size(), 4 * rounds);
  EXPECT_EQ(others().take().size(), 4 * rounds);
}

}  // namespace
}  // namespace sluice::gate
