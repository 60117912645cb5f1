/// Kernel launches, host functions, copies and memsets, stream memory operations.
///
/// Device memory is host memory, so every copy of whole ranges is the same copy. Each call has a
/// variant whose null stream is the calling thread's.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/fake_driver/fake_driver.h"
#include "tests/fake_driver/fake_memory.hpp"
#include "tests/fake_driver/fake_stream.hpp"

using namespace sluice::fake;

namespace {

struct kernel {
  fake_kernel_body body = nullptr;
  std::vector<std::size_t> sizes;
  std::chrono::nanoseconds duration{0};
  std::array<std::atomic<int>, CU_FUNC_ATTRIBUTE_MAX> attributes{};

  /// Where a parameter lies in the buffer of them all: each is aligned to its size, to 8 at most.
  [[nodiscard]] std::size_t offset(std::size_t index) const {
    std::size_t at = 0;
    for (std::size_t i = 0;; at += sizes[i++]) {
      std::size_t const alignment = std::min<std::size_t>(sizes[i] & (~sizes[i] + 1), 8);
      at = (at + alignment - 1) / alignment * alignment;
      if (i == index) {
        return at;
      }
    }
  }
};

struct kernel_list {
  std::mutex lock;
  std::deque<kernel> kernels;  // guarded by lock; never shrinks, its elements are handles
};

kernel* kernel_of(CUfunction handle) {
  return reinterpret_cast<kernel*>(handle);
}

/// The parameters of one launch, copied when it is made.
struct arguments {
  std::vector<std::vector<std::byte>> values;

  static arguments copy(kernel const& of, void** parameters, std::byte const* buffer) {
    arguments made;
    for (std::size_t i = 0; i < of.sizes.size(); ++i) {
      auto const* from =
          buffer != nullptr ? buffer + of.offset(i) : static_cast<std::byte const*>(parameters[i]);
      made.values.emplace_back(from, from + of.sizes[i]);
    }
    return made;
  }
};

/// The buffer of `extra`, or nullptr.
std::byte const* buffer_in(void** extra) {
  for (; extra != nullptr && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) {
      return static_cast<std::byte const*>(extra[1]);
    }
  }
  return nullptr;
}

/// `block` is the number of threads in one, which has the limit of all devices.
CUresult launch(CUfunction handle, unsigned block, CUstream where, bool per_thread,
                void** parameters, void** extra) {
  constexpr unsigned largest_block = 1024;
  kernel const* of = kernel_of(handle);
  std::byte const* const buffer = buffer_in(extra);
  if (of == nullptr || block == 0 || block > largest_block ||
      (!of->sizes.empty() && parameters == nullptr && buffer == nullptr)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return enqueue(where, per_thread,
                 [of, copied = arguments::copy(*of, parameters, buffer)]() mutable {
                   std::this_thread::sleep_for(of->duration);
                   std::vector<void*> pointers;
                   for (auto& value : copied.values) {
                     pointers.push_back(value.data());
                   }
                   if (of->body != nullptr) {
                     of->body(pointers.data());
                   }
                 });
}

void* pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}
void* pointer(void* address) {
  return address;
}
void const* pointer(void const* address) {
  return address;
}

work copy_work(void* to, void const* from, std::size_t bytes) {
  if (is_pageable(from)) {  // the driver stages such memory before it returns
    auto const* start = static_cast<std::byte const*>(from);
    return [to, staged = std::vector<std::byte>{start, start + bytes}] {
      std::memcpy(to, staged.data(), staged.size());
    };
  }
  return [to, from, bytes] { std::memmove(to, from, bytes); };
}

