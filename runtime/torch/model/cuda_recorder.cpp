/// CUDA graphs of torch's launches. A library of its own (libsluice_torch_graph.so), since the executor is
/// built for a torch with and without CUDA.
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/torch/model/detail/launch_recorder.hpp"

namespace sluice::server::detail {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

void check(cudaError_t result, char const* doing) {
  if (result != cudaSuccess) {
    (void)::cudaGetLastError();  // it is told here
    throw std::runtime_error{std::string{doing} + ": " + ::cudaGetErrorString(result)};
  }
}

struct graph_deleter {
  void operator()(cudaGraph_t graph) const noexcept { (void)::cudaGraphDestroy(graph); }
};
using owned_graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, graph_deleter>;

/// Whether its bytes are on the device before and after.
bool stays_on_device(cudaGraphNode_t copy) {
  cudaMemcpy3DParms params{};
  check(::cudaGraphMemcpyNodeGetParams(copy, &params), "looking at a copy");
  auto const is_there = [](void const* address) {
    cudaPointerAttributes of{};
    return ::cudaPointerGetAttributes(&of, address) == cudaSuccess &&
           of.type == cudaMemoryTypeDevice;
  };
  return params.srcArray == nullptr && params.dstArray == nullptr && is_there(params.srcPtr.ptr) &&
         is_there(params.dstPtr.ptr);
}

/// Throws unless launches alone repeat it: memory of the host may hold something else by then.
void check_nodes(cudaGraph_t graph) {
  std::size_t count = 0;
  check(::cudaGraphGetNodes(graph, nullptr, &count), "looking at what was recorded");
  std::vector<cudaGraphNode_t> nodes(count);
  check(::cudaGraphGetNodes(graph, nodes.data(), &count), "looking at what was recorded");
  for (auto* const node : nodes) {
    cudaGraphNodeType type{};
    check(::cudaGraphNodeGetType(node, &type), "looking at what was recorded");
    switch (type) {
      case cudaGraphNodeTypeKernel:
      case cudaGraphNodeTypeMemset:
      case cudaGraphNodeTypeEmpty:
        break;
      case cudaGraphNodeTypeMemcpy:
        if (!stays_on_device(node)) {
          throw std::runtime_error{"it copies between the device and the host"};
        }
        break;
      default:
        throw std::runtime_error{"it has the device do more than kernels and copies"};
    }
  }
}

class cuda_recording final : public recording {
 public:
  cuda_recording(cudaGraph_t graph, c10::cuda::CUDAStream stream) : stream_{stream} {
    check(::cudaGraphInstantiate(&launches_, graph, 0), "preparing what was recorded");
  }
  ~cuda_recording() override { (void)::cudaGraphExecDestroy(launches_); }
  cuda_recording(cuda_recording const&) = delete;
  cuda_recording& operator=(cuda_recording const&) = delete;

  void replay() override { C10_CUDA_CHECK(::cudaGraphLaunch(launches_, stream_.stream())); }

 private:
  c10::cuda::CUDAStream stream_;
  cudaGraphExec_t launches_ = nullptr;
};

class cuda_recorder final : public launch_recorder {
 public:
  cuda_recorder()
      : device_{c10::cuda::current_device()}, stream_{c10::cuda::getCurrentCUDAStream(device_)} {}

  [[nodiscard]] std::unique_ptr<recording> record(std::function<void()> const& compute) override {
    owned_graph const graph{capture(compute)};
    check_nodes(graph.get());
    return std::make_unique<cuda_recording>(graph.get(), stream_);
  }

 private:
  /// The calling thread's allocations are the pool's as long as it lives.
  class allocating {
   public:
    allocating(c10::DeviceIndex device, c10::MempoolId_t pool) : device_{device}, pool_{pool} {
      caching::beginAllocateToPool(device_, pool_,
                                   [here = std::this_thread::get_id()](cudaStream_t) {
                                     return std::this_thread::get_id() == here;
                                   });
    }
    allocating(allocating const&) = delete;
    allocating& operator=(allocating const&) = delete;
    ~allocating() {
      caching::endAllocateToPool(device_, pool_);
      caching::releasePool(device_, pool_);  // once for each time that it was entered
    }

   private:
    c10::DeviceIndex device_;
    c10::MempoolId_t pool_;
  };

  cudaGraph_t capture(std::function<void()> const& compute) {
    allocating const here{device_, pool_.id()};
    // Other threads may do whatever they do meanwhile.
    check(::cudaStreamBeginCapture(stream_.stream(), cudaStreamCaptureModeThreadLocal),
          "beginning to record");
    std::exception_ptr failure;
    try {
      compute();
    } catch (...) {
      failure = std::current_exception();
    }
    cudaGraph_t graph = nullptr;
    auto const result = ::cudaStreamEndCapture(stream_.stream(), &graph);
    if (failure) {
      (void)::cudaGetLastError();
      owned_graph const unwanted{graph};
      std::rethrow_exception(failure);
    }
    check(result, "recording");
    return graph;
  }

  c10::DeviceIndex device_;
  c10::cuda::CUDAStream stream_;
  at::cuda::MemPool pool_;
};

}  // namespace
}  // namespace sluice::server::detail

/// The caller's; null where the current stream is the one that cannot be recorded.
extern "C" [[gnu::visibility("default")]] sluice::server::detail::launch_recorder*
sluice_torch_launch_recorder() {
  if (c10::cuda::getCurrentCUDAStream() == c10::cuda::getDefaultCUDAStream()) {
    return nullptr;
  }
  return std::make_unique<sluice::server::detail::cuda_recorder>().release();
}
