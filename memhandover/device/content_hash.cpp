#include "memhandover/device/content_hash.hpp"

#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {

// A warp's threads meet in `reduce`: the shuffles name all of them, so blocks have whole warps.
char const* const content_hash_ptx = R"ptx(
.version 6.0
.target sm_70
.address_size 64

.visible .entry content_hash(
  .param .u64 base,
  .param .u64 words,
  .param .u64 result)
{
  .reg .pred %more, %lane;
  .reg .b32 %lo, %hi, %t, %n;
  .reg .b64 %p, %end, %out, %i, %step, %x, %y, %k, %s, %m, %f;
  .reg .b64 %a, %b, %o, %v;

  ld.param.u64 %p, [base];
  ld.param.u64 %end, [words];
  ld.param.u64 %out, [result];
  cvta.to.global.u64 %p, %p;
  cvta.to.global.u64 %out, %out;
  mov.u32 %t, %ntid.x;
  mov.u32 %n, %ctaid.x;
  mul.wide.u32 %i, %n, %t;
  mov.u32 %n, %nctaid.x;
  mul.wide.u32 %step, %n, %t;
  mov.u32 %t, %tid.x;
  cvt.u64.u32 %x, %t;
  add.u64 %i, %i, %x;
  mov.u64 %a, 0;
  mov.u64 %b, 0;
  mov.u64 %o, 0;

next_word:
  setp.ge.u64 %more, %i, %end;
  @%more bra reduce;
  shl.b64 %k, %i, 4;
  add.u64 %k, %k, %p;
  ld.global.v2.u64 {%x, %y}, [%k];
  or.b64 %o, %o, %x;
  or.b64 %o, %o, %y;
  // m = mix(x + i * K1)
  mul.lo.u64 %k, %i, 0x9E3779B97F4A7C15;
  add.u64 %m, %x, %k;
  shr.u64 %s, %m, 32;
  xor.b64 %m, %m, %s;
  mul.lo.u64 %m, %m, 0xD6E8FEB86659FD93;
  shr.u64 %s, %m, 29;
  xor.b64 %m, %m, %s;
  // f = mix(m ^ y)
  xor.b64 %f, %m, %y;
  shr.u64 %s, %f, 32;
  xor.b64 %f, %f, %s;
  mul.lo.u64 %f, %f, 0xD6E8FEB86659FD93;
  shr.u64 %s, %f, 29;
  xor.b64 %f, %f, %s;
  add.u64 %a, %a, %f;
  // b += mix(m ^ (f + i * K2))
  mul.lo.u64 %k, %i, 0xC2B2AE3D27D4EB4F;
  add.u64 %f, %f, %k;
  xor.b64 %f, %f, %m;
  shr.u64 %s, %f, 32;
  xor.b64 %f, %f, %s;
  mul.lo.u64 %f, %f, 0xD6E8FEB86659FD93;
  shr.u64 %s, %f, 29;
  xor.b64 %f, %f, %s;
  add.u64 %b, %b, %f;
  add.u64 %i, %i, %step;
  bra next_word;

reduce:
  mov.u32 %n, 16;
next_half:
  mov.b64 {%lo, %hi}, %a;
  shfl.sync.down.b32 %lo, %lo, %n, 31, 0xffffffff;
  shfl.sync.down.b32 %hi, %hi, %n, 31, 0xffffffff;
  mov.b64 %v, {%lo, %hi};
  add.u64 %a, %a, %v;
  mov.b64 {%lo, %hi}, %b;
  shfl.sync.down.b32 %lo, %lo, %n, 31, 0xffffffff;
  shfl.sync.down.b32 %hi, %hi, %n, 31, 0xffffffff;
  mov.b64 %v, {%lo, %hi};
  add.u64 %b, %b, %v;
  mov.b64 {%lo, %hi}, %o;
  shfl.sync.down.b32 %lo, %lo, %n, 31, 0xffffffff;
  shfl.sync.down.b32 %hi, %hi, %n, 31, 0xffffffff;
  mov.b64 %v, {%lo, %hi};
  or.b64 %o, %o, %v;
  shr.u32 %n, %n, 1;
  setp.ne.u32 %more, %n, 0;
  @%more bra next_half;

  mov.u32 %t, %tid.x;
  and.b32 %t, %t, 31;
  setp.ne.u32 %lane, %t, 0;
  @%lane bra done;
  red.global.add.u64 [%out], %a;
  red.global.add.u64 [%out + 8], %b;
  red.global.or.b64 [%out + 16], %o;
done:
  ret;
}
)ptx";

content_hasher::content_hasher(std::shared_ptr<cuda_driver const> driver)
    : driver_(std::move(driver)) {
  try {
    driver_->check(driver_->cuModuleLoadData(&module_, content_hash_ptx),
                   "cannot load the kernel that hashes chunks");
    driver_->check(driver_->cuModuleGetFunction(&kernel_, module_, "content_hash"),
                   "cannot find the kernel that hashes chunks");
    driver_->check(driver_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                   "cannot create a stream");
    driver_->check(driver_->cuMemAlloc(&result_, sizeof(content_hash)),
                   "cannot allocate room for the hash of a chunk");
  } catch (...) {
    release();
    throw;
  }
}

content_hasher::~content_hasher() {
  release();
}

void content_hasher::release() noexcept {
  if (stream_ != nullptr) {
    driver_->cuStreamDestroy(stream_);
  }
  if (result_ != 0) {
    driver_->cuMemFree(result_);
  }
  if (module_ != nullptr) {
    driver_->cuModuleUnload(module_);
  }
}

content_hash content_hasher::hash(std::byte const* where, std::size_t bytes) {
  constexpr unsigned blocks = 1024;
  constexpr unsigned threads = 256;
  auto base = reinterpret_cast<CUdeviceptr>(where);
  std::uint64_t words = bytes / 16;
  void* parameters[] = {&base, &words, &result_};
  driver_->check(driver_->cuMemsetD8Async(result_, 0, sizeof(content_hash), stream_),
                 "cannot hash a chunk");
  driver_->check(driver_->cuLaunchKernel(kernel_, blocks, 1, 1, threads, 1, 1, 0, stream_,
                                         parameters, nullptr),
                 "cannot hash a chunk");
  content_hash result;
  auto const copied = driver_->cuMemcpyDtoHAsync(&result, result_, sizeof result, stream_);
  // Also after a failure: the kernel must not outlive the caller's hold on the chunk.
  auto const done = driver_->cuStreamSynchronize(stream_);
  driver_->check(copied, "cannot read the hash of a chunk");
  driver_->check(done, "cannot hash a chunk");
  return result;
}

}  // namespace sluice::memhandover
