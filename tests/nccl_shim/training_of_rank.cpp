/// What a rank works on while it is paused, loses its memory, or others die.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tests/nccl_shim/exchanges_job.hpp"
#include "tests/nccl_shim/parts_of_job.hpp"
#include "tests/nccl_shim/rank_of_job.hpp"

namespace sluice::nccl_shim::testing {

using namespace std::chrono_literals;

void rank_of_job::pauses() const {
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
  report("wrong", graph_of_reduces::wrong());
  for (int i = 0; i < count; ++i) {
    if (to[static_cast<std::size_t>(i)] != i * ranks * (ranks + 1) / 2) {
      std::printf("sum %d is %d\n", i, to[static_cast<std::size_t>(i)]);
    }
  }
}

void rank_of_job::far_ahead() const {
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

void rank_of_job::exchanges() const {
  ncclComm* other = nullptr;
  CUstream beside = nullptr;
  report("split", ncclCommSplit(all, 0, rank, &other, nullptr));
  driver<decltype(&cuStreamCreate)>("cuStreamCreate")(&beside, CU_STREAM_NON_BLOCKING);
  std::thread pauser{[this] { pausing->now_and_then(number_in("PAUSES", 100)); }};
  exchange({rank, ranks, all, other, where, beside,
            [&] {
              pauser.join();
              synchronise();
              driver<decltype(&cuStreamSynchronize)>("cuStreamSynchronize")(beside);
            }},
           number_in("ROUNDS", 2000));
  report("left", left_error());
}

void rank_of_job::die_some_time() const {
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

void rank_of_job::deaths() const {
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
  std::chrono::microseconds const pace{number_in("PACE_US", 50)};
  static std::array<int, sluice::fake_nccl::most_collectives> from{};
  static std::array<int, sluice::fake_nccl::most_collectives> to{};
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (int const result = reduce(from.at(i), to.at(i)); result != 0) {
      std::printf("ended with %d\n", result);
      return;
    }
    std::this_thread::sleep_for(pace);
  }
  std::printf("nobody has died\n");
}

std::vector<adders> rank_of_job::adding() {
  std::vector<adders> with;
  if (number_in("SEVERAL", 0) != 0) {
    auto made = parts_of_job(rank, ranks, file, where);
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

void rank_of_job::together() {
  auto with = adding();
  die_some_time();
  train_together({gate, rank, patience(), std::move(with), number_in("SEVERAL", 0) != 0 ? 2 : 5,
                  number_in("LOSES_MEMORY", 1) != 0, [this] { synchronise(); }},
                 number_in("MICRO_BATCHES", 60), number_in("SECRETLY", 0) != 0);
}

}  // namespace sluice::nccl_shim::testing
