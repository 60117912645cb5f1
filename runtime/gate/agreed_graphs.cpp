#include "runtime/gate/agreed_graphs.hpp"

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "runtime/gate/agreed_calls.hpp"
#include "runtime/gate/driver_calls.hpp"

namespace sluice::gate {
namespace {

using content = std::shared_ptr<void>;

/// Of graphs and executables that hold something.
struct known_graphs {
  std::mutex lock;
  std::unordered_map<CUgraph, content> graphs;           // guarded by lock
  std::unordered_map<CUgraphExec, content> executables;  // likewise
};
/// How many those are. Without any a launch asks no further.
constinit std::atomic<std::size_t> holding{0};

known_graphs& the_graphs() {
  static known_graphs& one =
      *std::make_unique<known_graphs>().release();  // calls come until the end
  return one;
}

template <typename Handle>
content find(std::unordered_map<Handle, content> const& in, Handle handle) {
  auto const found = in.find(handle);
  return found != in.end() ? found->second : nullptr;
}

/// From now on the handle stands for something that holds this, or nothing.
template <typename Handle>
void put(std::unordered_map<Handle, content>& in, Handle handle, content const& what) {
  if (what != nullptr) {
    in[handle] = what;
  } else {
    in.erase(handle);
  }
}

/// Changes what is known; nothing while nothing is. `change` is called with the lock held.
template <typename Change>
void change_graphs(bool only_if_any, Change change) noexcept {
  if (only_if_any && holding.load(std::memory_order_acquire) == 0) {
    return;
  }
  known_graphs& all = the_graphs();
  std::lock_guard const guard{all.lock};
  change(all);
  holding.store(all.graphs.size() + all.executables.size(), std::memory_order_release);
}

content content_of(CUgraphExec executable) {
  known_graphs& all = the_graphs();
  std::lock_guard const guard{all.lock};
  return find(all.executables, executable);
}

/// What offers to agree on graphs; nullptr if nobody does.
sluice_agreement const* agreement_on_graphs() noexcept {
  constexpr auto needed = offsetof(sluice_agreement, agree_on_launch) + sizeof(void*);
  sluice_agreement const* const offered = agreement();
  return offered != nullptr && offered->size >= needed ? offered : nullptr;
}

/// What holds both, the one first. Only an agreement has attached anything.
content joined(content const& one, content const& other) {
  if (one == nullptr || other == nullptr) {
    return one == nullptr ? other : one;
  }
  sluice_agreement const* const by = agreement_on_graphs();
  return {by->join(one.get(), other.get()), by->release};
}

/// A launch that is made when all have agreed: now, or by the submitter.
class pending_launch {
 public:
  pending_launch(gated_call const& call, CUgraphExec executable) noexcept
      : call_{call}, executable_{executable} {}

  /// Of the launch, once it has been made.
  [[nodiscard]] CUresult result() const noexcept { return result_; }

  [[nodiscard]] CUresult make() noexcept {
    auto* const launch = real<CUresult (*)(CUgraphExec, CUstream)>(call_.which);
    thread_slot& self = this_thread();
    result_ = launch(executable_, call_.work.stream.handle);
    note_launch(the_gate(), self, call_.work);
    if (submission_queue* const queue = submissions_of_current_context();
        &self != caller_ && queue != nullptr) {
      queue->keep_error(result_);
    }
    return result_;
  }

