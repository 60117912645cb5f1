#include "memhandover/device/chunk_transfer.hpp"

#include <array>
#include <cstring>
#include <deque>
#include <utility>

#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {
namespace {

class host_transfer final : public chunk_transfer {
 public:
  void out(std::byte* to, std::byte const* from, std::size_t bytes) override {
    copy(to, from, bytes);
  }
  void in(std::byte* to, std::byte const* from, std::size_t bytes) override {
    copy(to, from, bytes);
  }
  std::size_t poll() override { return std::exchange(uncounted_, 0); }
  std::size_t drop() noexcept override { return 0; }
  void abandon() noexcept override { uncounted_ = 0; }
  [[nodiscard]] std::size_t in_flight() const noexcept override { return uncounted_; }
  [[nodiscard]] std::size_t waiting() const noexcept override { return 0; }

 private:
  void copy(std::byte* to, std::byte const* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
    ++uncounted_;
  }

  std::size_t uncounted_ = 0;
};

class cuda_transfer final : public chunk_transfer {
 public:
  explicit cuda_transfer(std::shared_ptr<cuda_driver const> driver) : driver_(std::move(driver)) {
    driver_->expect(driver_part::copying, "nothing can be parked");
    relaxed_capture const relaxed{*driver_};
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
  ~cuda_transfer() override {
    abandon();  // the ends of a copy are the caller's memory
    relaxed_capture const relaxed{*driver_};
    release();
  }

  void out(std::byte* to, std::byte const* from, std::size_t bytes) override {
    take({to, from, bytes, true});
  }
  void in(std::byte* to, std::byte const* from, std::size_t bytes) override {
    take({to, from, bytes, false});
  }

  std::size_t poll() override {
    relaxed_capture const relaxed{*driver_};
    std::size_t ended = 0;
    while (in_flight_ > 0) {
      auto const result = driver_->cuEventQuery(events_[oldest_]);
      if (result == CUDA_ERROR_NOT_READY || (result != CUDA_SUCCESS && ended > 0)) {
        break;  // the next call says what is wrong
      }
      give_up_unless(result);
      oldest_ = (oldest_ + 1) % window;
      --in_flight_;
      ++ended;
    }
    begin_what_has_room();
    return ended;
  }

  std::size_t drop() noexcept override {
    auto const dropped = waiting_.size();
    waiting_.clear();
    return dropped;
  }

  void abandon() noexcept override {
    waiting_.clear();
    if (in_flight_ > 0) {
      relaxed_capture const relaxed{*driver_};
      (void)driver_->finish(stream_);
      in_flight_ = 0;
    }
  }

  [[nodiscard]] std::size_t in_flight() const noexcept override { return in_flight_; }
  [[nodiscard]] std::size_t waiting() const noexcept override { return waiting_.size(); }

 private:
  struct copy {
    std::byte* to;
    std::byte const* from;
    std::size_t bytes;
    bool out;
  };

  void take(copy const& one) {
    waiting_.push_back(one);
    relaxed_capture const relaxed{*driver_};
    begin_what_has_room();
  }

  void begin_what_has_room() {
    while (!waiting_.empty() && in_flight_ < window) {
      auto result = begin(waiting_.front());
      if (result == CUDA_SUCCESS) {
        result = driver_->cuEventRecord(events_[(oldest_ + in_flight_) % window], stream_);
      }
      give_up_unless(result);
      waiting_.pop_front();
      ++in_flight_;
    }
  }

  [[nodiscard]] CUresult begin(copy const& one) const {
    return one.out ? driver_->cuMemcpyDtoHAsync(one.to, reinterpret_cast<CUdeviceptr>(one.from),
                                                one.bytes, stream_)
                   : driver_->cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(one.to), one.from,
                                                one.bytes, stream_);
  }

  void give_up_unless(CUresult result) {
    if (result != CUDA_SUCCESS) {
      (void)driver_->finish(stream_);  // also a copy that no event follows
      in_flight_ = 0;
      waiting_.clear();
      driver_->check(result, "cannot copy a chunk");
    }
  }

  void release() noexcept {
    if (stream_ != nullptr) {
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
  std::deque<copy> waiting_;
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
