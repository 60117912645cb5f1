/// Hash and ring over whatever driver is found: the fake one under ctest, a GPU's where this program
/// is started by itself.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "memhandover/device/chunk_transfer.hpp"
#include "memhandover/device/content_hash.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {
namespace {

constexpr std::size_t chunk_bytes = 1U << 20U;

class chunk_parts_test : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "needs a CUDA driver";
    }
    driver_ = cuda_driver::open();
    CUdevice device = 0;
    CUcontext context = nullptr;
    driver_->check(driver_->cuDeviceGet(&device, 0), "device");
    driver_->check(driver_->cuDevicePrimaryCtxRetain(&context, device), "context");
    driver_->check(driver_->cuCtxSetCurrent(context), "context");
    driver_->check(driver_->cuMemAlloc(&memory_, chunks * chunk_bytes), "memory");
    std::mt19937 random{11};
    for (auto& byte : contents_) {
      byte = static_cast<std::byte>(random());
    }
  }
  void TearDown() override {
    if (memory_ != 0) {
      driver_->cuMemFree(memory_);
    }
  }

  std::byte* chunk(std::size_t number) const {
    return reinterpret_cast<std::byte*>(memory_) + number * chunk_bytes;
  }

  /// Copies all of `contents_` in, chunk by chunk.
  void put() {
    move([this](chunk_transfer& ring, std::size_t i) {
      ring.in(chunk(i), contents_.data() + i * chunk_bytes, chunk_bytes);
    });
  }

  template <typename Begin>
  void move(Begin&& begin) {
    auto const ring = open_chunk_transfer(driver_);
    std::size_t ended = 0;
    for (std::size_t begun = 0; ended < chunks;) {
      while (begun < chunks && ring->room()) {
        begin(*ring, begun++);
      }
      ended += ring->poll();
      std::this_thread::yield();
    }
    EXPECT_EQ(ring->in_flight(), 0U);
  }

  static constexpr std::size_t chunks = 3 * chunk_transfer::window;
  std::shared_ptr<cuda_driver const> driver_;
  CUdeviceptr memory_ = 0;
  std::vector<std::byte> contents_ = std::vector<std::byte>(chunks * chunk_bytes);
};

TEST_F(chunk_parts_test, what_goes_in_comes_out) {
  put();
  std::vector<std::byte> back(contents_.size());
  move([&](chunk_transfer& ring, std::size_t i) {
    ring.out(back.data() + i * chunk_bytes, chunk(i), chunk_bytes);
  });
  EXPECT_TRUE(back == contents_);
}

TEST_F(chunk_parts_test, the_kernel_says_what_its_twin_says) {
  content_hasher hasher{driver_};
  for (std::size_t const bit : {0U, 63U, 64U, 8'388'607U}) {
    contents_[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    put();
    for (std::size_t const bytes : {std::size_t{16}, std::size_t{4080}, chunk_bytes}) {
      EXPECT_EQ(hasher.hash(chunk(0), bytes), hash_contents(std::span{contents_}.first(bytes)))
          << bit << " " << bytes;
    }
  }
}

TEST_F(chunk_parts_test, the_kernel_finds_zero_chunks) {
  content_hasher hasher{driver_};
  contents_.assign(contents_.size(), std::byte{0});
  contents_[2 * chunk_bytes - 1] = std::byte{1};
  put();
  EXPECT_TRUE(hasher.hash(chunk(0), chunk_bytes).zero());
  EXPECT_FALSE(hasher.hash(chunk(1), chunk_bytes).zero());
}

}  // namespace
}  // namespace sluice::memhandover
