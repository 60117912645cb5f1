/// One rank of a job that knows nothing of Sluice but the gate's table, by which it is paused.
/// shim_test.cpp runs some of them, with gate and shim preloaded.
///
///   sluice_shim_rank SCENARIO RANK RANKS FILE     prints what it sees, exits with 0 if it ends
#include <cuda.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_shim/nccl_abi.hpp"
#include "runtime/gate/gate_api.h"
#include "tests/nccl_shim/exchanges_job.hpp"
#include "tests/nccl_shim/fake_nccl.hpp"
#include "tests/nccl_shim/graph_of_reduces.hpp"
#include "tests/nccl_shim/micro_batches.hpp"
#include "tests/nccl_shim/parts_of_job.hpp"
#include "tests/nccl_shim/pausing.hpp"
#include "tests/runtime/gate/test_runtime.h"

using namespace std::chrono_literals;
using sluice::nccl_shim::testing::in;
using sluice::nccl_shim::testing::number_in;
using sluice::nccl_shim::testing::patience;
using sluice::nccl_shim::testing::rank_that_pauses;

struct ncclComm;
extern "C" {
int ncclCommInitRank(ncclComm** made, int ranks, sluice::fake_nccl::unique_id id, int rank);
int ncclCommInitRankConfig(ncclComm** made, int ranks, sluice::fake_nccl::unique_id id, int rank,
                           void* config);
int ncclCommRegister(ncclComm* on, void* buffer, std::size_t bytes, void** handle);
int ncclCommDeregister(ncclComm* on, void* handle);
int ncclCommSplit(ncclComm* parent, int colour, int order, ncclComm** made, void* config);
int ncclCommGetAsyncError(ncclComm* of, int* error);
int ncclCommDestroy(ncclComm* which);
int ncclCommAbort(ncclComm* which);
int ncclGroupStart();
int ncclGroupEnd();
int ncclSend(void const* from, std::size_t count, int type, int peer, ncclComm* on, CUstream where);
int ncclRecv(void* to, std::size_t count, int type, int peer, ncclComm* on, CUstream where);
int ncclAllReduce(void const* from, void* to, std::size_t count, int type, int reduction,
                  ncclComm* on, CUstream where);
}

namespace {

struct rank_of_job {
  int rank = 0;
  int ranks = 0;
  std::string file;
  CUstream where = nullptr;
  ncclComm* all = nullptr;
  std::vector<ncclComm*> parts;  // of some of the ranks
  sluice_gate_api const* gate = nullptr;
  std::unique_ptr<rank_that_pauses> pausing;
  std::unique_ptr<sluice::nccl_shim::testing::graph_of_reduces> graph;  // by which it reduces

  template <typename Function>
  static Function driver(char const* name) {
    static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<Function>(::dlsym(library, name));
  }

  void set_up() {
    CUcontext context = nullptr;
    driver<decltype(&cuInit)>("cuInit")(0);
    driver<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&context, 0);
    driver<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(context);
    driver<decltype(&cuStreamCreate)>("cuStreamCreate")(&where, CU_STREAM_NON_BLOCKING);
    gate = reinterpret_cast<sluice_gate_api const* (*)()>(
        ::dlsym(RTLD_DEFAULT, "sluice_gate_table"))();
    CUdeviceptr memory = 0;  // so that the gate has attached before somebody else closes it
    driver<decltype(&cuMemAlloc)>("cuMemAlloc_v2")(&memory, 1);
    pausing = std::make_unique<rank_that_pauses>(*gate, rank, ranks, file + ".pauses");
    pausing->may_pause(number_in("FICKLE", 0) == 0 && number_in("MAY_PAUSE", 1) != 0);
    std::string const submission = std::getenv("SUBMISSION");
    gate->set_deferred(submission != "direct" ? 1 : 0);
    gate->set_run_ahead(submission == "deferred" ? std::chrono::nanoseconds{100us}.count() : 0);
    sluice::fake_nccl::unique_id id{};
    file.copy(id.path.data(), id.path.size() - 1);
    if (number_in("NOT_BLOCKING", 0) != 0) {
      sluice::nccl_shim::config_start config{sizeof(config), sluice::nccl_shim::config_magic, 0, 0};
      report("init", ncclCommInitRankConfig(&all, ranks, id, rank, &config));
      report("configuration", config.blocking);  // it is the caller's
    } else {
      report("init", ncclCommInitRank(&all, ranks, id, rank));
    }
    if (number_in("GRAPHS", 0) != 0) {
      make_graph();
    }
  }

