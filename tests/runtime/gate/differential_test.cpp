/// The same random programs over the driver alone and through the gate, with calls left to the
/// submitter, bounds that come and go, and pauses at random instants: same results, same order.
///
/// A program does what order decides: kernels multiply and add, so that memory tells in which order
/// they ran. Several threads run one each; every so often each hands a copy of its memory to its
/// neighbour, by events.
///
/// SLUICE_TEST_OPERATIONS sets the number of operations, SLUICE_TEST_SEED the seed.
#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "tests/runtime/gate/gate_fixture.hpp"

namespace sluice::gate {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t thread_count = 4;
constexpr std::size_t streams_each = 3;
constexpr std::size_t words = 64;  // of a buffer
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t usual_operations = 20'000;
#else
constexpr std::uint64_t usual_operations = 100'000;
#endif

/// The driver, by itself or behind the gate.
struct driver_table {
  explicit driver_table(library const& from)
      : set_current{from.get<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")},
        launch{from.get<decltype(&cuLaunchKernel)>("cuLaunchKernel")},
        launch_ex{from.get<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx")},
        launch_cooperative{
            from.get<decltype(&cuLaunchCooperativeKernel)>("cuLaunchCooperativeKernel")},
        fill{from.get<decltype(&cuMemsetD32Async)>("cuMemsetD32Async")},
        copy{from.get<decltype(&cuMemcpyDtoDAsync)>("cuMemcpyDtoDAsync_v2")},
        copy_in{from.get<decltype(&cuMemcpyHtoDAsync)>("cuMemcpyHtoDAsync_v2")},
        copy_out{from.get<decltype(&cuMemcpyDtoHAsync)>("cuMemcpyDtoHAsync_v2")},
        call_host{from.get<decltype(&cuLaunchHostFunc)>("cuLaunchHostFunc")},
        allocate{from.get<decltype(&cuMemAlloc)>("cuMemAlloc_v2")},
        free{from.get<decltype(&cuMemFree)>("cuMemFree_v2")},
        create_stream{from.get<decltype(&cuStreamCreate)>("cuStreamCreate")},
        destroy_stream{from.get<decltype(&cuStreamDestroy)>("cuStreamDestroy_v2")},
        synchronise{from.get<decltype(&cuStreamSynchronize)>("cuStreamSynchronize")},
        query_stream{from.get<decltype(&cuStreamQuery)>("cuStreamQuery")},
        wait_event{from.get<decltype(&cuStreamWaitEvent)>("cuStreamWaitEvent")},
        create_event{from.get<decltype(&cuEventCreate)>("cuEventCreate")},
        destroy_event{from.get<decltype(&cuEventDestroy)>("cuEventDestroy_v2")},
        record{from.get<decltype(&cuEventRecord)>("cuEventRecord")},
        query_event{from.get<decltype(&cuEventQuery)>("cuEventQuery")},
        synchronise_event{from.get<decltype(&cuEventSynchronize)>("cuEventSynchronize")},
        synchronise_all{from.get<decltype(&cuCtxSynchronize)>("cuCtxSynchronize")},
        begin_capture{from.get<decltype(&cuStreamBeginCapture)>("cuStreamBeginCapture_v2")},
        end_capture{from.get<decltype(&cuStreamEndCapture)>("cuStreamEndCapture")},
        instantiate{from.get<decltype(&cuGraphInstantiate)>("cuGraphInstantiateWithFlags")},
        launch_graph{from.get<decltype(&cuGraphLaunch)>("cuGraphLaunch")},
        destroy_exec{from.get<decltype(&cuGraphExecDestroy)>("cuGraphExecDestroy")},
        destroy_graph{from.get<decltype(&cuGraphDestroy)>("cuGraphDestroy")} {
    if (auto* const table =
            reinterpret_cast<sluice_gate_api const* (*)()>(from.find("sluice_gate_table"))) {
      gate = table();
    }
  }

  decltype(&cuCtxSetCurrent) set_current;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuLaunchKernelEx) launch_ex;
  decltype(&cuLaunchCooperativeKernel) launch_cooperative;
  decltype(&cuMemsetD32Async) fill;
  decltype(&cuMemcpyDtoDAsync) copy;
  decltype(&cuMemcpyHtoDAsync) copy_in;
  decltype(&cuMemcpyDtoHAsync) copy_out;
  decltype(&cuLaunchHostFunc) call_host;
  decltype(&cuMemAlloc) allocate;
  decltype(&cuMemFree) free;
  decltype(&cuStreamCreate) create_stream;
  decltype(&cuStreamDestroy) destroy_stream;
  decltype(&cuStreamSynchronize) synchronise;
  decltype(&cuStreamQuery) query_stream;
  decltype(&cuStreamWaitEvent) wait_event;
  decltype(&cuEventCreate) create_event;
  decltype(&cuEventDestroy) destroy_event;
  decltype(&cuEventRecord) record;
  decltype(&cuEventQuery) query_event;
  decltype(&cuEventSynchronize) synchronise_event;
  decltype(&cuCtxSynchronize) synchronise_all;
  decltype(&cuStreamBeginCapture) begin_capture;
  decltype(&cuStreamEndCapture) end_capture;
  decltype(&cuGraphInstantiate) instantiate;
  decltype(&cuGraphLaunch) launch_graph;
  decltype(&cuGraphExecDestroy) destroy_exec;
  decltype(&cuGraphDestroy) destroy_graph;
  sluice_gate_api const* gate = nullptr;  ///< that is behind these calls
};

/// A launch that others agree to after a while, again and again if it is withdrawn.
struct agreed_launch {
  std::function<CUresult()> make;
  std::chrono::microseconds takes;
  std::int64_t agreed_ns = 0;
  std::atomic<int>* failures = nullptr;

