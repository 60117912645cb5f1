#include "benchmarks/first_kernel.hpp"

#include <dlfcn.h>

#include <array>
#include <string>

#include "memhandover/error.hpp"

namespace sluice::benchmarks {
namespace {

/// Thread i of block b writes one byte at base + (b × 256 + i) × stride, if that is below `end`.
constexpr char const* touch_ptx = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry touch(.param .u64 base, .param .u64 end, .param .u64 stride) {
  .reg .pred %p;
  .reg .b16 %h;
  .reg .b32 %r<4>;
  .reg .b64 %d<6>;
  ld.param.u64 %d0, [base];
  ld.param.u64 %d1, [end];
  ld.param.u64 %d2, [stride];
  mov.u32 %r0, %ctaid.x;
  mov.u32 %r1, %ntid.x;
  mov.u32 %r2, %tid.x;
  mad.lo.s32 %r3, %r0, %r1, %r2;
  cvt.u64.u32 %d3, %r3;
  mad.lo.s64 %d4, %d3, %d2, %d0;
  setp.ge.u64 %p, %d4, %d1;
  @%p ret;
  mov.u16 %h, 90;
  st.global.u8 [%d4], %h;
  ret;
}
)";

constexpr unsigned threads = 256;

}  // namespace

struct first_kernel::functions {
  functions() : library(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library == nullptr) {
      throw error{error_kind::unsupported, std::string{"no CUDA driver: "} + ::dlerror()};
    }
    find("cuInit", init);
    find("cuDeviceGet", get_device);
    find("cuDevicePrimaryCtxRetain", retain);
    find("cuDevicePrimaryCtxRelease_v2", release);
    find("cuCtxSetCurrent", set_current);
    find("cuModuleLoadData", load);
    find("cuModuleUnload", unload);
    find("cuModuleGetFunction", get_function);
    find("cuStreamCreate", create_stream);
    find("cuStreamDestroy_v2", destroy_stream);
    find("cuStreamSynchronize", synchronize);
    find("cuLaunchKernel", launch);
  }
  template <typename Function>
  void find(char const* name, Function& into) {
    into = reinterpret_cast<Function>(::dlsym(library, name));
    if (into == nullptr) {
      throw error{error_kind::unsupported, std::string{"the CUDA driver has no "} + name};
    }
  }
  static functions const& get() {
    static functions const one;
    return one;
  }
  static void check(CUresult result, char const* doing) {
    if (result != CUDA_SUCCESS) {
      throw error{error_kind::internal,
                  std::string{doing} + ": CUDA error " + std::to_string(result)};
    }
  }

  void* library;
  decltype(&cuInit) init = nullptr;
  decltype(&cuDeviceGet) get_device = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&cuDevicePrimaryCtxRelease) release = nullptr;
  decltype(&cuCtxSetCurrent) set_current = nullptr;
  decltype(&cuModuleLoadData) load = nullptr;
  decltype(&cuModuleUnload) unload = nullptr;
  decltype(&cuModuleGetFunction) get_function = nullptr;
  decltype(&cuStreamCreate) create_stream = nullptr;
  decltype(&cuStreamDestroy) destroy_stream = nullptr;
  decltype(&cuStreamSynchronize) synchronize = nullptr;
  decltype(&cuLaunchKernel) launch = nullptr;
};

first_kernel::first_kernel(int device) : cuda_(functions::get()) {
  functions::check(cuda_.init(0), "starting CUDA");
  functions::check(cuda_.get_device(&device_, device), "finding the device");
  CUcontext context = nullptr;
  functions::check(cuda_.retain(&context, device_), "opening the device");
  functions::check(cuda_.set_current(context), "opening the device");
  functions::check(cuda_.load(&module_, touch_ptx), "loading a kernel");
  functions::check(cuda_.get_function(&touch_, module_, "touch"), "loading a kernel");
  functions::check(cuda_.create_stream(&stream_, CU_STREAM_NON_BLOCKING), "making a stream");
}

first_kernel::~first_kernel() {
  cuda_.destroy_stream(stream_);
  cuda_.unload(module_);
  cuda_.release(device_);
}

void first_kernel::run(std::byte* memory, std::uint64_t bytes, std::uint64_t stride) {
  auto base = reinterpret_cast<std::uint64_t>(memory);
  auto end = base + bytes;
  std::array<void*, 3> parameters{&base, &end, &stride};
  auto const writes = (bytes + stride - 1) / stride;
  auto const blocks = static_cast<unsigned>((writes + threads - 1) / threads);
  functions::check(
      cuda_.launch(touch_, blocks, 1, 1, threads, 1, 1, 0, stream_, parameters.data(), nullptr),
      "launching a kernel");
  functions::check(cuda_.synchronize(stream_), "waiting for a kernel");
}

}  // namespace sluice::benchmarks
