/// Hash and ring over whatever driver is found: the fake one under ctest, a GPU's where this program
/// is started by itself.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "benchmarks/driver_function.hpp"
#include "benchmarks/parking_memory.hpp"
#include "memhandover/device/chunk_transfer.hpp"
#include "memhandover/device/content_hash.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {
namespace {

constexpr std::size_t chunk_bytes = 2U << 20U;
constexpr std::size_t many_bytes = 4 * chunk_bytes;  // more words than the kernel has threads
constexpr std::size_t chunks = content_hasher::window + 1;

class chunk_parts_test : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) {
      GTEST_SKIP() << "needs a CUDA driver";
    }
    driver_ = cuda_driver::open();
    memory_ = std::make_unique<bench::device_chunks>(driver_, chunks, chunk_bytes);
    slots_ = std::make_unique<bench::pinned_pages>(driver_, chunks * chunk_bytes);
    std::mt19937_64 random{11};
    for (std::size_t i = 0; i < contents_.size(); i += sizeof(std::uint64_t)) {
      auto const word = random();
      std::memcpy(contents_.data() + i, &word, sizeof word);
    }
  }

  std::span<std::byte> contents_of(std::size_t chunk, std::size_t bytes = chunk_bytes) {
    return std::span{contents_}.subspan(chunk * chunk_bytes, bytes);
  }
  std::byte* slot(std::size_t chunk) const { return slots_->data() + chunk * chunk_bytes; }

  /// Copies contents of the first chunks in.
  void put(std::size_t bytes) {
    std::memcpy(slot(0), contents_.data(), bytes);
    auto const ring = open_chunk_transfer(driver_);
    for (std::size_t i = 0; i < bytes / chunk_bytes; ++i) {
      ring->in(memory_->at(i), slot(i), chunk_bytes);
    }
    finish(*ring, bytes / chunk_bytes);
  }

  static void finish(chunk_transfer& ring, std::size_t copies) {
    for (std::size_t ended = 0; ended < copies; ended += ring.poll()) {
      std::this_thread::yield();
    }
    EXPECT_EQ(ring.in_flight() + ring.waiting(), 0U);
  }

  content_hash hash(content_hasher& hasher, std::size_t chunk, std::size_t bytes) const {
    hasher.begin(memory_->at(chunk), bytes);
    for (;;) {
      if (auto const said = hasher.poll()) {
        return *said;
      }
      std::this_thread::yield();
    }
  }

  std::shared_ptr<cuda_driver const> driver_;
  std::unique_ptr<bench::device_chunks> memory_;
  std::unique_ptr<bench::pinned_pages> slots_;
  std::vector<std::byte> contents_ = std::vector<std::byte>(chunks * chunk_bytes);
};

TEST_F(chunk_parts_test, what_goes_in_comes_out) {
  put(contents_.size());
  std::memset(slot(0), 0, contents_.size());
  auto const ring = open_chunk_transfer(driver_);
  for (std::size_t i = 0; i < chunks; ++i) {
    ring->out(slot(i), memory_->at(i), chunk_bytes);
  }
  finish(*ring, chunks);
  EXPECT_EQ(std::memcmp(slot(0), contents_.data(), contents_.size()), 0);
}

TEST_F(chunk_parts_test, the_kernel_says_what_its_twin_says) {
  auto const hasher = open_content_hasher(driver_);
  ASSERT_TRUE(hasher->available()) << hasher->refusal();
  for (auto const bit : {std::size_t{0}, std::size_t{63}, std::size_t{64}, 8 * many_bytes - 1}) {
    contents_[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    put(many_bytes);
    for (auto const bytes : {std::size_t{16}, std::size_t{4080}, std::size_t{4096},
                             std::size_t{1'000'000}, chunk_bytes, many_bytes}) {
      EXPECT_EQ(hash(*hasher, 0, bytes), hash_contents(contents_of(0, bytes)))
          << bit << " " << bytes;
    }
  }
}

TEST_F(chunk_parts_test, one_bit_changes_both_halves_of_the_hash) {
  auto const hasher = open_content_hasher(driver_);
  put(many_bytes);
  auto const before = hash(*hasher, 0, many_bytes);
  EXPECT_EQ(hash(*hasher, 0, many_bytes), before);
  contents_[many_bytes - 1] ^= std::byte{1};
  put(many_bytes);
  auto const after = hash(*hasher, 0, many_bytes);
  EXPECT_NE(after.first, before.first);
  EXPECT_NE(after.second, before.second);
}

TEST_F(chunk_parts_test, hashes_in_flight_at_once_do_not_mix) {
  auto const hasher = open_content_hasher(driver_);
  put(contents_.size());
  std::size_t begun = 0;
  for (std::size_t said = 0; said < chunks;) {
    for (; begun < chunks && hasher->room(); ++begun) {
      hasher->begin(memory_->at(begun), chunk_bytes);
    }
    if (auto const hash = hasher->poll()) {
      EXPECT_EQ(*hash, hash_contents(contents_of(said))) << said;
      ++said;
    }
    std::this_thread::yield();
  }
}

TEST_F(chunk_parts_test, the_kernel_finds_zero_chunks) {
  auto const hasher = open_content_hasher(driver_);
  std::ranges::fill(contents_of(0), std::byte{0});
  put(chunk_bytes);
  EXPECT_TRUE(hash(*hasher, 0, chunk_bytes).zero());
  EXPECT_EQ(hash(*hasher, 0, chunk_bytes), hash_contents(contents_of(0)));
  contents_[chunk_bytes - 1] = std::byte{1};
  put(chunk_bytes);
  EXPECT_FALSE(hash(*hasher, 0, chunk_bytes).zero());
}

/// A thread that captures in the mode that forbids most to the others, until it is to end.
class capturing_thread {
 public:
  explicit capturing_thread(cuda_driver const& driver) {
    driver.check(driver.cuCtxGetCurrent(&context_), "context");
    thread_ = std::thread{[this, &driver] {
      CUstream stream = nullptr;
      driver.cuCtxSetCurrent(context_);
      driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0);
      begun_.set_value(bench::driver_function<decltype(&::cuStreamBeginCapture)>(
          "cuStreamBeginCapture_v2")(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
      ends_.get_future().wait();
      CUgraph graph = nullptr;
      ended_ = bench::driver_function<decltype(&::cuStreamEndCapture)>("cuStreamEndCapture")(
          stream, &graph);
      if (graph != nullptr) {
        bench::driver_function<decltype(&::cuGraphDestroy)>("cuGraphDestroy")(graph);
      }
      driver.cuStreamDestroy(stream);
    }};
    EXPECT_EQ(begun_.get_future().get(), CUDA_SUCCESS);
  }

  CUresult end() {
    ends_.set_value();
    thread_.join();
    return ended_;
  }

 private:
  CUcontext context_ = nullptr;
  std::promise<CUresult> begun_;
  std::promise<void> ends_;
  CUresult ended_ = CUDA_ERROR_UNKNOWN;
  std::thread thread_;
};

TEST_F(chunk_parts_test, nothing_breaks_a_capture_of_another_thread) {
  capturing_thread other{*driver_};
  put(contents_.size());
  auto const hasher = open_content_hasher(driver_);
  EXPECT_TRUE(hasher->available()) << hasher->refusal();
  EXPECT_EQ(hash(*hasher, 1, chunk_bytes), hash_contents(contents_of(1)));
  EXPECT_EQ(other.end(), CUDA_SUCCESS);
}

}  // namespace
}  // namespace sluice::memhandover