CUresult copy(void* to, void const* from, std::size_t bytes, CUstream where, bool per_thread,
              bool wait) {
  if (bytes == 0) {
    return CUDA_SUCCESS;
  }
  if (to == nullptr || from == nullptr || is_unmapped(to, bytes) || is_unmapped(from, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  work piece = copy_work(to, from, bytes);
  return wait ? enqueue_and_wait(where, per_thread, std::move(piece))
              : enqueue(where, per_thread, std::move(piece));
}

template <typename Element>
CUresult fill(CUdeviceptr to, Element value, std::size_t count, CUstream where, bool per_thread,
              bool wait) {
  if (count == 0) {
    return CUDA_SUCCESS;
  }
  if (to == 0 || to % sizeof(Element) != 0 || is_unmapped(pointer(to), count * sizeof(Element))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  work piece = [to, value, count] {
    auto* first = static_cast<Element*>(pointer(to));
    std::fill(first, first + count, value);
  };
  return wait ? enqueue_and_wait(where, per_thread, std::move(piece))
              : enqueue(where, per_thread, std::move(piece));
}

template <typename Value>
CUresult wait_for_value(CUstream where, bool per_thread, CUdeviceptr address, Value value,
                        unsigned flags) {
  if (address == 0 || (flags & 7U) > CU_STREAM_WAIT_VALUE_EQ) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  return enqueue(where, per_thread, [address, value, flags] {
    auto* word = static_cast<Value*>(pointer(address));
    for (;;) {
      Value const now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      if ((flags & 7U) == CU_STREAM_WAIT_VALUE_EQ ? now == value : now >= value) {
        return;
      }
      std::this_thread::yield();
    }
  });
}

template <typename Value>
CUresult write_value(CUstream where, bool per_thread, CUdeviceptr address, Value value) {
  if (address == 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return enqueue(where, per_thread, [address, value] {
    __atomic_store_n(static_cast<Value*>(pointer(address)), value, __ATOMIC_RELEASE);
  });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void* fake_register_kernel(fake_kernel_body body,
                                                                             size_t const* sizes,
                                                                             size_t count,
                                                                             int64_t nanoseconds) {
  static kernel_list& all = *new kernel_list;  // never freed: streams outlive static objects
  std::lock_guard const guard{all.lock};
  std::vector<std::size_t> parameters(sizes, sizes + count);
  kernel& made = all.kernels.emplace_back();
  made.body = body;
  made.sizes = std::move(parameters);
  made.duration = std::chrono::nanoseconds{nanoseconds};
  return &made;
}

SLUICE_FAKE_CALL CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction f) {
  SLUICE_FAKE_ENTER
  kernel* of = kernel_of(f);
  if (value == nullptr || of == nullptr || which >= CU_FUNC_ATTRIBUTE_MAX) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *value = of->attributes[which];
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) {
  SLUICE_FAKE_ENTER
  kernel* of = kernel_of(f);
  if (of == nullptr || which >= CU_FUNC_ATTRIBUTE_MAX) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  of->attributes[which] = value;
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuFuncGetName(char const** name, CUfunction f) {
  SLUICE_FAKE_ENTER
  if (name == nullptr || kernel_of(f) == nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *name = "_ZN4fake6kernelEPf";
  return CUDA_SUCCESS;
}

SLUICE_FAKE_CALL CUresult cuFuncGetParamInfo(CUfunction f, std::size_t index, std::size_t* offset,
                                             std::size_t* bytes) {
  SLUICE_FAKE_ENTER
  kernel const* of = kernel_of(f);
  if (of == nullptr || index >= of->sizes.size()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *offset = of->offset(index);
  *bytes = of->sizes[index];
  return CUDA_SUCCESS;
}

#define LAUNCHES(suffix, per_thread)                                                             \
  SLUICE_FAKE_CALL CUresult cuLaunchKernel##suffix(                                              \
      CUfunction f, unsigned, unsigned, unsigned, unsigned x, unsigned y, unsigned z, unsigned,  \
      CUstream where, void** parameters, void** extra) {                                         \
    SLUICE_FAKE_ENTER                                                                            \
    return launch(f, x * y * z, where, per_thread, parameters, extra);                           \
  }                                                                                              \
  SLUICE_FAKE_CALL CUresult cuLaunchKernelEx##suffix(CUlaunchConfig const* config, CUfunction f, \
                                                     void** parameters, void** extra) {          \
    SLUICE_FAKE_ENTER                                                                            \
    return config == nullptr                                                                     \
               ? CUDA_ERROR_INVALID_VALUE                                                        \
               : launch(f, config->blockDimX * config->blockDimY * config->blockDimZ,            \
                        config->hStream, per_thread, parameters, extra);                         \
  }                                                                                              \
  SLUICE_FAKE_CALL CUresult cuLaunchCooperativeKernel##suffix(                                   \
      CUfunction f, unsigned, unsigned, unsigned, unsigned x, unsigned y, unsigned z, unsigned,  \
      CUstream where, void** parameters) {                                                       \
    SLUICE_FAKE_ENTER                                                                            \
    return launch(f, x * y * z, where, per_thread, parameters, nullptr);                         \
  }                                                                                              \
  SLUICE_FAKE_CALL CUresult cuLaunchHostFunc##suffix(CUstream where, CUhostFn function,          \
                                                     void* data) {                               \
    SLUICE_FAKE_ENTER                                                                            \
    return enqueue(where, per_thread, [function, data] { function(data); });                     \
  }                                                                                              \
  SLUICE_FAKE_CALL CUresult cuStreamWriteValue32_v2##suffix(CUstream where, CUdeviceptr address, \
                                                            cuuint32_t value, unsigned) {        \
    SLUICE_FAKE_ENTER                                                                            \
    return write_value<std::uint32_t>(where, per_thread, address, value);                        \
  }                                                                                              \
  SLUICE_FAKE_CALL CUresult cuStreamWaitValue32_v2##suffix(CUstream where, CUdeviceptr address,  \
                                                           cuuint32_t value, unsigned flags) {   \
    SLUICE_FAKE_ENTER                                                                            \
    return wait_for_value<std::uint32_t>(where, per_thread, address, value, flags);              \
  }

LAUNCHES(, false)
LAUNCHES(_ptsz, true)

// name, parameters, then where the copy goes to and comes from
#define COPY_AND_WAIT(name, suffix, per_thread, To, From)                       \
  SLUICE_FAKE_CALL CUresult name##suffix(To to, From from, std::size_t bytes) { \
    SLUICE_FAKE_ENTER                                                           \
    return copy(pointer(to), pointer(from), bytes, nullptr, per_thread, true);  \
  }
