/// Calls that a rank makes by themselves.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "tests/backoff.hpp"
#include "tests/nccl_shim/rank_of_job.hpp"
#include "tests/runtime/gate/test_runtime.h"

namespace sluice::nccl_shim::testing {

using namespace std::chrono_literals;

void rank_of_job::group() const {
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

void rank_of_job::split_in_group() const {
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

void rank_of_job::split() const {
  ncclComm* child = nullptr;
  report("split", ncclCommSplit(all, 0, rank, &child, nullptr));
  int from = rank + 1;
  std::array<int, 2> to{};
  report("child", ncclAllReduce(&from, &to[0], 1, 2, 0, child, where));
  report("parent", reduce(from, to[1]));
  synchronise();
  report("destroy", ncclCommDestroy(child));
  int const alone = number_in("ALONE", 0);
  report("others may wait", gate->agreement()->others_may_wait() == alone ? 0 : 1);
  report("destroy the last", ncclCommDestroy(all));
  report("nobody waits", gate->agreement()->others_may_wait() == 0 ? 0 : 1);
  std::printf("%d %d\n", to[0], to[1]);
}

void rank_of_job::call_that_fails(std::size_t count) const {
  int from = 1;
  int to = 0;
  int const now = reduce(from, to, count);
  int later = left_error();
  backoff next_look;
  for (auto const until = in(patience());
       now == 0 && later == 0 && number_in("AWAIT_ERROR", 0) != 0 && in(0s) < until;) {
    next_look.wait();
    later = left_error();
  }
  std::printf("failed with %d\n", now != 0 ? now : later);
}

void rank_of_job::abort_beside_a_device_that_hangs() const {
  auto const until = in(patience());
  if (rank == 1) {
    for (backoff next_look; pausing->came() == 0 && in(0s) < until; next_look.wait()) {
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
  for (backoff next_look; gate->launches() < 2 && in(0s) < until; next_look.wait()) {
  }
  pausing->come();
  int error = 0;
  for (backoff next_look; error == 0 && in(0s) < until; next_look.wait()) {
    report("ask", ncclCommGetAsyncError(all, &error));
  }
  std::printf("failed with %d\n", error);
  std::fflush(stdout);
  report("abort", ncclCommAbort(all));
  std::printf("aborted\n");
}

namespace {

/// Files in which the ranks of a communicator meet, that this process has mapped.
std::ptrdiff_t mapped_meetings() {
  std::ifstream maps{"/proc/self/maps"};
  std::ptrdiff_t found = 0;
  for (std::string line; std::getline(maps, line);) {
    found += line.find("/cut-") != std::string::npos ? 1 : 0;
  }
  return found;
}

}  // namespace

void rank_of_job::go_on_after_aborts() const {
  auto const before = mapped_meetings();
  std::uint32_t round = 0;
  int from = rank + 1;
  static std::array<int, 3> never{};
  for (int& nothing : never) {
    ncclComm* child = nullptr;
    report("split", ncclCommSplit(all, 0, rank, &child, nullptr));
    if (rank == 0) {
      report("child", ncclAllReduce(&from, &nothing, 1, 2, 0, child, where));
    }
    if (!pausing->meet_others(++round)) {
      std::printf("a rank is missing\n");
    }
    report("abort", ncclCommAbort(child));
    int const late = ncclAllReduce(&from, &nothing, 1, 2, 0, child, where);
    if (late != 6) {
      std::printf("what is aborted is called, with %d\n", late);
    }
    synchronise();
    pausing->may_pause(true);
    pausing->may_pause(false);
    // Else one might be asked to catch up with what another calls next.
    if (!pausing->meet_others(++round)) {
      std::printf("a rank is missing\n");
    }
  }
  int sum = 0;
  report("parent", reduce(from, sum));
  synchronise();
  // The last one may still be there: somebody might have been about to call it.
  std::printf("%d, kept %td\n", sum, std::max<std::ptrdiff_t>(0, mapped_meetings() - before - 1));
}

void rank_of_job::send_before_a_split() const {
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

void rank_of_job::receive_from_the_dead() const {
  if (rank == 1) {
    ::_exit(0);
  }
  int to = 0;
  int const now = ncclRecv(&to, 1, 2, 1, all, where);
  std::printf("failed with %d\n", now != 0 ? now : left_error());
}

void rank_of_job::reduce_with_the_dead() const {
  if (rank == 1) {
    ::_exit(0);
  }
  call_that_fails(1);
}

void rank_of_job::call_inside_of_a_micro_batch() const {
  gate->expendable_thread(1);
  call_that_fails(1);
}

void rank_of_job::registration() const {
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

}  // namespace sluice::nccl_shim::testing