 private:
  gated_call call_;
  CUgraphExec executable_;
  thread_slot const* caller_ = &this_thread();
  CUresult result_ = CUDA_ERROR_NOT_PERMITTED;  // if it is not made: they will never agree
};

/// It as whoever asks the others sees it; `end` takes its share of it.
sluice_graph_launch as_launch(std::shared_ptr<pending_launch> const& of, CUstream stream) {
  using share = std::shared_ptr<pending_launch>;
  return {.stream = stream,
          .of = std::make_unique<share>(of).release(),
          .make = [](void* it) -> int { return (*static_cast<share*>(it))->make(); },
          .end = [](void* it) { std::unique_ptr<share> const ended{static_cast<share*>(it)}; }};
}

}  // namespace

bool attach_to_capture(CUstream stream, void* held) noexcept {
  sluice_agreement const* const by = agreement_on_graphs();
  if (by == nullptr || !captures_are_under_way()) {
    return false;
  }
  CUgraph const graph = captured_graph({stream, false});
  if (graph != nullptr && held != nullptr) {
    content const more{held, by->release};
    change_graphs(false, [&](known_graphs& all) {
      put(all.graphs, graph, joined(find(all.graphs, graph), more));
    });
  }
  return graph != nullptr;
}

CUgraph captured_graph(stream_use where) noexcept {
  using driver_function = CUresult (*)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*,
                                       CUgraphNode const**, std::size_t*);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUgraph graph = nullptr;
  auto const ask = real<driver_function>(symbol::of_cuStreamGetCaptureInfo_v2);
  bool const known =
      ask(driver::handle_of(where), &status, nullptr, &graph, nullptr, nullptr) == CUDA_SUCCESS;
  return known && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? graph : nullptr;
}

void capture_has_ended(CUgraph before, CUgraph after) noexcept {
  if (before != after) {
    change_graphs(true, [&](known_graphs& all) {
      content const held = find(all.graphs, before);
      all.graphs.erase(before);
      if (after != nullptr) {
        put(all.graphs, after, held);
      }
    });
  }
}

void graph_is_new(CUgraph graph) noexcept {
  graph_goes(graph);
}

void graph_is_copy(CUgraph copy, CUgraph of) noexcept {
  change_graphs(true, [&](known_graphs& all) { put(all.graphs, copy, find(all.graphs, of)); });
}

void graph_gets_child(CUgraph graph, CUgraph child) noexcept {
  change_graphs(true, [&](known_graphs& all) {
    put(all.graphs, graph, joined(find(all.graphs, graph), find(all.graphs, child)));
  });
}

void graph_goes(CUgraph graph) noexcept {
  change_graphs(true, [&](known_graphs& all) { all.graphs.erase(graph); });
}

void executable_is_of(CUgraphExec executable, CUgraph graph) noexcept {
  change_graphs(
      true, [&](known_graphs& all) { put(all.executables, executable, find(all.graphs, graph)); });
}

void executable_goes(CUgraphExec executable) noexcept {
  change_graphs(true, [&](known_graphs& all) { all.executables.erase(executable); });
}

std::optional<CUresult> launch_agreed(gated_call const& call, CUgraphExec executable) {
  if (holding.load(std::memory_order_acquire) == 0 || !takes_part(this_thread())) [[likely]] {
    return std::nullopt;
  }
  content const held = content_of(executable);
  sluice_agreement const* const by = agreement_on_graphs();
  if (held == nullptr || by == nullptr) {
    return std::nullopt;
  }
  if (captures_are_under_way()) {
    if (CUgraph const graph = captured_graph(call.work.stream); graph != nullptr) {
      change_graphs(false, [&](known_graphs& all) {  // it becomes a child of that graph
        put(all.graphs, graph, joined(find(all.graphs, graph), held));
      });
      return std::nullopt;
    }
  }
  CUstream const stream = driver::handle_of(call.work.stream);
  auto const pending = std::make_shared<pending_launch>(call, executable);
  sluice_graph_launch const launch = as_launch(pending, stream);
  sluice_agreed_call agreed{};
  switch (by->agree_on_launch(held.get(), &launch, &agreed)) {
    case SLUICE_GRAPH_AGREED:
      break;
    case SLUICE_GRAPH_REFUSED:
      launch.end(launch.of);
      return CUDA_ERROR_NOT_PERMITTED;
    default:
      launch.end(launch.of);
      return std::nullopt;
  }
  switch (make_agreed(agreed)) {
    case SLUICE_AGREED_MADE:
      return pending->result();
    case SLUICE_AGREED_REFUSED:
      return CUDA_ERROR_NOT_PERMITTED;
    default:
      return CUDA_SUCCESS;  // its error comes later, and what has been dropped succeeds undone
  }
}

}  // namespace sluice::gate
