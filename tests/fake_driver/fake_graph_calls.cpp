/// Captures and graphs.
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/fake_driver/fake_stream.hpp"

using namespace sluice::fake;

namespace {

graph* graph_of(CUgraph handle) {
  return reinterpret_cast<graph*>(handle);
}
graph* graph_of(CUgraphExec handle) {
  return reinterpret_cast<graph*>(handle);
}

CUresult no_stream() {
  return current_context() == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
}

CUresult capture_status(CUstream handle, bool per_thread, CUstreamCaptureStatus* status,
                        cuuint64_t* id, CUgraph* into) {
  std::shared_ptr<stream> const on = stream_of(handle, per_thread);
  if (on == nullptr) {
    return no_stream();
  }
  std::lock_guard const guard{captures().lock};
  if (on->legacy() && some_blocking_stream_is_captured()) {
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  capture const* const by = on->captured_by.get();
  *status = by == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
            : by->broken  ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                          : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  if (*status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
    if (id != nullptr) {
      *id = by->id;
    }
    if (into != nullptr) {
      *into = reinterpret_cast<CUgraph>(by->into);
    }
  }
  return CUDA_SUCCESS;
}

CUresult begin_capture(CUstream handle, CUstreamCaptureMode mode, bool per_thread,
                       graph* into = nullptr) {
  std::shared_ptr<stream> const on = stream_of(handle, per_thread);
  if (on == nullptr) {
    return no_stream();
  }
  if (on->legacy()) {
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  static std::uint64_t last_id = 0;  // guarded by the lock of all captures
  std::lock_guard const guard{captures().lock};
  if (on->captured_by != nullptr) {
    return CUDA_ERROR_ILLEGAL_STATE;
  }
  on->captured_by = std::make_shared<capture>();
  on->captured_by->mode = mode;
  on->captured_by->thread = std::this_thread::get_id();
  on->captured_by->id = ++last_id;
  on->captured_by->into = into != nullptr ? into : new graph;
  on->captured_by->was_given = into != nullptr;
  captures().active.insert(on->captured_by);
  return CUDA_SUCCESS;
}

CUresult end_capture(CUstream handle, CUgraph* out, bool per_thread) {
  std::shared_ptr<stream> const on = stream_of(handle, per_thread);
  if (on == nullptr) {
    return no_stream();
  }
  std::lock_guard const guard{captures().lock};
  std::shared_ptr<capture> const ended = on->captured_by;
  if (ended == nullptr) {
    return CUDA_ERROR_ILLEGAL_STATE;
  }
  captures().active.erase(ended);
  release_streams_of(*ended);
  if (ended->broken) {
    if (!ended->was_given) {
      delete ended->into;
    }
    *out = nullptr;
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  *out = reinterpret_cast<CUgraph>(ended->into);
  return CUDA_SUCCESS;
}

CUresult instantiate(CUgraphExec* out, CUgraph handle) {
  if (handle == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *out = reinterpret_cast<CUgraphExec>(new graph{*graph_of(handle)});
  return CUDA_SUCCESS;
}

CUresult launch_graph(CUgraphExec handle, CUstream where, bool per_thread) {
  if (handle == nullptr) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  return enqueue(where, per_thread, [pieces = graph_of(handle)->pieces] {
    for (work const& piece : pieces) {
      piece();
    }
  });
}

}  // namespace

SLUICE_FAKE_CALL CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  SLUICE_FAKE_ENTER
  std::swap(*mode, thread_capture_mode());
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  SLUICE_FAKE_ENTER
  return capture_status(handle, false, status, nullptr, nullptr);
}
SLUICE_FAKE_CALL CUresult cuStreamIsCapturing_ptsz(CUstream handle, CUstreamCaptureStatus* status) {
  SLUICE_FAKE_ENTER
  return capture_status(handle, true, status, nullptr, nullptr);
}
SLUICE_FAKE_CALL CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status,
                                                    cuuint64_t* id, CUgraph* into,
                                                    CUgraphNode const** /*dependencies*/,
                                                    size_t* /*count*/) {
  SLUICE_FAKE_ENTER
  return capture_status(handle, false, status, id, into);
}
SLUICE_FAKE_CALL CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  SLUICE_FAKE_ENTER
  return begin_capture(handle, mode, false);
}
SLUICE_FAKE_CALL CUresult cuStreamBeginCapture_v2_ptsz(CUstream handle, CUstreamCaptureMode mode) {
  SLUICE_FAKE_ENTER
  return begin_capture(handle, mode, true);
}
/// What is captured comes after all that the graph has.
SLUICE_FAKE_CALL CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph into,
                                                      CUgraphNode const* /*dependencies*/,
                                                      CUgraphEdgeData const* /*edges*/,
                                                      size_t /*count*/, CUstreamCaptureMode mode) {
  SLUICE_FAKE_ENTER
  return into == nullptr ? CUDA_ERROR_INVALID_VALUE
                         : begin_capture(handle, mode, false, graph_of(into));
}
SLUICE_FAKE_CALL CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  SLUICE_FAKE_ENTER
  return end_capture(handle, out, false);
}
SLUICE_FAKE_CALL CUresult cuStreamEndCapture_ptsz(CUstream handle, CUgraph* out) {
  SLUICE_FAKE_ENTER
  return end_capture(handle, out, true);
}

