#include "tests/nccl_shim/fake_nccl.hpp"

#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "abi/gate_api.h"
#include "abi/nccl_abi.hpp"
#include "tests/backoff.hpp"
#include "tests/fake_driver/fake_driver.h"

using namespace sluice::fake_nccl;

#define EXPORTED extern "C" __attribute__((visibility("default")))

struct ncclComm {
  meeting_file* file;
  std::size_t which;
  int rank;
  int ranks;
  std::size_t next;
  std::size_t captured;
  std::size_t children;
  bool connected;
  std::atomic<bool>* aborted;  // never freed: kernels look at it

  [[nodiscard]] ranks_meeting& meeting() const { return file->communicators.at(which); }
};

namespace {

constexpr int unhandled_cuda_error = 1;
constexpr int internal_error = 3;
constexpr int invalid_argument = 4;
constexpr int invalid_usage = 5;
constexpr int remote_error = 6;
constexpr int in_progress = 7;

/// A call in a group, of which NCCL makes one kernel.
struct piece {
  ncclComm* on;
  std::atomic<bool>* aborted;
  std::size_t number;
  std::atomic<std::size_t>*
      runs;  ///< of one in a graph, so far; never freed. nullptr: it runs once
  int const* from;
  int* to;
};

/// The kernel: it stays on the device until all ranks have begun it.
void meet(void** parameters) {
  piece call{};
  std::memcpy(&call, parameters[0], sizeof(call));
  ranks_meeting& at = call.on->meeting();
  if (call.runs != nullptr) {
    call.number += call.runs->fetch_add(1);
  }
  at.sum.at(call.number).fetch_add(*call.from);
  at.begun.at(call.number).fetch_add(1);
  for (sluice::backoff until_all_have;
       at.begun.at(call.number).load() < static_cast<std::uint32_t>(call.on->ranks) &&
       !call.aborted->load();) {
    until_all_have.wait();
  }
  *call.to = static_cast<int>(at.sum.at(call.number).load());
}

/// A send or a receive.
struct transfer {
  channel* over;
  int const* from;         // of a send
  int* to;                 // of a receive
  std::size_t number = 0;  // known when it begins