#define COPY_LATER(name, suffix, per_thread, To, From)                                          \
  SLUICE_FAKE_CALL CUresult name##suffix(To to, From from, std::size_t bytes, CUstream where) { \
    SLUICE_FAKE_ENTER                                                                           \
    return copy(pointer(to), pointer(from), bytes, where, per_thread, false);                   \
  }
#define FILL_AND_WAIT(name, suffix, per_thread, Element)                                     \
  SLUICE_FAKE_CALL CUresult name##suffix(CUdeviceptr to, Element value, std::size_t count) { \
    SLUICE_FAKE_ENTER                                                                        \
    return fill<Element>(to, value, count, nullptr, per_thread, true);                       \
  }
#define FILL_LATER(name, suffix, per_thread, Element)                                      \
  SLUICE_FAKE_CALL CUresult name##suffix(CUdeviceptr to, Element value, std::size_t count, \
                                         CUstream where) {                                 \
    SLUICE_FAKE_ENTER                                                                      \
    return fill<Element>(to, value, count, where, per_thread, false);                      \
  }
#define COPIES(ptds, ptsz, per_thread)                                         \
  COPY_AND_WAIT(cuMemcpyHtoD_v2, ptds, per_thread, CUdeviceptr, void const*)   \
  COPY_AND_WAIT(cuMemcpyDtoH_v2, ptds, per_thread, void*, CUdeviceptr)         \
  COPY_AND_WAIT(cuMemcpyDtoD_v2, ptds, per_thread, CUdeviceptr, CUdeviceptr)   \
  COPY_AND_WAIT(cuMemcpy, ptds, per_thread, CUdeviceptr, CUdeviceptr)          \
  COPY_LATER(cuMemcpyHtoDAsync_v2, ptsz, per_thread, CUdeviceptr, void const*) \
  COPY_LATER(cuMemcpyDtoHAsync_v2, ptsz, per_thread, void*, CUdeviceptr)       \
  COPY_LATER(cuMemcpyDtoDAsync_v2, ptsz, per_thread, CUdeviceptr, CUdeviceptr) \
  COPY_LATER(cuMemcpyAsync, ptsz, per_thread, CUdeviceptr, CUdeviceptr)        \
  FILL_AND_WAIT(cuMemsetD8_v2, ptds, per_thread, unsigned char)                \
  FILL_AND_WAIT(cuMemsetD16_v2, ptds, per_thread, unsigned short)              \
  FILL_AND_WAIT(cuMemsetD32_v2, ptds, per_thread, unsigned int)                \
  FILL_LATER(cuMemsetD8Async, ptsz, per_thread, unsigned char)                 \
  FILL_LATER(cuMemsetD16Async, ptsz, per_thread, unsigned short)               \
  FILL_LATER(cuMemsetD32Async, ptsz, per_thread, unsigned int)

COPIES(, , false)
COPIES(_ptds, _ptsz, true)
