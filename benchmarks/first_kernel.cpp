#include "benchmarks/first_kernel.hpp"

#include <array>

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

first_kernel::first_kernel(int device) : cuda_(memhandover::cuda_driver::open()) {
  cuda_->check(cuda_->cuDeviceGet(&device_, device), "cannot find the device");
  CUcontext context = nullptr;
  cuda_->check(cuda_->cuDevicePrimaryCtxRetain(&context, device_), "cannot open the device");
  cuda_->check(cuda_->cuCtxSetCurrent(context), "cannot open the device");
  auto const load = bench::driver_function<decltype(&::cuModuleLoadData)>("cuModuleLoadData");
  auto const find = bench::driver_function<decltype(&::cuModuleGetFunction)>("cuModuleGetFunction");
  cuda_->check(load(&module_, touch_ptx), "cannot load a kernel");
  cuda_->check(find(&touch_, module_, "touch"), "cannot load a kernel");
  cuda_->check(cuda_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
               "cannot make a stream");
}

first_kernel::~first_kernel() {
  cuda_->cuStreamDestroy(stream_);
  unload_(module_);
  cuda_->cuDevicePrimaryCtxRelease(device_);
}

void first_kernel::run(std::byte* memory, std::uint64_t bytes, std::uint64_t stride) {
  auto base = reinterpret_cast<std::uint64_t>(memory);
  auto end = base + bytes;
  std::array<void*, 3> parameters{&base, &end, &stride};
  auto const writes = (bytes + stride - 1) / stride;
  auto const blocks = static_cast<unsigned>((writes + threads - 1) / threads);
  cuda_->check(launch_(touch_, blocks, 1, 1, threads, 1, 1, 0, stream_, parameters.data(), nullptr),
               "cannot launch a kernel");
  cuda_->check(cuda_->cuStreamSynchronize(stream_), "cannot wait for a kernel");
}

}  // namespace sluice::benchmarks