  [[nodiscard]] bool is_agreed() const { return in(0s) >= agreed_ns; }

  static CUresult hand_over(sluice_gate_api const& gate, CUstream where,
                            std::unique_ptr<agreed_launch> one) {
    static auto const self = [](void* of) { return static_cast<agreed_launch*>(of); };
    sluice_agreed_call const call{
        .stream = where,
        .of = one.release(),
        .ask = [](void* of) { self(of)->agreed_ns = in(self(of)->takes); },
        .is_agreed = [](void* of) { return self(of)->is_agreed() ? 1 : 0; },
        .withdraw = [](void* of) { return self(of)->is_agreed() ? 1 : 0; },
        .make =
            [](void* of) {
              std::unique_ptr<agreed_launch> const made{self(of)};
              *made->failures += made->make() != CUDA_SUCCESS ? 1 : 0;
            },
        .drop = nullptr};
    return gate.make_agreed(&call) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_NOT_PERMITTED;
  }
};

using word = std::uint32_t;

/// buffer = buffer * factor + addend, then the counter of the stream's work moves on.
void multiply_add(void** parameters) {
  CUdeviceptr buffer = 0;
  word factor = 0;
  word addend = 0;
  std::atomic<std::uint64_t>* progress = nullptr;
  std::memcpy(&buffer, parameters[0], sizeof(buffer));
  std::memcpy(&factor, parameters[1], sizeof(factor));
  std::memcpy(&addend, parameters[2], sizeof(addend));
  std::memcpy(&progress, parameters[3], sizeof(progress));
  auto* const values = reinterpret_cast<word*>(buffer);
  for (std::size_t i = 0; i < words; ++i) {
    values[i] = values[i] * factor + addend + static_cast<word>(i);
  }
  progress->fetch_add(1);
}

/// What the run of a program has shown.
struct outcome {
  std::vector<int> results;
  std::vector<word> memory;
  std::vector<word> read;
  std::deque<std::vector<word>> called;  ///< by host functions, one list a stream
  bool operator==(outcome const&) const = default;
};

/// Where threads meet to hand their memory on.
struct meeting {
  std::barrier<> point{thread_count};
  std::array<CUdeviceptr, thread_count> mailbox{};
  std::array<CUevent, thread_count> posted{};
  std::array<CUevent, thread_count> fetched{};
};

/// One thread's program. All it decides comes from its seed, never from an answer that depends on
/// time.
class program {
 public:
  program(driver_table const& driver, CUfunction kernel, meeting& others, std::size_t self,
          std::uint64_t seed)
      : cuda_{driver}, kernel_{kernel}, others_{others}, self_{self}, random_{seed} {}

