/// NCCL's functions, as the rest of the process finds them: preloaded, they come before NCCL's own.
///
/// What is not here goes to NCCL directly: it puts no work on a stream, or only beside others' calls
/// (reductions made for one communicator). The launches of functions that are not known pass the
/// gate one by one, like any.
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nccl_shim/calls/communicators.hpp"
#include "nccl_shim/calls/submit.hpp"
#include "nccl_shim/calls/surroundings.hpp"

using namespace sluice::nccl_shim;

#define SLUICE_NCCL_CALL extern "C" __attribute__((visibility("default")))
/// One that most collectives come by.
#define SLUICE_NCCL_HOT_CALL SLUICE_NCCL_CALL __attribute__((hot))

namespace {

/// The group that the calling thread has open.
struct open_group {
  int depth = 0;
  /// Something in it has to be made by NCCL at once, so that NCCL has the group open as well.
  bool given_to_nccl = false;
  std::vector<collective> calls;
  std::vector<communicator*> made;  // by calls in it: there when it has ended
};

open_group& make_group() {
  thread_local open_group one;
  return one;
}

[[gnu::hot]] open_group& group() {
  thread_local constinit open_group* own [[gnu::tls_model("initial-exec")]] = nullptr;
  if (own == nullptr) [[unlikely]] {
    own = &make_group();
  }
  return *own;
}

/// Calls NCCL's function of that name as it is.
template <function_name Name, typename... Arguments>
int pass(Arguments... arguments) {
  auto* const function = real<Name, int(Arguments...)>();
  if (function == nullptr) {
    std::fprintf(stderr, "sluice: there is no NCCL in this process with %s; it needs a newer one\n",
                 Name.text.data());
    return invalid_usage;
  }
  inside_nccl const here;
  return function(arguments...);
}

[[gnu::hot]] int take(collective const& call) {
  if (!is_watching() || group().given_to_nccl) {
    inside_nccl const here;
    return perform(call);
  }
  if (group().depth > 0) {
    group().calls.push_back(call);
    return success;
  }
  return submit({&call, 1});
}

/// What every call about a communicator itself does first: it is made at once, after all that was
/// left before. NCCL gets the open group, if there is one.
int go_straight() {
  if (!is_watching()) {
    return success;
  }
  flush();
  open_group& own = group();
  if (own.depth == 0 || own.given_to_nccl) {
    return success;
  }
  own.given_to_nccl = true;
  int result = success;
  for (int level = 0; level < own.depth && result == success; ++level) {
    result = pass<"ncclGroupStart">();
  }
  inside_nccl const here;
  for (collective const& call : std::exchange(own.calls, {})) {
    result = result == success ? perform(call) : result;
  }
  return result;
}

/// Ends a level of a group that NCCL has, by its function of that name.
template <function_name Name, typename... Arguments>
int end_level(Arguments... arguments) {
  open_group& own = group();
  int const result = pass<Name>(arguments...);
  if (--own.depth == 0) {
    own.given_to_nccl = false;
    for (communicator const* const made : std::exchange(own.made, {})) {
      if (result == success || result == in_progress) {
        enlist(*made, nullptr);
      }
    }
  }
  return result;
}

/// A communicator's configuration, but that its calls return when they are done: else it would be a thread
/// of NCCL's that puts their work on the device, at a time that nobody knows. Whoever asks whether they are
/// done is told so.
class blocking_config {
 public:
  explicit blocking_config(void* given) : used_{given} {
    config_start start{};
    if (given == nullptr || !is_watching()) {
      return;
    }
    std::memcpy(&start, given, sizeof(start));
    if (start.magic != config_magic || start.size < sizeof(start) || start.blocking != 0) {
      return;
    }
    auto const* const bytes = static_cast<std::byte const*>(given);
    own_.assign(bytes, bytes + start.size);
    start.blocking = 1;
    std::memcpy(own_.data(), &start, sizeof(start));
    used_ = own_.data();
  }
  [[nodiscard]] void* get() const noexcept { return used_; }

 private:
  std::vector<std::byte> own_;
  void* used_;
};

/// Whether NCCL must not know the buffer: registered memory is mapped by other ranks, which would keep it,
/// and write to it, when it has changed its owner.
bool changes_owner(void const* buffer) {
  if (!is_watching() || !holds(buffer)) {
    return false;
  }
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true)) {
    std::fputs(
        "sluice: memory of the pool is not registered with NCCL, since it can change its owner: "
        "collectives take NCCL's own buffers instead\n",
        stderr);
  }
  return true;
}