SLUICE_FAKE_CALL CUresult cuGraphCreate(CUgraph* out, unsigned /*flags*/) {
  SLUICE_FAKE_ENTER
  *out = reinterpret_cast<CUgraph>(new graph);
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuGraphClone(CUgraph* out, CUgraph handle) {
  SLUICE_FAKE_ENTER
  *out = reinterpret_cast<CUgraph>(new graph{*graph_of(handle)});
  return CUDA_SUCCESS;
}
/// The child is copied, and comes after all that the graph has.
SLUICE_FAKE_CALL CUresult cuGraphAddChildGraphNode(CUgraphNode* node, CUgraph handle,
                                                   CUgraphNode const* /*dependencies*/,
                                                   size_t /*count*/, CUgraph child) {
  SLUICE_FAKE_ENTER
  graph& of = *graph_of(handle);
  graph const copy = *graph_of(child);
  of.pieces.insert(of.pieces.end(), copy.pieces.begin(), copy.pieces.end());
  *node = reinterpret_cast<CUgraphNode>(&of);
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuGraphInstantiateWithFlags(CUgraphExec* out, CUgraph handle,
                                                      unsigned long long /*flags*/) {
  SLUICE_FAKE_ENTER
  return instantiate(out, handle);
}
SLUICE_FAKE_CALL CUresult cuGraphInstantiateWithParams(CUgraphExec* out, CUgraph handle,
                                                       CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
  SLUICE_FAKE_ENTER
  parameters->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
  return instantiate(out, handle);
}
/// Only graphs of as much work are alike.
SLUICE_FAKE_CALL CUresult cuGraphExecUpdate_v2(CUgraphExec handle, CUgraph from,
                                               CUgraphExecUpdateResultInfo* result) {
  SLUICE_FAKE_ENTER
  graph& own = *graph_of(handle);
  graph const& other = *graph_of(from);
  bool const alike = own.pieces.size() == other.pieces.size();
  *result = {};
  result->result =
      alike ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
  if (!alike) {
    return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  }
  own = other;
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuGraphLaunch(CUgraphExec handle, CUstream where) {
  SLUICE_FAKE_ENTER
  return launch_graph(handle, where, false);
}
SLUICE_FAKE_CALL CUresult cuGraphLaunch_ptsz(CUgraphExec handle, CUstream where) {
  SLUICE_FAKE_ENTER
  return launch_graph(handle, where, true);
}
SLUICE_FAKE_CALL CUresult cuGraphExecDestroy(CUgraphExec handle) {
  SLUICE_FAKE_ENTER
  delete graph_of(handle);
  return CUDA_SUCCESS;
}
SLUICE_FAKE_CALL CUresult cuGraphDestroy(CUgraph handle) {
  SLUICE_FAKE_ENTER
  delete graph_of(handle);
  return CUDA_SUCCESS;
}