  outcome run(std::size_t operations) {
    set_up();
    for (std::size_t i = 0; i < operations; ++i) {
      if (i % 500 == 499) {
        hand_on();
      } else {
        do_something();
      }
    }
    return finish();
  }

 private:
  struct lane {
    CUstream stream = nullptr;
    CUdeviceptr buffer = 0;
    CUevent event = nullptr;
    std::uint64_t launched = 0;  ///< kernels that count
    std::uint64_t at_event = 0;  ///< of them before the event was last recorded
    std::atomic<std::uint64_t>* progress = nullptr;
    std::vector<word>* called = nullptr;
  };

  void expect(CUresult result) { seen_.results.push_back(result); }

  void set_up() {
    progress_ = std::vector<std::atomic<std::uint64_t>>(streams_each);
    for (std::size_t i = 0; i < streams_each; ++i) {
      lane& one = lanes_[i];
      expect(cuda_.create_stream(&one.stream, CU_STREAM_NON_BLOCKING));
      expect(cuda_.allocate(&one.buffer, words * sizeof(word)));
      expect(cuda_.create_event(&one.event, 0));
      expect(cuda_.fill(one.buffer, static_cast<word>(i + 1), words, one.stream));
      expect(cuda_.record(one.event, one.stream));
      one.progress = &progress_[i];
      one.called = &seen_.called.emplace_back();
    }
    expect(cuda_.allocate(&others_.mailbox[self_], words * sizeof(word)));
    expect(cuda_.create_event(&others_.posted[self_], 0));
    expect(cuda_.create_event(&others_.fetched[self_], 0));
    expect(cuda_.record(others_.fetched[self_], lanes_[0].stream));
    others_.point.arrive_and_wait();
  }

  [[nodiscard]] word number() { return static_cast<word>(random_()); }
  [[nodiscard]] lane& some_lane() { return lanes_[random_() % streams_each]; }