  /// Whether it is done; else it must be tried again.
  [[nodiscard]] bool advance() const {
    auto& element = over->elements.at(number % buffered_sends);
    if (from != nullptr) {
      if (over->sent.load() != number || over->received.load() + buffered_sends <= number) {
        return false;
      }
      element.store(*from);
      over->sent.store(number + 1);
      return true;
    }
    if (over->received.load() != number || over->sent.load() <= number) {
      return false;
    }
    *to = element.load();
    over->received.store(number + 1);
    return true;
  }
};

/// Those of a group, of which NCCL makes one kernel: they go on beside each other.
struct transfers {
  std::vector<transfer> all;
  std::atomic<bool>* aborted;
  bool is_in_graph;  // begins again and again
};

void move(void** parameters) {
  transfers* given = nullptr;
  std::memcpy(&given, parameters[0], sizeof(given));
  std::vector<transfer> left = given->all;
  auto const* const aborted = given->aborted;
  if (!given->is_in_graph) {
    std::unique_ptr<transfers> const done{given};
  }
  for (auto each = left.begin(); each != left.end(); ++each) {
    auto const before = std::count_if(left.begin(), each, [&](transfer const& other) {
      return other.over == each->over && (other.from == nullptr) == (each->from == nullptr);
    });
    auto const& done = each->from != nullptr ? each->over->sent : each->over->received;
    each->number = done.load() + static_cast<std::size_t>(before);
  }
  for (sluice::backoff until_all_have; !left.empty() && !aborted->load();) {
    std::erase_if(left, [](transfer const& each) { return each.advance(); });
    until_all_have.wait();
  }
}

template <typename Function>
Function of_driver(char const* name) {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(::dlsym(driver, name));
}

/// A kernel with one parameter.
template <typename Parameter>
CUfunction kernel(void (*body)(void** parameters)) {
  static CUfunction const made = [body] {
    auto const table =
        reinterpret_cast<sluice_gate_api const* (*)()>(::dlsym(RTLD_DEFAULT, "sluice_gate_table"));
    auto const make =
        reinterpret_cast<decltype(&fake_register_kernel)>(table()->real("fake_register_kernel"));
    static std::size_t const size = sizeof(Parameter);
    return static_cast<CUfunction>(make(body, &size, 1, 0));
  }();
  return made;
}

template <typename Parameter>
int launch(void (*body)(void** parameters), Parameter parameter, CUstream where) {
  static auto* const launch_kernel = of_driver<decltype(&cuLaunchKernel)>("cuLaunchKernel");
  std::array<void*, 1> parameters{&parameter};
  return launch_kernel(kernel<Parameter>(body), 1, 1, 1, 1, 1, 1, 0, where, parameters.data(),
                       nullptr) == CUDA_SUCCESS
             ? 0
             : unhandled_cuda_error;
}

bool is_capturing(CUstream where) {
  static auto* const ask = of_driver<decltype(&cuStreamIsCapturing)>("cuStreamIsCapturing");
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return ask(where, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/// As NCCL does before the first collective of a kind, in a thread of its own.
void connect(ncclComm& which) {
  if (std::exchange(which.connected, true)) {
    return;
  }
  CUcontext context = nullptr;
  of_driver<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent")(&context);
  std::thread{[context] {
    CUstream own = nullptr;
    CUdeviceptr buffer = 0;
    of_driver<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent")(context);
    of_driver<decltype(&cuStreamCreate)>("cuStreamCreate")(&own, CU_STREAM_NON_BLOCKING);
    of_driver<decltype(&cuMemAlloc)>("cuMemAlloc_v2")(&buffer, 64);
    of_driver<decltype(&cuMemsetD8Async)>("cuMemsetD8Async")(buffer, 0, 64, own);
    of_driver<decltype(&cuStreamSynchronize)>("cuStreamSynchronize")(own);
    of_driver<decltype(&cuMemFree)>("cuMemFree_v2")(buffer);
    of_driver<decltype(&cuStreamDestroy)>("cuStreamDestroy_v2")(own);
  }}.join();
}

thread_local int depth = 0;
/// The sends and receives of the group that is open, of one communicator.
thread_local std::vector<transfer> open_transfers;
thread_local std::atomic<bool>* open_aborted = nullptr;
thread_local CUstream open_where = nullptr;

int launch_transfers(std::vector<transfer> all, std::atomic<bool>* aborted, CUstream where) {
  auto given = std::make_unique<transfers>(transfers{std::move(all), aborted, is_capturing(where)});
  return launch(move, given.release(), where);
}

int take(transfer const& one, ncclComm& on, CUstream where) {
  if (on.aborted->load()) {
    return remote_error;
  }
  connect(on);
  if (depth == 0) {
    return launch_transfers({one}, on.aborted, where);
  }
  open_transfers.push_back(one);
  open_aborted = on.aborted;
  open_where = where;
  return 0;
}

bool is_ready(ncclComm const& which) {
  return which.meeting().entered.load() >= static_cast<std::uint32_t>(which.ranks);
}

/// Enters it; not waiting for the others.
int enter(ncclComm** made, int ranks, unique_id const& id, int rank) {
  int const file = ::open(id.path.data(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ::ftruncate(file, sizeof(meeting_file)) != 0) {
    return internal_error;
  }
  void* const at =
      ::mmap(nullptr, sizeof(meeting_file), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  *made = std::make_unique<ncclComm>(ncclComm{static_cast<meeting_file*>(at), 0, rank, ranks, 0, 0,
                                              0, false,
                                              std::make_unique<std::atomic<bool>>(false).release()})
              .release();
  (*made)->meeting().entered.fetch_add(1);
  return 0;
}

}  // namespace

EXPORTED int ncclCommInitRank(ncclComm** made, int ranks, unique_id id, int rank) {
  int const result = enter(made, ranks, id, rank);
  for (sluice::backoff until_all_have; result == 0 && !is_ready(**made);) {
    until_all_have.wait();
  }
  return result;
}

/// One that does not block returns at once; ncclCommGetAsyncError tells when all are there.
EXPORTED int ncclCommInitRankConfig(ncclComm** made, int ranks, unique_id id, int rank,
                                    sluice::nccl_shim::config_start const* config) {
  if (config->blocking != 0) {
    return ncclCommInitRank(made, ranks, id, rank);
  }
  int const result = enter(made, ranks, id, rank);
  return result == 0 ? in_progress : result;
}

/// The handle is the buffer.
EXPORTED int ncclCommRegister(ncclComm* /*on*/, void* buffer, std::size_t /*bytes*/,
                              void** handle) {
  *handle = buffer;
  return 0;
}

EXPORTED int ncclCommDeregister(ncclComm* /*on*/, void const* handle) {
  return handle != nullptr ? 0 : invalid_argument;
}

/// All ranks have to be of one colour.
EXPORTED int ncclCommSplit(ncclComm* parent, int /*colour*/, int /*order*/, ncclComm** made,
                           void* /*config*/) {
  *made = std::make_unique<ncclComm>(*parent).release();
  (*made)->which = ++parent->children;
  (*made)->next = 0;
  (*made)->captured = 0;
  (*made)->connected = false;
  (*made)->aborted = std::make_unique<std::atomic<bool>>(false).release();
  (*made)->meeting().entered.fetch_add(1);
  for (sluice::backoff until_all_have; !is_ready(**made);) {
    until_all_have.wait();
  }
  return 0;
}

EXPORTED int ncclCommCount(ncclComm const* of, int* count) {
  *count = of->ranks;
  return 0;
}

EXPORTED int ncclCommUserRank(ncclComm const* of, int* rank) {
  *rank = of->rank;
  return 0;
}

EXPORTED int ncclCommGetAsyncError(ncclComm const* of, int* error) {
  *error = is_ready(*of) ? 0 : in_progress;
  return 0;
}

EXPORTED int ncclCommDestroy(ncclComm* which) {
  std::unique_ptr<ncclComm> const gone{which};
  return 0;
}

/// As NCCL's: collectives that are under way end without a result. The communicator is not freed here,
/// since kernels may still use it.
EXPORTED int ncclCommAbort(ncclComm* which) {
  which->aborted->store(true);
  return 0;
}

EXPORTED int ncclGroupStart() {
  ++depth;
  return 0;
}

EXPORTED int ncclGroupEnd() {
  if (depth == 0) {
    return invalid_usage;
  }
  if (--depth > 0 || open_transfers.empty()) {
    return 0;
  }
  return launch_transfers(std::exchange(open_transfers, {}), open_aborted, open_where);
}

EXPORTED int ncclSend(void const* from, std::size_t /*count*/, int /*type*/, int peer, ncclComm* on,
                      CUstream where) {
  auto const to = static_cast<std::size_t>(peer);
  return take({&on->meeting().channels.at(static_cast<std::size_t>(on->rank)).at(to),
               static_cast<int const*>(from), nullptr},
              *on, where);
}

EXPORTED int ncclRecv(void* to, std::size_t /*count*/, int /*type*/, int peer, ncclComm* on,
                      CUstream where) {
  auto const from = static_cast<std::size_t>(peer);
  return take({&on->meeting().channels.at(from).at(static_cast<std::size_t>(on->rank)), nullptr,
               static_cast<int*>(to)},
              *on, where);
}

EXPORTED int ncclAllReduce(void const* from, void* to, std::size_t count, int /*type*/,
                           int /*reduction*/, ncclComm* on, CUstream where) {
  if (count == failing_count) {
    return unhandled_cuda_error;
  }
  if (on->aborted->load()) {
    return remote_error;
  }
  connect(*on);
  piece call{on, on->aborted, 0, nullptr, static_cast<int const*>(from), static_cast<int*>(to)};
  if (is_capturing(where)) {
    call.number = most_collectives + most_runs * on->captured++;
    call.runs = std::make_unique<std::atomic<std::size_t>>(0).release();
  } else {
    call.number = on->next++;
  }
  return launch(meet, call, where);
}
