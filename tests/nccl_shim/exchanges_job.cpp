#include "tests/nccl_shim/exchanges_job.hpp"
#include "tests/nccl_shim/nccl_calls.hpp"

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <random>
#include <thread>

namespace sluice::nccl_shim::testing {
namespace {

constexpr int of_ints = 2;

/// The numbers that go around, which must stay where they are until all is done.
class traffic {
 public:
  explicit traffic(exchanging const& job) : job_{job} {}

  void next_round() { ++round_; }
  void send(int to, ncclComm* on) {
    numbers_.push_back({number(job_.rank, to), 0});
    report("send", ncclSend(&numbers_.back().value, 1, of_ints, to, on, job_.where));
  }
  void receive(int from, ncclComm* on) {
    numbers_.push_back({0, number(from, job_.rank)});
    report("receive", ncclRecv(&numbers_.back().value, 1, of_ints, from, on, job_.where));
  }
  void reduce(ncclComm* on, CUstream where) {
    numbers_.push_back({round_ * (job_.rank + 1), 0});
    int const& own = numbers_.back().value;
    numbers_.push_back({0, round_ * job_.ranks * (job_.ranks + 1) / 2});
    report("reduce", ncclAllReduce(&own, &numbers_.back().value, 1, of_ints, 0, on, where));
  }
  static void start() { report("start", ncclGroupStart()); }
  static void end() { report("end", ncclGroupEnd()); }

  void check() const {
    for (auto const& each : numbers_) {
      if (each.expected != 0 && each.value != each.expected) {
        std::printf("%d came instead of %d\n", each.value, each.expected);
      }
    }
  }

 private:
  struct one {
    int value;
    int expected;  // of what comes; 0: it goes
  };

  [[nodiscard]] int number(int from, int to) const { return round_ * 100 + from * 10 + to; }
  static void report(char const* what, int result) {
    if (result != 0) {
      std::printf("%s: %d\n", what, result);
    }
  }

  exchanging const& job_;
  int round_ = 0;
  std::deque<one> numbers_;
};

void ring(exchanging const& job, traffic& with) {
  traffic::start();
  with.send((job.rank + 1) % job.ranks, job.all);
  with.receive((job.rank + job.ranks - 1) % job.ranks, job.all);
  traffic::end();
}

void all_to_all(exchanging const& job, traffic& with) {
  traffic::start();
  for (int peer = 0; peer < job.ranks; ++peer) {
    with.send(peer, job.all);
    with.receive(peer, job.all);
  }
  traffic::end();
}

/// The root's is a group, the others' are single calls.
void gather(exchanging const& job, traffic& with, int root) {
  if (job.rank != root) {
    with.send(root, job.all);
    return;
  }
  traffic::start();
  for (int peer = 0; peer < job.ranks; ++peer) {
    if (peer != root) {
      with.receive(peer, job.all);
    }
  }
  traffic::end();
}

/// Only two take part, one after the other.
void hand_on(exchanging const& job, traffic& with) {
  if (job.rank == 0) {
    with.send(1, job.all);
  } else if (job.rank == 1) {
    with.receive(0, job.all);
  }
}

/// Each sends first.
void cross(exchanging const& job, traffic& with) {
  if (job.rank < 2) {
    with.send(1 - job.rank, job.all);
    with.receive(1 - job.rank, job.all);
  }
}

void two_ways(exchanging const& job, traffic& with) {
  int const next = (job.rank + 1) % job.ranks;
  int const last = (job.rank + job.ranks - 1) % job.ranks;
  traffic::start();
  with.send(next, job.all);
  with.receive(last, job.all);
  with.send(last, job.other);
  with.receive(next, job.other);
  traffic::end();
}

/// A send before an all-reduce, and its receive behind that, on another stream.
void around_an_all_reduce(exchanging const& job, traffic& with) {
  if (job.rank == 0) {
    with.send(1, job.all);
  }
  with.reduce(job.other, job.beside);
  if (job.rank == 1) {
    with.receive(0, job.all);
  }
}

/// Collectives of two communicators as one group.
void reduce_twice(exchanging const& job, traffic& with) {
  traffic::start();
  with.reduce(job.all, job.where);
  with.reduce(job.other, job.where);
  traffic::end();
}

/// A collective between a send and a receive, as one group.
void reduce_in_a_ring(exchanging const& job, traffic& with) {
  traffic::start();
  with.send((job.rank + 1) % job.ranks, job.all);
  with.reduce(job.all, job.where);
  with.receive((job.rank + job.ranks - 1) % job.ranks, job.all);
  traffic::end();
}

}  // namespace

void exchange(exchanging const& job, int rounds) {
  std::minstd_rand alike{7};
  std::minstd_rand own{static_cast<unsigned>(job.rank + 1)};
  traffic with{job};
  for (int i = 0; i < rounds; ++i) {
    with.next_round();
    switch (alike() % 20) {
      case 0:
        cross(job, with);
        break;
      case 1:
        around_an_all_reduce(job, with);
        break;
      case 2:
      case 3:
        two_ways(job, with);
        break;
      case 4:
      case 5:
        hand_on(job, with);
        break;
      case 6:
      case 7:
        gather(job, with, static_cast<int>(alike() % static_cast<unsigned>(job.ranks)));
        break;
      case 8:
      case 9:
        with.reduce(job.all, job.where);
        break;
      case 10:
      case 11:
        reduce_twice(job, with);
        break;
      case 12:
      case 13:
        reduce_in_a_ring(job, with);
        break;
      case 14:
      case 15:
      case 16:
        all_to_all(job, with);
        break;
      default:
        ring(job, with);
    }
    if (own() % 8 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds{own() % 500});
    }
  }
  job.synchronise();
  with.check();
}

}  // namespace sluice::nccl_shim::testing
