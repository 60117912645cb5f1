#include "memhandover/device/chunk_transfer.hpp"

#include <array>
#include <cstring>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {
namespace {

void expect_room(chunk_transfer const& ring) {
  if (!ring.room()) {
    throw error{error_kind::invalid_argument, "all places of the ring of copies are in use"};
  }
}

class host_transfer final : public chunk_transfer {
 public:
  void out(std::byte* to, std::byte const* from, std::size_t bytes) override {
    copy(to, from, bytes);
  }
  void in(std::byte* to, std::byte const* from, std::size_t bytes) override {
    copy(to, from, bytes);
  }
  std::size_t poll() override { return std::exchange(uncounted_, 0); }
  void wait() override {}
  [[nodiscard]] std::size_t in_flight() const noexcept override { return uncounted_; }

 private:
  void copy(std::byte* to, std::byte const* from, std::size_t bytes) {
    expect_room(*this);
    std::memcpy(to, from, bytes);
    ++uncounted_;
  }

  std::size_t uncounted_ = 0;
};

class cuda_transfer final : public chunk_transfer {
 public:
  explicit cuda_transfer(std::shared_ptr<cuda_driver const> driver) : driver_(std::move(driver)) {
    try {
      driver_->check(driver_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                     "cannot create a stream");
      for (auto& event : events_) {
        driver_->check(driver_->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING),
                       "cannot create an event");
      }
    } catch (...) {
      release();
      throw;
    }
  }
  cuda_transfer(cuda_transfer const&) = delete;
  cuda_transfer& operator=(cuda_transfer const&) = delete;
  ~cuda_transfer() override { release(); }

  void out(std::byte* to, std::byte const* from, std::size_t bytes) override {
    expect_room(*this);
    begun(driver_->cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream_));
  }
  void in(std::byte* to, std::byte const* from, std::size_t bytes) override {
    expect_room(*this);
    begun(driver_->cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream_));
  }

  std::size_t poll() override {
    std::size_t ended = 0;
    while (in_flight_ > 0) {
      auto const result = driver_->cuEventQuery(events_[oldest_]);
      if (result == CUDA_ERROR_NOT_READY) {
        break;
      }
      if (result != CUDA_SUCCESS && ended > 0) {
        break;  // the next call says so; what has ended is counted first
      }
      driver_->check(result, "cannot copy a chunk");
      oldest_ = (oldest_ + 1) % window;
      --in_flight_;
      ++ended;
    }
    return ended;
  }

  void wait() override {
    driver_->check(driver_->cuStreamSynchronize(stream_), "cannot copy chunks");
  }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }

 private:
  void begun(CUresult copy) {
    driver_->check(copy, "cannot copy a chunk");
    auto const recorded = driver_->cuEventRecord(events_[(oldest_ + in_flight_) % window], stream_);
    if (recorded != CUDA_SUCCESS) {
      driver_->cuStreamSynchronize(stream_);  // nobody would know when this copy ends
    }
    driver_->check(recorded, "cannot follow the copy of a chunk");
    ++in_flight_;
  }

  void release() noexcept {
    if (stream_ != nullptr) {
      driver_->cuStreamSynchronize(stream_);  // the ends of a copy are the caller's memory
      driver_->cuStreamDestroy(stream_);
    }
    for (auto* const event : events_) {
      if (event != nullptr) {
        driver_->cuEventDestroy(event);
      }
    }
  }

  std::shared_ptr<cuda_driver const> driver_;
  CUstream stream_ = nullptr;
  std::array<CUevent, window> events_{};  ///< one for each place
  std::size_t oldest_ = 0;
  std::size_t in_flight_ = 0;
};

}  // namespace

std::unique_ptr<chunk_transfer> open_chunk_transfer(std::shared_ptr<cuda_driver const> driver) {
  if (driver == nullptr) {
    return std::make_unique<host_transfer>();
  }
  return std::make_unique<cuda_transfer>(std::move(driver));
}

}  // namespace sluice::memhandover