/// Registers a buffer by NCCL's function of that name, or leaves a handle that stands for nothing.
template <function_name Name, typename... More>
int register_buffer(communicator on, void* buffer, std::size_t bytes, void** handle, More... more) {
  if (!changes_owner(buffer)) {
    return pass<Name>(on, buffer, bytes, handle, more...);
  }
  if (handle == nullptr) {
    return invalid_argument;
  }
  *handle = nullptr;
  return success;
}

/// Makes a communicator by `make`; its ranks agree if they can.
template <typename Make>
int initialise(communicator* made, std::optional<std::string> const& key, Make const& make) {
  if (int const failed = go_straight(); failed != success) {
    return failed;
  }
  // In a group it is there only when the group has ended.
  bool const at_once = group().depth == 0;
  auto joined = key && at_once ? join(*key) : nullptr;
  int const result = make();
  if (made == nullptr) {
    return result;
  }
  if (!at_once) {
    group().made.push_back(made);
  } else if (result == success && *made != nullptr) {
    enlist(*made, std::move(joined));
  } else if (result == in_progress) {
    enlist(*made, nullptr);  // who it consists of is not known yet
  }
  return result;
}

}  // namespace

// NOLINTBEGIN(readability-identifier-naming): they are NCCL's

SLUICE_NCCL_HOT_CALL int ncclAllReduce(void const* from, void* to, std::size_t count, int type,
                                       int reduction, communicator on, stream where) {
  return take({operation::all_reduce, from, to, count, type, reduction, 0, on, where});
}

SLUICE_NCCL_HOT_CALL int ncclBroadcast(void const* from, void* to, std::size_t count, int type,
                                       int root, communicator on, stream where) {
  return take({operation::broadcast, from, to, count, type, 0, root, on, where});
}

SLUICE_NCCL_CALL int ncclBcast(void* buffer, std::size_t count, int type, int root, communicator on,
                               stream where) {
  return take({operation::bcast, nullptr, buffer, count, type, 0, root, on, where});
}

SLUICE_NCCL_HOT_CALL int ncclReduce(void const* from, void* to, std::size_t count, int type,
                                    int reduction, int root, communicator on, stream where) {
  return take({operation::reduce, from, to, count, type, reduction, root, on, where});
}

SLUICE_NCCL_HOT_CALL int ncclAllGather(void const* from, void* to, std::size_t count, int type,
                                       communicator on, stream where) {
  return take({operation::all_gather, from, to, count, type, 0, 0, on, where});
}

SLUICE_NCCL_HOT_CALL int ncclReduceScatter(void const* from, void* to, std::size_t count, int type,
                                           int reduction, communicator on, stream where) {
  return take({operation::reduce_scatter, from, to, count, type, reduction, 0, on, where});
}

SLUICE_NCCL_CALL int ncclAlltoAll(void const* from, void* to, std::size_t count, int type,
                                  communicator on, stream where) {
  return take({operation::all_to_all, from, to, count, type, 0, 0, on, where});
}

SLUICE_NCCL_CALL int ncclGather(void const* from, void* to, std::size_t count, int type, int root,
                                communicator on, stream where) {
  return take({operation::gather, from, to, count, type, 0, root, on, where});
}

SLUICE_NCCL_CALL int ncclScatter(void const* from, void* to, std::size_t count, int type, int root,
                                 communicator on, stream where) {
  return take({operation::scatter, from, to, count, type, 0, root, on, where});
}

SLUICE_NCCL_CALL int ncclSend(void const* from, std::size_t count, int type, int peer,
                              communicator on, stream where) {
  return take({operation::send, from, nullptr, count, type, 0, peer, on, where});
}

SLUICE_NCCL_CALL int ncclRecv(void* to, std::size_t count, int type, int peer, communicator on,
                              stream where) {
  return take({operation::receive, nullptr, to, count, type, 0, peer, on, where});
}

SLUICE_NCCL_HOT_CALL int ncclGroupStart() {
  if (!is_watching()) {
    return pass<"ncclGroupStart">();
  }
  ++group().depth;
  return group().given_to_nccl ? pass<"ncclGroupStart">() : int{success};
}

SLUICE_NCCL_HOT_CALL int ncclGroupEnd() {
  open_group& own = group();
  if (!is_watching() || own.depth == 0) {
    return pass<"ncclGroupEnd">();
  }
  if (own.given_to_nccl) {
    return end_level<"ncclGroupEnd">();
  }
  if (--own.depth > 0 || own.calls.empty()) {
    return success;
  }
  int const result = submit(own.calls);
  own.calls.clear();  // and keeps its room: a group for each collective is what PyTorch makes
  return result;
}

