#include "tests/nccl_shim/rank_of_job.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "abi/nccl_abi.hpp"

namespace sluice::nccl_shim::testing {

using namespace std::chrono_literals;

void rank_of_job::report(char const* what, int result) {
  if (result != 0) {
    std::printf("%s: %d\n", what, result);
  }
}

void rank_of_job::set_up() {
  CUcontext context = nullptr;
  driver<decltype(&cuInit)>("cuInit")(0);
  driver<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain")(&context, 0);
  driver<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(context);
  driver<decltype(&cuStreamCreate)>("cuStreamCreate")(&where, CU_STREAM_NON_BLOCKING);
  gate =
      reinterpret_cast<sluice_gate_api const* (*)()>(::dlsym(RTLD_DEFAULT, "sluice_gate_table"))();
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

void rank_of_job::make_graph() {
  graph = std::make_unique<graph_of_reduces>(graph_of_reduces_needs{
      gate,
      [](char const* name) {
        return ::dlsym(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), name);
      },
      [this](int which, int& from, int& to) { return record(which, from, to); }, where,
      number_in("GRAPH_SENDS", 0) != 0 ? 1 : ranks});
}

int rank_of_job::record(int which, int& from, int& to) const {
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

int rank_of_job::reduce(int& from, int& to, std::size_t count) const {
  if (graph != nullptr) {
    return graph->reduce(from, to);
  }
  return ncclAllReduce(&from, &to, count, 2, 0, all, where);
}

void rank_of_job::synchronise() const {
  driver<decltype(&cuStreamSynchronize)>("cuStreamSynchronize")(where);
}

int rank_of_job::left_error() const {
  gate->flush();
  int error = 0;
  report("ask", ncclCommGetAsyncError(all, &error));
  return error;
}

}  // namespace sluice::nccl_shim::testing