  void launch(lane& on, unsigned form) {
    word factor = number() | 1U;
    word addend = number();
    std::array<void*, 4> each{&on.buffer, &factor, &addend, &on.progress};
    switch (form) {
      case 0:
        expect(cuda_.launch(kernel_, 1, 1, 1, 32, 1, 1, 0, on.stream, each.data(), nullptr));
        break;
      case 1: {
        struct {
          CUdeviceptr buffer;
          word factor, addend;
          std::atomic<std::uint64_t>* progress;
        } all{on.buffer, factor, addend, on.progress};
        std::size_t bytes = sizeof(all);
        std::array<void*, 5> extra{CU_LAUNCH_PARAM_BUFFER_POINTER, &all,
                                   CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
        expect(cuda_.launch(kernel_, 2, 1, 1, 32, 1, 1, 0, on.stream, nullptr, extra.data()));
        std::memset(&all, 0xff, sizeof(all));
        break;
      }
      case 2: {
        CUlaunchAttribute attribute{};
        attribute.id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
        CUlaunchConfig config{1, 1, 1, 64, 1, 1, 0, on.stream, &attribute, 1};
        expect(cuda_.launch_ex(&config, kernel_, each.data(), nullptr));
        break;
      }
      default:
        expect(cuda_.launch_cooperative(kernel_, 1, 1, 1, 32, 1, 1, 0, on.stream, each.data()));
        break;
    }
    factor = addend = 0xdead;
    ++on.launched;
  }

  /// The same, but through the gate others have to agree to it first.
  void launch_agreed(lane& on) {
    word factor = number() | 1U;
    word addend = number();
    auto const takes = std::chrono::microseconds{number() % 300};
    auto make = [this, on = &on, buffer = on.buffer, stream = on.stream, factor, addend]() mutable {
      std::array<void*, 4> each{&buffer, &factor, &addend, &on->progress};
      return cuda_.launch(kernel_, 1, 1, 1, 32, 1, 1, 0, stream, each.data(), nullptr);
    };
    expect(cuda_.gate == nullptr
               ? make()
               : agreed_launch::hand_over(
                     *cuda_.gate, on.stream,
                     std::make_unique<agreed_launch>(agreed_launch{make, takes, 0, &failures_})));
    ++on.launched;
  }

  /// `to` takes what `from` holds at this point of the program, and `from` goes on only then.
  void copy_between(lane& from, lane& to) {
    if (&from == &to) {
      return;
    }
    record(from);
    expect(cuda_.wait_event(to.stream, from.event, 0));
    expect(cuda_.copy(to.buffer, from.buffer, words * sizeof(word), to.stream));
    record(to);
    expect(cuda_.wait_event(from.stream, to.event, 0));
  }

  void record(lane& on) {
    expect(cuda_.record(on.event, on.stream));
    on.at_event = on.launched;
  }

  /// Whoever is told that work is done must find it done.
  void check_done(CUresult answer, lane const& on, std::uint64_t count) {
    ASSERT_TRUE(answer == CUDA_SUCCESS || answer == CUDA_ERROR_NOT_READY) << answer;
    if (answer == CUDA_SUCCESS) {
      ASSERT_GE(on.progress->load(), count);
    }
  }

  void read_back(lane& on) {
    std::array<word, words> values{};
    expect(cuda_.copy_out(values.data(), on.buffer, sizeof(values), on.stream));
    expect(cuda_.synchronise(on.stream));
    seen_.read.insert(seen_.read.end(), values.begin(), values.begin() + 4);
    ASSERT_GE(on.progress->load(), on.launched);
  }

  void call_host(lane& on) {
    struct entry {
      std::vector<word>* list;
      word value;
    };
    auto* const given = new entry{on.called, number()};
    expect(cuda_.call_host(
        on.stream,
        [](void* data) {
          std::unique_ptr<entry> const one{static_cast<entry*>(data)};
          one->list->push_back(one->value);
        },
        given));
  }

  void use_a_graph(lane& on) {
    CUgraph graph = nullptr;
    CUgraphExec ready = nullptr;
    expect(cuda_.begin_capture(on.stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    std::uint64_t const before = on.launched;
    launch(on, 0);
    launch(on, 2);
    std::uint64_t const inside = on.launched - before;
    on.launched = before;
    expect(cuda_.end_capture(on.stream, &graph));
    expect(cuda_.instantiate(&ready, graph, 0));
    for (int i = 0; i < 3; ++i) {
      expect(cuda_.launch_graph(ready, on.stream));
      on.launched += inside;
    }
    expect(cuda_.destroy_exec(ready));
    expect(cuda_.destroy_graph(graph));
  }

  void use_other_memory(lane& on) {
    CUdeviceptr other = 0;
    expect(cuda_.allocate(&other, words * sizeof(word)));
    std::array<word, words> values{};
    values.fill(number());
    expect(cuda_.copy_in(other, values.data(), sizeof(values), on.stream));
    values.fill(0);
    expect(cuda_.copy(on.buffer, other, words * sizeof(word) / 2, on.stream));
    expect(cuda_.synchronise(on.stream));
    expect(cuda_.free(other));
  }

  void make_mistakes(lane& on) {
    std::array<void*, 4> each{&on.buffer, &on.buffer, &on.buffer, &on.progress};
    expect(cuda_.launch(kernel_, 1, 1, 1, 2048, 1, 1, 0, on.stream, each.data(), nullptr));
    expect(cuda_.launch(nullptr, 1, 1, 1, 32, 1, 1, 0, on.stream, each.data(), nullptr));
    expect(cuda_.launch_ex(nullptr, kernel_, each.data(), nullptr));
  }

  /// Another stream, which goes on where the old one ends, and another event.
  void replace(lane& on) {
    record(on);
    expect(cuda_.destroy_stream(on.stream));
    expect(cuda_.create_stream(&on.stream, CU_STREAM_NON_BLOCKING));
    expect(cuda_.wait_event(on.stream, on.event, 0));
    expect(cuda_.destroy_event(on.event));
    expect(cuda_.create_event(&on.event, 0));
    record(on);
  }

  void synchronise_all() {
    expect(cuda_.synchronise_all());
    for (lane const& one : lanes_) {
      ASSERT_GE(one.progress->load(), one.launched);
    }
  }

  void do_something() {
    using action = void (*)(program&, lane&);
    // How often in a thousand, and what.
    static constexpr std::array<std::pair<unsigned, action>, 19> actions{{
        {140, [](program& self, lane& on) { self.launch(on, 0); }},
        {140, [](program& self, lane& on) { self.launch(on, 1); }},
        {140, [](program& self, lane& on) { self.launch(on, 2); }},
        {125, [](program& self, lane& on) { self.launch(on, 3); }},
        {15, [](program& self, lane& on) { self.launch_agreed(on); }},
        {60,
         [](program& self, lane& on) {
           self.expect(self.cuda_.fill(on.buffer, self.number(), words / 4, on.stream));
         }},
        {60,
         [](program& self, lane& on) {
           self.expect(self.cuda_.copy(on.buffer + words * 2, on.buffer, words, on.stream));
         }},
        {70, [](program& self, lane& on) { self.record(on); }},
        {50, [](program& self, lane& on) { self.copy_between(self.some_lane(), on); }},
        {60, [](program& self,
                lane& on) { self.check_done(self.cuda_.query_event(on.event), on, on.at_event); }},
        {50,
         [](program& self, lane& on) {
           self.check_done(self.cuda_.query_stream(on.stream), on, on.launched);
         }},
        {20,
         [](program& self, lane& on) {
           self.expect(self.cuda_.synchronise_event(on.event));
           self.check_done(CUDA_SUCCESS, on, on.at_event);
         }},
        {20, [](program& self, lane& on) { self.call_host(on); }},
        {20, [](program& self, lane& on) { self.read_back(on); }},
        {10, [](program& self, lane& on) { self.use_other_memory(on); }},
        {5, [](program& self, lane& on) { self.use_a_graph(on); }},
        {5, [](program& self, lane& on) { self.make_mistakes(on); }},
        {8, [](program& self, lane& on) { self.replace(on); }},
        {2, [](program& self, lane&) { self.synchronise_all(); }},
    }};
    lane& on = some_lane();
    unsigned chosen = static_cast<unsigned>(random_() % 1000);
    for (auto const& [often, what] : actions) {
      if (chosen < often) {
        what(*this, on);
        return;
      }
      chosen -= often;
    }
  }

  /// Puts a copy into its own mailbox, and takes its neighbour's.
  void hand_on() {
    std::size_t const reader = (self_ + thread_count - 1) % thread_count;
    std::size_t const neighbour = (self_ + 1) % thread_count;
    lane& on = lanes_[0];
    expect(cuda_.wait_event(on.stream, others_.fetched[reader], 0));
    expect(cuda_.copy(others_.mailbox[self_], on.buffer, words * sizeof(word), on.stream));
    expect(cuda_.record(others_.posted[self_], on.stream));
    others_.point.arrive_and_wait();
    expect(cuda_.wait_event(on.stream, others_.posted[neighbour], 0));
    expect(cuda_.copy(on.buffer, others_.mailbox[neighbour], words * sizeof(word), on.stream));
    expect(cuda_.record(others_.fetched[self_], on.stream));
    others_.point.arrive_and_wait();
  }

  outcome finish() {
    for (lane& one : lanes_) {
      expect(cuda_.synchronise(one.stream));
      auto const* values = reinterpret_cast<word const*>(one.buffer);
      seen_.memory.insert(seen_.memory.end(), values, values + words);
      EXPECT_EQ(one.progress->load(), one.launched);
    }
    EXPECT_EQ(failures_, 0);
    others_.point.arrive_and_wait();
    for (lane& one : lanes_) {
      expect(cuda_.destroy_event(one.event));
      expect(cuda_.destroy_stream(one.stream));
      expect(cuda_.free(one.buffer));
    }
    expect(cuda_.destroy_event(others_.posted[self_]));
    expect(cuda_.destroy_event(others_.fetched[self_]));
    expect(cuda_.free(others_.mailbox[self_]));
    return std::move(seen_);
  }

  driver_table const& cuda_;
  CUfunction kernel_;
  meeting& others_;
  std::size_t self_;
  std::mt19937_64 random_;
  std::array<lane, streams_each> lanes_;
  std::vector<std::atomic<std::uint64_t>> progress_;
  std::atomic<int> failures_{0};  // of launches that were agreed on
  outcome seen_;
};

class differential : public gate_test {
 protected:
  /// Runs one program in each thread.
  std::vector<outcome> run(driver_table const& driver_calls, std::size_t operations,
                           std::uint64_t seed) const {
    meeting others;
    std::vector<outcome> outcomes(thread_count);
    {
      std::vector<std::jthread> threads;
      for (std::size_t i = 0; i < thread_count; ++i) {
        threads.emplace_back([&, i] {
          EXPECT_EQ(driver_calls.set_current(context), CUDA_SUCCESS);
          outcomes[i] = program{driver_calls, ordered, others, i, seed + i}.run(operations);
        });
      }
    }
    return outcomes;
  }

  /// Pauses, bounds, and lets go, until it is told to stop.
  void disturb(std::stop_token const& stop, std::uint64_t seed) const {
    static std::uint64_t volatile paused_until = 0;
    gate.exempt_thread(1);
    gate.set_pause_word(&paused_until);
    std::minstd_rand random{static_cast<unsigned>(seed)};
    while (!stop.stop_requested()) {
      switch (random() % 8) {
        case 0:
          gate.set_run_ahead(0);
          break;
        case 1:
        case 2:
        case 3:
          gate.set_run_ahead(static_cast<std::int64_t>(random() % 3 * 40'000 + 10'000));
          break;
        case 4:
          __atomic_store_n(&paused_until, static_cast<std::uint64_t>(in(300us)), __ATOMIC_RELEASE);
          break;
        default:
          if (gate.close(in(patience)) == 0) {
            if (random() % 2 == 0) {
              EXPECT_EQ(gate.wait_idle(in(patience)), 0);
            }
            gate.open();
          }
          break;
      }
      std::this_thread::sleep_for(std::chrono::microseconds{random() % 2000});
    }
    gate.set_pause_word(nullptr);
    gate.exempt_thread(0);
  }

  std::array<std::size_t, 4> const sizes{sizeof(CUdeviceptr), sizeof(word), sizeof(word),
                                         sizeof(void*)};
  CUfunction ordered =
      static_cast<CUfunction>(driver.register_kernel(multiply_add, sizes.data(), sizes.size(), 0));
};

TEST_F(differential, programs_show_the_same_with_and_without_the_gate) {
  std::uint64_t const operations = from_environment("SLUICE_TEST_OPERATIONS", usual_operations);
  std::uint64_t const first_seed = from_environment("SLUICE_TEST_SEED", std::random_device{}());
  constexpr std::uint64_t at_once = 5'000;  // operations of a thread
  driver_table const alone{fake()};
  driver_table const gated{gate_library()};
  gate.set_deferred(1);
  std::uint64_t const deferred_before = gate.deferred();
  for (std::uint64_t done = 0; done < operations; done += at_once * thread_count) {
    std::uint64_t const seed = first_seed + done;
    std::vector<outcome> const expected = run(alone, at_once, seed);
    gate.set_run_ahead(50'000);
    std::jthread disturber{[&](std::stop_token const& stop) { disturb(stop, seed); }};
    std::vector<outcome> const seen = run(gated, at_once, seed);
    disturber.request_stop();
    disturber.join();
    for (std::size_t i = 0; i < thread_count; ++i) {
      ASSERT_EQ(seen[i].results, expected[i].results) << "SLUICE_TEST_SEED=" << seed;
      ASSERT_EQ(seen[i].read, expected[i].read) << "SLUICE_TEST_SEED=" << seed;
      ASSERT_EQ(seen[i].memory, expected[i].memory) << "SLUICE_TEST_SEED=" << seed;
      ASSERT_EQ(seen[i].called, expected[i].called) << "SLUICE_TEST_SEED=" << seed;
    }
    ASSERT_FALSE(HasFailure()) << "SLUICE_TEST_SEED=" << seed;
  }
  EXPECT_GT(gate.deferred() - deferred_before, operations / 20) << "hardly anything was deferred";
}

}  // namespace
}  // namespace sluice::gate
