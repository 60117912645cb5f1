#include "memhandover/device/content_hash.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <deque>
#include <string_view>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {

// A warp's threads meet in `reduce`: the shuffles name all of them, so blocks have whole warps. Then
// the first warp adds up what the block's warps have, since what all blocks add to is one place. The
// last block to arrive takes the sums, which leaves zero for the next launch.
char const* const content_hash_ptx = R"ptx(
.version 6.0
.target sm_70
.address_size 64

.global .align 8 .u64 sums[4];

.visible .entry content_hash(
  .param .u64 base,
  .param .u64 words,
  .param .u64 result)
.maxntid 1024, 1, 1
{
  .reg .pred %more, %lane, %early;
  .reg .b32 %lo, %hi, %t, %n;
  .reg .b64 %p, %end, %out, %i, %step, %x, %y, %k, %s, %m, %f;
  .reg .b64 %k1, %k2, %s1, %s2;
  .reg .b64 %a, %b, %o, %v;
  .reg .pred %first, %within;
  .shared .align 8 .u64 parts[96];  // three of each warp

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
  // k1 = i * K1, k2 = i * K2
  mul.lo.u64 %k1, %i, 0x9E3779B97F4A7C15;
  mul.lo.u64 %s1, %step, 0x9E3779B97F4A7C15;
  mul.lo.u64 %k2, %i, 0xC2B2AE3D27D4EB4F;
  mul.lo.u64 %s2, %step, 0xC2B2AE3D27D4EB4F;
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
  // m = mix(x + k1)
  add.u64 %m, %x, %k1;
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
  // b += mix(m ^ (f + k2))
  add.u64 %f, %f, %k2;
  xor.b64 %f, %f, %m;
  shr.u64 %s, %f, 32;
  xor.b64 %f, %f, %s;
  mul.lo.u64 %f, %f, 0xD6E8FEB86659FD93;
  shr.u64 %s, %f, 29;
  xor.b64 %f, %f, %s;
  add.u64 %b, %b, %f;
  add.u64 %i, %i, %step;
  add.u64 %k1, %k1, %s1;
  add.u64 %k2, %k2, %s2;
  bra next_word;

reduce:
  // of each warp, then of the warps' sums
  setp.eq.u32 %first, 0, 0;
next_sum:
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
  @!%first bra all;

  mov.u32 %lo, parts;
  shr.u32 %n, %t, 5;
  mad.lo.u32 %hi, %n, 24, %lo;
  and.b32 %n, %t, 31;
  setp.ne.u32 %lane, %n, 0;
  @%lane bra stored;
  st.shared.u64 [%hi], %a;
  st.shared.u64 [%hi + 8], %b;
  st.shared.u64 [%hi + 16], %o;
stored:
  bar.sync 0;
  setp.ge.u32 %lane, %t, 32;
  @%lane bra done;
  mov.u64 %a, 0;
  mov.u64 %b, 0;
  mov.u64 %o, 0;
  mov.u32 %n, %ntid.x;
  shr.u32 %n, %n, 5;
  mad.lo.u32 %hi, %t, 24, %lo;
  setp.lt.u32 %within, %t, %n;
  @%within ld.shared.u64 %a, [%hi];
  @%within ld.shared.u64 %b, [%hi + 8];
  @%within ld.shared.u64 %o, [%hi + 16];
  setp.ne.u32 %first, 0, 0;
  bra next_sum;

all:
  setp.ne.u32 %lane, %t, 0;
  @%lane bra done;
  mov.u64 %p, sums;
  red.global.add.u64 [%p], %a;
  red.global.add.u64 [%p + 8], %b;
  red.global.or.b64 [%p + 16], %o;
  membar.gl;
  atom.global.add.u64 %v, [%p + 24], 1;
  mov.u32 %n, %nctaid.x;
  cvt.u64.u32 %k, %n;
  add.u64 %v, %v, 1;
  setp.ne.u64 %early, %v, %k;
  @%early bra done;
  membar.gl;
  atom.global.exch.b64 %a, [%p], 0;
  atom.global.exch.b64 %b, [%p + 8], 0;
  atom.global.exch.b64 %o, [%p + 16], 0;
  atom.global.exch.b64 %v, [%p + 24], 0;
  st.global.u64 [%out], %a;
  st.global.u64 [%out + 8], %b;
  st.global.u64 [%out + 16], %o;
  membar.sys;
done:
  ret;
}
)ptx";

namespace {

void expect_sound(content_hasher const& hasher, std::byte const* chunk, std::size_t bytes) {
  if (!hasher.available()) {
    throw error{error_kind::unsupported, hasher.refusal()};
  }
  if (bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(chunk) % 16 != 0) {
    throw error{error_kind::invalid_argument,
                "what is hashed has an address and a size that are multiples of 16"};
  }
  if (!hasher.room()) {
    throw error{error_kind::invalid_argument, "all places for hashes in flight are in use"};
  }
}

class host_hasher final : public content_hasher {
 public:
  [[nodiscard]] std::string const& refusal() const noexcept override { return refusal_; }
  void begin(std::byte const* chunk, std::size_t bytes) override {
    expect_sound(*this, chunk, bytes);
    hashes_.push_back(hash_contents({chunk, bytes}));
  }
  std::optional<content_hash> poll() override {
    if (hashes_.empty()) {
      return std::nullopt;
    }
    auto const hash = hashes_.front();
    hashes_.pop_front();
    return hash;
  }
  void abandon() noexcept override { hashes_.clear(); }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return hashes_.size(); }