SLUICE_NCCL_CALL int ncclGroupSimulateEnd(void* result) {
  if (int const failed = go_straight(); failed != success) {
    return failed;
  }
  return group().given_to_nccl ? end_level<"ncclGroupSimulateEnd">(result)
                               : pass<"ncclGroupSimulateEnd">(result);
}

SLUICE_NCCL_CALL int ncclCommInitRank(communicator* made, int ranks, unique_id id, int rank) {
  auto const make = [&] { return pass<"ncclCommInitRank">(made, ranks, id, rank); };
  return is_watching() ? initialise(made, key_of(id), make) : make();
}

SLUICE_NCCL_CALL int ncclCommInitRankConfig(communicator* made, int ranks, unique_id id, int rank,
                                            void* config) {
  blocking_config const blocking{config};
  auto const make = [&] {
    return pass<"ncclCommInitRankConfig">(made, ranks, id, rank, blocking.get());
  };
  return is_watching() ? initialise(made, key_of(id), make) : make();
}

SLUICE_NCCL_CALL int ncclCommInitRankScalable(communicator* made, int ranks, int rank, int ids,
                                              unique_id* id, void* config) {
  blocking_config const blocking{config};
  auto const make = [&] {
    return pass<"ncclCommInitRankScalable">(made, ranks, rank, ids, id, blocking.get());
  };
  return is_watching() && ids > 0 && id != nullptr ? initialise(made, key_of(*id), make) : make();
}

SLUICE_NCCL_CALL int ncclCommInitAll(communicator* made, int count, int const* devices) {
  if (int const failed = go_straight(); failed != success) {
    return failed;
  }
  int const result = pass<"ncclCommInitAll">(made, count, devices);
  for (int i = 0; is_watching() && result == success && i < count; ++i) {
    enlist(made[i], nullptr);
  }
  return result;
}

SLUICE_NCCL_CALL int ncclCommSplit(communicator parent, int colour, int order, communicator* made,
                                   void* config) {
  blocking_config const blocking{config};
  auto const make = [&] {
    return pass<"ncclCommSplit">(parent, colour, order, made, blocking.get());
  };
  return is_watching() ? initialise(made, key_of_child(parent, colour), make) : make();
}

SLUICE_NCCL_CALL int ncclCommShrink(communicator parent, int* excluded, int count,
                                    communicator* made, void* config, int flags) {
  blocking_config const blocking{config};
  auto const make = [&] {
    return pass<"ncclCommShrink">(parent, excluded, count, made, blocking.get(), flags);
  };
  return is_watching() ? initialise(made, std::nullopt, make) : make();
}

SLUICE_NCCL_CALL int ncclCommFinalize(communicator which) {
  if (int const failed = go_straight(); failed != success) {
    return failed;
  }
  return pass<"ncclCommFinalize">(which);
}

SLUICE_NCCL_CALL int ncclCommDestroy(communicator which) {
  if (int const failed = go_straight(); failed != success) {
    return failed;
  }
  forget(which);
  return pass<"ncclCommDestroy">(which);
}

SLUICE_NCCL_CALL int ncclCommAbort(communicator which) {
  if (is_watching()) {
    give_up(which);
    // Before NCCL can make another one at its address. Who calls it all the same is told so.
    bury(which);
  }
  return pass<"ncclCommAbort">(which);
}

SLUICE_NCCL_CALL int ncclCommRevoke(communicator which, int flags) {
  if (is_watching()) {
    give_up(which);
  }
  return pass<"ncclCommRevoke">(which, flags);
}

SLUICE_NCCL_CALL int ncclCommGetAsyncError(communicator which, int* error) {
  int const result = pass<"ncclCommGetAsyncError">(which, error);
  if (is_watching() && result == success && error != nullptr && *error == success) {
    *error = error_of(which);
  }
  return result;
}

SLUICE_NCCL_CALL int ncclCommRegister(communicator on, void* buffer, std::size_t bytes,
                                      void** handle) {
  return register_buffer<"ncclCommRegister">(on, buffer, bytes, handle);
}

SLUICE_NCCL_CALL int ncclCommDeregister(communicator on, void* handle) {
  return handle == nullptr ? int{success} : pass<"ncclCommDeregister">(on, handle);
}

SLUICE_NCCL_CALL int ncclCommWindowRegister(communicator on, void* buffer, std::size_t bytes,
                                            void** window, int flags) {
  return register_buffer<"ncclCommWindowRegister">(on, buffer, bytes, window, flags);
}

SLUICE_NCCL_CALL int ncclCommWindowDeregister(communicator on, void* window) {
  return window == nullptr ? int{success} : pass<"ncclCommWindowDeregister">(on, window);
}

// NOLINTEND(readability-identifier-naming)