  void make_graph() {
    using sluice::nccl_shim::testing::graph_of_reduces;
    graph = std::make_unique<graph_of_reduces>(sluice::nccl_shim::testing::graph_of_reduces_needs{
        gate,
        [](char const* name) {
          return ::dlsym(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), name);
        },
        [this](int which, int& from, int& to) { return record(which, from, to); }, where,
        number_in("GRAPH_SENDS", 0) != 0 ? 1 : ranks});
  }

  /// Records the first or second of the graph's calls.
  [[nodiscard]] int record(int which, int& from, int& to) const {
    ncclComm* on = all;
    if (which == 2 && number_in("GRAPH_SENDS", 0) != 0) {
      report("start", ncclGroupStart());
      report("send", ncclSend(&from, 1, 2, (rank + 1) % ranks, all, where));
      report("receive", ncclRecv(&to, 1, 2, (rank + ranks - 1) % ranks, all, where));
      return ncclGroupEnd();
    }
    if (which == 2 && number_in("GRAPH_OF_TWO_COMMUNICATORS", 0) != 0) {
      report("split", ncclCommSplit(all, 0, rank, &on, nullptr));
    }
    bool const lacks = which == 2 && rank == 1 && number_in("GRAPHS_DIFFER", 0) != 0;
    return lacks ? 0 : ncclAllReduce(&from, &to, 1, 2, 0, on, where);
  }

  static void report(char const* what, int result) {
    if (result != 0) {
      std::printf("%s: %d\n", what, result);
    }
  }

  [[nodiscard]] int reduce(int& from, int& to, std::size_t count = 1) const {
    if (graph != nullptr) {
      return graph->reduce(from, to);
    }
    return ncclAllReduce(&from, &to, count, 2, 0, all, where);
  }
  void synchronise() const { driver<decltype(&cuStreamSynchronize)>("cuStreamSynchronize")(where); }
  /// The error that the communicator has left, once all that was called has been made.
  [[nodiscard]] int left_error() const {
    gate->flush();
    int error = 0;
    report("ask", ncclCommGetAsyncError(all, &error));
    return error;
  }

  void pauses() const {
    int const count = number_in("COLLECTIVES", 1000);
    std::thread pauser{[this] { pausing->now_and_then(number_in("PAUSES", 100)); }};
    std::vector<int> from(static_cast<std::size_t>(count));
    std::vector<int> to(static_cast<std::size_t>(count));
    std::minstd_rand random{static_cast<unsigned>(rank + 100)};
    for (int i = 0; i < count; ++i) {
      auto const at = static_cast<std::size_t>(i);
      from[at] = i * (rank + 1);
      report("reduce", reduce(from[at], to[at]));
      if (random() % 8 == 0) {
        std::this_thread::sleep_for(std::chrono::microseconds{random() % 500});
      }
    }
    pauser.join();
    synchronise();
    report("left", left_error());
    report("wrong", sluice::nccl_shim::testing::graph_of_reduces::wrong());
    for (int i = 0; i < count; ++i) {
      if (to[static_cast<std::size_t>(i)] != i * ranks * (ranks + 1) / 2) {
        std::printf("sum %d is %d\n", i, to[static_cast<std::size_t>(i)]);
      }
    }
  }

  /// The first has made all its calls before any other makes one.
  void far_ahead() const {
    std::vector<int> from(static_cast<std::size_t>(number_in("COLLECTIVES", 50)), rank + 1);
    std::vector<int> to(from.size());
    for (auto const until = in(patience()); rank != 0 && pausing->came() == 0;) {
      if (in(0s) > until) {
        throw std::runtime_error{"the first waits for the others"};
      }
      std::this_thread::yield();
    }
    for (std::size_t i = 0; i < from.size(); ++i) {
      report("reduce", reduce(from[i], to[i]));
    }
    if (rank == 0) {
      pausing->come();
    }
    synchronise();
    std::printf("%td sums are right\n", std::count(to.begin(), to.end(), ranks * (ranks + 1) / 2));
  }

  /// Sends and receives, and pauses.
  void exchanges() const {
    ncclComm* other = nullptr;
    CUstream beside = nullptr;
    report("split", ncclCommSplit(all, 0, rank, &other, nullptr));
    driver<decltype(&cuStreamCreate)>("cuStreamCreate")(&beside, CU_STREAM_NON_BLOCKING);
    std::thread pauser{[this] { pausing->now_and_then(number_in("PAUSES", 100)); }};
    sluice::nccl_shim::testing::exchange(
        {rank, ranks, all, other, where, beside,
         [&] {
           pauser.join();
           synchronise();
           driver<decltype(&cuStreamSynchronize)>("cuStreamSynchronize")(beside);
         }},
        number_in("ROUNDS", 2000));
    report("left", left_error());
  }

  /// One of the ranks dies after a while, if that is asked for. As PyTorch's watchdog does, a thread asks
  /// for errors, of all communicators, and aborts them.
  void die_some_time() const {
    int const after_us = number_in("DIES_AFTER_US", 0);
    if (number_in("DIES", -1) == rank) {
      std::ofstream{file + ".dies"} << ::getpid() << std::endl;  // whoever stops it has to end it
      std::thread{[after_us] {
        std::this_thread::sleep_for(std::chrono::microseconds{after_us});
        ::kill(::getpid(), number_in("DIES_BY", SIGKILL));
      }}.detach();
    }
    std::thread{[this] {
      auto communicators = parts;
      communicators.push_back(all);
      int error = 0;
      while (error == 0) {
        std::this_thread::sleep_for(1ms);
        for (ncclComm* const each : communicators) {
          int own = 0;
          report("ask", ncclCommGetAsyncError(each, &own));
          error = own != 0 ? own : error;
        }
      }
      for (ncclComm* const each : communicators) {
        report("abort", ncclCommAbort(each));
      }
    }}.detach();
  }

  /// Works and pauses until another rank has died.
  void deaths() const {
    die_some_time();
    std::thread{[this] {
      for (std::minstd_rand random{static_cast<unsigned>(rank + 1)};;) {
        std::this_thread::sleep_for(std::chrono::microseconds{random() % 1000});
        if (gate->close(in(100ms)) == 0) {
          static_cast<void>(gate->wait_idle(in(100ms)));
          gate->open();
        }
      }
    }}.detach();
    static std::array<int, sluice::fake_nccl::most_collectives> from{};
    static std::array<int, sluice::fake_nccl::most_collectives> to{};
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (int const result = reduce(from.at(i), to.at(i)); result != 0) {
        std::printf("ended with %d\n", result);
        return;
      }
      std::this_thread::sleep_for(50us);
    }
    std::printf("nobody has died\n");
  }

  void group() const {
    std::array<int, 3> from{rank, 10 + rank, 100 + rank};
    std::array<int, 3> to{};
    ncclGroupStart();
    ncclGroupStart();
    report("first", reduce(from[0], to[0]));
    report("second", reduce(from[1], to[1]));
    report("inner end", ncclGroupEnd());
    report("third", reduce(from[2], to[2]));
    report("end", ncclGroupEnd());
    synchronise();
    std::printf("%d %d %d\n", to[0], to[1], to[2]);
  }

  /// A communicator is made in an inner group, which NCCL has to see from there on.
  void split_in_group() const {
    ncclComm* child = nullptr;
    int from = rank + 1;
    std::array<int, 2> to{};
    report("start", ncclGroupStart());
    report("inner start", ncclGroupStart());
    report("before", reduce(from, to[0]));
    report("split", ncclCommSplit(all, 0, rank, &child, nullptr));
    report("inner end", ncclGroupEnd());
    report("after", reduce(from, to[1]));
    report("end", ncclGroupEnd());
    report("child", ncclAllReduce(&from, &to[0], 1, 2, 0, child, where));
    synchronise();
    std::printf("%d %d\n", to[0], to[1]);
  }

  void split() const {
    ncclComm* child = nullptr;
    report("split", ncclCommSplit(all, 0, rank, &child, nullptr));
    int from = rank + 1;
    std::array<int, 2> to{};
    report("child", ncclAllReduce(&from, &to[0], 1, 2, 0, child, where));
    report("parent", reduce(from, to[1]));
    synchronise();
    report("destroy", ncclCommDestroy(child));
    std::printf("%d %d\n", to[0], to[1]);
  }

  /// A call whose result comes now or later.
  void call_that_fails(std::size_t count) const {
    int from = 1;
    int to = 0;
    int const now = reduce(from, to, count);
    int later = left_error();
    for (auto const until = in(patience());
         now == 0 && later == 0 && number_in("AWAIT_ERROR", 0) != 0 && in(0s) < until;) {
      std::this_thread::yield();
      later = left_error();
    }
    std::printf("failed with %d\n", now != 0 ? now : later);
  }

  /// The other rank does not live to take part in what this one has launched already, so that its device comes to
  /// nothing of what lies behind that; not even by way of the gate's thread, which keeps close to it.
  void abort_beside_a_device_that_hangs() const {
    auto const until = in(patience());
    if (rank == 1) {
      while (pausing->came() == 0 && in(0s) < until) {
        std::this_thread::yield();
      }
      ::_exit(0);
    }
    static std::array<int, 4096> from{};
    static std::array<int, 4096> to{};
    CUdeviceptr memory = 0;
    driver<decltype(&cuMemAlloc)>("cuMemAlloc_v2")(&memory, 64);
    std::thread{[this, memory] {
      CUcontext context = nullptr;
      driver<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&context, 0);
      driver<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(context);
      for (std::size_t i = 0; i < from.size() && reduce(from.at(i), to.at(i)) == 0; ++i) {
        driver<decltype(&cuMemsetD8Async)>("cuMemsetD8Async")(memory, 0, 64, where);
      }
    }}.detach();
    while (gate->launches() < 2 && in(0s) < until) {
      std::this_thread::yield();
    }
    pausing->come();
    int error = 0;
    while (error == 0 && in(0s) < until) {
      report("ask", ncclCommGetAsyncError(all, &error));
      std::this_thread::yield();
    }
    std::printf("failed with %d\n", error);
    std::fflush(stdout);
    report("abort", ncclCommAbort(all));
    std::printf("aborted\n");
  }

  /// A communicator is made between a send and its receive: whoever makes it waits for what was left before.
  void send_before_a_split() const {
    ncclComm* child = nullptr;
    int number = 7;
    if (rank == 0) {
      report("send", ncclSend(&number, 1, 2, 1, all, where));
    }
    report("split", ncclCommSplit(all, 0, rank, &child, nullptr));
    if (rank == 1) {
      number = 0;
      report("receive", ncclRecv(&number, 1, 2, 0, all, where));
    }
    synchronise();
    std::printf("%d\n", number);
  }

  /// The other rank does not live to send.
  void receive_from_the_dead() const {
    if (rank == 1) {
      ::_exit(0);
    }
    int to = 0;
    int const now = ncclRecv(&to, 1, 2, 1, all, where);
    std::printf("failed with %d\n", now != 0 ? now : left_error());
  }

  /// Memory of the pool, and other memory.
  void registration() const {
    auto* const runtime = ::dlopen(std::getenv("SLUICE_RUNTIME_LIBRARY"), RTLD_NOW | RTLD_NOLOAD);
    reinterpret_cast<decltype(&test_runtime_serve)>(::dlsym(runtime, "test_runtime_serve"))(64, 64);
    CUdeviceptr pool = 0;
    driver<decltype(&cuMemAlloc)>("cuMemAlloc_v2")(&pool, 64);
    int own = 0;
    for (void* const buffer : {reinterpret_cast<void*>(pool), static_cast<void*>(&own)}) {
      void* handle = this->where;
      report("register", ncclCommRegister(all, buffer, 64, &handle));
      std::printf("%s\n", handle == buffer    ? "registered"
                          : handle == nullptr ? "not registered"
                                              : "?");
      report("deregister", ncclCommDeregister(all, handle));
    }
  }

  /// Those that this rank adds up numbers with in its micro-batches: all, and parts of them, if that is asked for.
  [[nodiscard]] std::vector<sluice::nccl_shim::testing::adders> adding() {
    std::vector<sluice::nccl_shim::testing::adders> with;
    if (number_in("SEVERAL", 0) != 0) {
      auto made = sluice::nccl_shim::testing::parts_of_job(rank, ranks, file, where);
      with = std::move(made.with);
      parts = std::move(made.communicators);
      if (number_in("UNTOLD", 0) == 0) {
        report("end", gate->agreement()->end_with(all) == 1 ? 0 : 1);
      }
    }
    std::vector<int> everybody(static_cast<std::size_t>(ranks));
    std::iota(everybody.begin(), everybody.end(), 0);
    with.push_back({0, everybody, [this](int& from, int& to) { return reduce(from, to); }});
    return with;
  }

  void run(std::string const& scenario) {
    set_up();
    if (scenario == "pauses") {
      pauses();
    } else if (scenario == "exchanges") {
      exchanges();
    } else if (scenario == "abort") {
      abort_beside_a_device_that_hangs();
    } else if (scenario == "send before split") {
      send_before_a_split();
    } else if (scenario == "receive") {
      receive_from_the_dead();
    } else if (scenario == "deaths") {
      deaths();
    } else if (scenario == "group") {
      group();
    } else if (scenario == "split in group") {
      split_in_group();
    } else if (scenario == "far ahead") {
      far_ahead();
    } else if (scenario == "split") {
      split();
    } else if (scenario == "differ") {
      call_that_fails(rank == 0 ? 8 : 9);
    } else if (scenario == "registration") {
      registration();
    } else if (scenario == "fail") {
      call_that_fails(sluice::fake_nccl::failing_count);
    } else if (scenario == "death") {
      if (rank == 1) {
        ::_exit(0);
      }
      call_that_fails(1);
    } else if (scenario == "together") {
      auto with = adding();
      die_some_time();
      sluice::nccl_shim::testing::train_together(
          {gate, rank, patience(), std::move(with), number_in("SEVERAL", 0) != 0 ? 2 : 5,
           number_in("LOSES_MEMORY", 1) != 0, [this] { synchronise(); }},
          number_in("MICRO_BATCHES", 60), number_in("SECRETLY", 0) != 0);
    } else if (scenario == "expendable") {
      gate->expendable_thread(1);
      call_that_fails(1);
    } else {
      throw std::runtime_error{"no scenario " + scenario};
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    return 2;
  }
  try {
    static rank_of_job self;  // detached threads look at it until the process ends
    self.rank = std::atoi(argv[2]);
    self.ranks = std::atoi(argv[3]);
    self.file = argv[4];
    self.run(argv[1]);
  } catch (std::exception const& failure) {
    std::printf("%s\n", failure.what());
    return 1;
  }
  std::fflush(nullptr);
  ::_exit(0);  // streams' threads of the fake driver may run on
}