 private:
  std::string const refusal_;
  std::deque<content_hash> hashes_;
};

class cuda_hasher final : public content_hasher {
 public:
  explicit cuda_hasher(std::shared_ptr<cuda_driver const> driver) : driver_(std::move(driver)) {
    relaxed_capture const relaxed{*driver_};
    try {
      driver_->expect(driver_part::hashing, without);
      make();
    } catch (error const& why) {
      refusal_ = why.what();
      spdlog::warn("all contents count as changed reason=\"{}\"", refusal_);
      release();
    }
  }
  cuda_hasher(cuda_hasher const&) = delete;
  cuda_hasher& operator=(cuda_hasher const&) = delete;
  ~cuda_hasher() override {
    abandon();
    relaxed_capture const relaxed{*driver_};
    release();
  }

  [[nodiscard]] std::string const& refusal() const noexcept override { return refusal_; }

  void begin(std::byte const* chunk, std::size_t bytes) override {
    expect_sound(*this, chunk, bytes);
    relaxed_capture const relaxed{*driver_};
    auto const place = (oldest_ + in_flight_) % window;
    auto result = launch(reinterpret_cast<CUdeviceptr>(chunk), bytes / 16, &results_[place]);
    if (result == CUDA_SUCCESS) {
      result = driver_->cuEventRecord(events_[place], stream_);
    }
    give_up_unless(result);
    ++in_flight_;
  }

  std::optional<content_hash> poll() override {
    if (in_flight_ == 0) {
      return std::nullopt;
    }
    relaxed_capture const relaxed{*driver_};
    auto const result = driver_->cuEventQuery(events_[oldest_]);
    if (result == CUDA_ERROR_NOT_READY) {
      return std::nullopt;
    }
    give_up_unless(result);
    auto const hash = results_[oldest_];
    oldest_ = (oldest_ + 1) % window;
    --in_flight_;
    return hash;
  }

  void abandon() noexcept override {
    if (in_flight_ > 0) {
      relaxed_capture const relaxed{*driver_};
      (void)driver_->finish(stream_);
      in_flight_ = 0;
    }
  }

  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }

 private:
  static constexpr std::string_view without = "clean and zero chunks are not found";

  void make() {
    driver_->check(driver_->cuModuleLoadData(&module_, content_hash_ptx), without,
                   ": the driver does not load their kernel");
    driver_->check(driver_->cuModuleGetFunction(&kernel_, module_, "content_hash"), without);
    driver_->check(driver_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                   without);
    for (auto& event : events_) {
      driver_->check(driver_->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), without);
    }
    void* results = nullptr;
    driver_->check(driver_->cuMemHostAlloc(&results, window * sizeof(content_hash),
                                           CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                   without);
    results_ = static_cast<content_hash*>(results);
  }

  /// The address of pinned memory is the same on the device.
  [[nodiscard]] CUresult launch(CUdeviceptr base, std::uint64_t words, content_hash* to) const {
    constexpr std::uint64_t most_blocks = 264;
    constexpr unsigned threads = 1024;
    auto result = reinterpret_cast<CUdeviceptr>(to);
    void* parameters[] = {&base, &words, &result};
    auto const blocks = std::clamp<std::uint64_t>(words / threads, 1, most_blocks);
    return driver_->cuLaunchKernel(kernel_, static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, 0,
                                   stream_, parameters, nullptr);
  }

  void give_up_unless(CUresult result) {
    if (result != CUDA_SUCCESS) {
      (void)driver_->finish(stream_);  // no kernel outlives the caller's hold on its chunk
      in_flight_ = 0;
      driver_->check(result, "cannot hash a chunk");
    }
  }

  void release() noexcept {
    if (results_ != nullptr) {
      driver_->cuMemFreeHost(std::exchange(results_, nullptr));
    }
    for (auto& event : events_) {
      if (event != nullptr) {
        driver_->cuEventDestroy(std::exchange(event, nullptr));
      }
    }
    if (stream_ != nullptr) {
      driver_->cuStreamDestroy(std::exchange(stream_, nullptr));
    }
    if (module_ != nullptr) {
      driver_->cuModuleUnload(std::exchange(module_, nullptr));
    }
  }

  std::shared_ptr<cuda_driver const> driver_;
  std::string refusal_;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  CUstream stream_ = nullptr;
  content_hash* results_ = nullptr;       ///< of each place, pinned
  std::array<CUevent, window> events_{};  ///< of each place
  std::size_t oldest_ = 0;
  std::size_t in_flight_ = 0;
};

}  // namespace

std::unique_ptr<content_hasher> open_content_hasher(std::shared_ptr<cuda_driver const> driver) {
  if (driver == nullptr) {
    return std::make_unique<host_hasher>();
  }
  return std::make_unique<cuda_hasher>(std::move(driver));
}

}  // namespace sluice::memhandover
