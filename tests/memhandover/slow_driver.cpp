#include "tests/memhandover/slow_driver.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "memhandover/device/content_hash.hpp"

namespace sluice::memhandover {

slow_driver slow;

namespace {

CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
char something;

CUresult counted() {
  auto const call = slow.calls++;
  slow.unrelaxed += mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return call >= slow.fails_at && call - slow.fails_at < slow.failures ? slow.failure
                                                                       : CUDA_SUCCESS;
}

CUresult submitted(std::function<void()> piece) {
  auto const result = counted();
  if (result == CUDA_SUCCESS) {
    slow.work.push_back(std::move(piece));
  }
  return result;
}

template <typename Handle>
CUresult made(Handle* out, int& count) {
  auto const result = counted();
  if (result == CUDA_SUCCESS) {
    *out = reinterpret_cast<Handle>(&something);
    ++count;
  }
  return result;
}

/// How much work there was when the event was recorded.
std::uint64_t* as_number(CUevent event) {
  return reinterpret_cast<std::uint64_t*>(event);
}

void add_streams(cuda_driver& driver) {
  driver.cuStreamCreateWithPriority = [](CUstream* out, unsigned, int) {
    return made(out, slow.streams);
  };
  driver.cuStreamDestroy = [](CUstream) {
    --slow.streams;
    return CUDA_SUCCESS;
  };
  driver.cuStreamSynchronize = [](CUstream) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      slow.run(slow.work.size());
    }
    return result;
  };
  driver.cuThreadExchangeStreamCaptureMode = [](CUstreamCaptureMode* wanted) {
    std::swap(*wanted, mode);
    return CUDA_SUCCESS;
  };
}

void add_events(cuda_driver& driver) {
  driver.cuEventCreate = [](CUevent* out, unsigned) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      *out = reinterpret_cast<CUevent>(std::make_unique<std::uint64_t>(0).release());
      ++slow.events;
    }
    return result;
  };
  driver.cuEventDestroy = [](CUevent event) {
    std::unique_ptr<std::uint64_t> const gone{as_number(event)};
    --slow.events;
    return CUDA_SUCCESS;
  };
  driver.cuEventRecord = [](CUevent event, CUstream) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      *as_number(event) = slow.done + slow.work.size();
    }
    return result;
  };
  driver.cuEventQuery = [](CUevent event) {
    auto const result = counted();
    return result != CUDA_SUCCESS || *as_number(event) <= slow.done ? result : CUDA_ERROR_NOT_READY;
  };
}

void add_copies(cuda_driver& driver) {
  driver.cuMemcpyDtoHAsync = [](void* to, CUdeviceptr from, std::size_t bytes, CUstream) {
    return submitted([=] { std::memcpy(to, reinterpret_cast<void const*>(from), bytes); });
  };
  driver.cuMemcpyHtoDAsync = [](CUdeviceptr to, void const* from, std::size_t bytes, CUstream) {
    return submitted([=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
  };
}

void add_kernel(cuda_driver& driver) {
  driver.cuMemHostAlloc = [](void** out, std::size_t bytes, unsigned) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      *out = ::operator new(bytes);
      ++slow.allocations;
    }
    return result;
  };
  driver.cuMemFreeHost = [](void* where) {
    ::operator delete(where);
    --slow.allocations;
    return CUDA_SUCCESS;
  };
  driver.cuModuleLoadData = [](CUmodule* out, void const*) { return made(out, slow.modules); };
  driver.cuModuleUnload = [](CUmodule) {
    --slow.modules;
    return CUDA_SUCCESS;
  };
  driver.cuModuleGetFunction = [](CUfunction* out, CUmodule, char const*) {
    int functions = 0;
    return made(out, functions);
  };
  driver.cuLaunchKernel = [](CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, CUstream, void** parameters, void**) {
    std::array<std::uint64_t, 3> values{};  // base, words, result
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::memcpy(&values[i], parameters[i], sizeof values[i]);
    }
    return submitted([values] {
      *reinterpret_cast<content_hash*>(values[2]) =
          hash_contents({reinterpret_cast<std::byte const*>(values[0]), values[1] * 16});
    });
  };
}

}  // namespace

void slow_driver::run(std::size_t pieces) {
  for (pieces = std::min(pieces, work.size()); pieces > 0; --pieces) {
    work.front()();
    work.pop_front();
    ++done;
  }
}

std::shared_ptr<cuda_driver> make_slow_driver() {
  slow = {};
  auto driver = std::make_shared<cuda_driver>();
  driver->cuGetErrorString = [](CUresult, char const** text) {
    *text = "failed";
    return CUDA_SUCCESS;
  };
  add_streams(*driver);
  add_events(*driver);
  add_copies(*driver);
  add_kernel(*driver);
  return driver;
}

}  // namespace sluice::memhandover
