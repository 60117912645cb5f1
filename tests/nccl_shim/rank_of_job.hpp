/// One rank of a job that knows nothing of Sluice but the gate's table, by which it is paused, and what it may do.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "abi/gate_api.h"
#include "tests/nccl_shim/graph_of_reduces.hpp"
#include "tests/nccl_shim/micro_batches.hpp"
#include "tests/nccl_shim/nccl_calls.hpp"
#include "tests/nccl_shim/pausing.hpp"

namespace sluice::nccl_shim::testing {

/// What it sees it prints.
struct rank_of_job {
  int rank = 0;
  int ranks = 0;
  std::string file;
  CUstream where = nullptr;
  ncclComm* all = nullptr;
  std::vector<ncclComm*> parts;  // of some of the ranks
  sluice_gate_api const* gate = nullptr;
  std::unique_ptr<rank_that_pauses> pausing;
  std::unique_ptr<graph_of_reduces> graph;  // by which it reduces

  template <typename Function>
  static Function driver(char const* name) {
    static void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<Function>(::dlsym(library, name));
  }
  /// Prints an error.
  static void report(char const* what, int result);

  /// As the environment says.
  void set_up();
  [[nodiscard]] int reduce(int& from, int& to, std::size_t count = 1) const;
  void synchronise() const;
  /// The error that the communicator has left, once all that was called has been made.
  [[nodiscard]] int left_error() const;

  // --- work that is disturbed (training_of_rank.cpp) ---

  void pauses() const;
  /// The first has made all its calls before any other makes one.
  void far_ahead() const;
  /// Sends and receives, and pauses.
  void exchanges() const;
  /// Works and pauses until another rank has died.
  void deaths() const;
  /// Micro-batches with collectives inside, which lose their memory.
  void together();

  // --- calls by themselves (calls_of_rank.cpp) ---

  void group() const;
  /// A communicator is made in an inner group, which NCCL has to see from there on.
  void split_in_group() const;
  void split() const;
  /// A call whose result comes now or later.
  void call_that_fails(std::size_t count) const;
  /// The other rank does not live to take part in what this one has launched already, so that its device comes to
  /// nothing of what lies behind that; not even by way of the gate's thread, which keeps close to it.
  void abort_beside_a_device_that_hangs() const;
  /// The first launches what the others never will, of communicators that all abort; then all go on with another.
  void go_on_after_aborts() const;
  /// A communicator is made between a send and its receive: whoever makes it waits for what was left before.
  void send_before_a_split() const;
  /// The other rank does not live to send.
  void receive_from_the_dead() const;
  /// Nor to reduce.
  void reduce_with_the_dead() const;
  void call_inside_of_a_micro_batch() const;
  /// Memory of the pool, and other memory.
  void registration() const;

 private:
  void make_graph();
  /// Records the first or second of the graph's calls.
  [[nodiscard]] int record(int which, int& from, int& to) const;
  /// One of the ranks dies after a while, if that is asked for. As PyTorch's watchdog does, a thread asks
  /// for errors, of all communicators, and aborts them.
  void die_some_time() const;
  /// Those that this rank adds up numbers with in its micro-batches: all, and parts of them, if that is asked for.
  [[nodiscard]] std::vector<adders> adding();
};

}  // namespace sluice::nccl_shim::testing
