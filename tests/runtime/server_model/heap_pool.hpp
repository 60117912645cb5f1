/// A pool of heap memory for tests of what stands above a pool: real memory, counted as a pool
/// counts it, without a broker or another process. Part of it can be said to be training's, which
/// gives it up when asked.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "memhandover/error.hpp"
#include "memhandover/serving_pool.hpp"

namespace sluice::server::testing {

inline constexpr std::chrono::seconds patience{
    20};  // longer than any machine needs; a hang becomes a failure

class heap_pool final : public memhandover::serving_pool,
                        public std::enable_shared_from_this<heap_pool> {
 public:
  static constexpr std::uint64_t chunk = 4096;

  explicit heap_pool(std::uint32_t chunks, std::uint32_t training = 0)
      : shape_{memhandover::backend_kind::host, -1, chunk, chunks}, training_(training * chunk) {}

  [[nodiscard]] memhandover::pool_shape shape() const override { return shape_; }

  [[nodiscard]] memhandover::pool_usage usage() const override {
    std::lock_guard const lock{mutex_};
    return {shape_.bytes(), free(), training_, serving_};
  }

  [[nodiscard]] memhandover::placement acquire(std::uint64_t bytes,
                                               std::chrono::steady_clock::time_point deadline,
                                               memhandover::handover_report* report,
                                               std::string_view /*what*/) override {
    std::lock_guard const lock{mutex_};
    last_deadline_ = deadline;
    ++acquisitions_;
    if (failure_) {
      throw error{*std::exchange(failure_, std::nullopt), "training keeps it"};
    }
    auto const wanted = (bytes + chunk - 1) / chunk * chunk;
    if (wanted > free() + training_) {
      throw error{error_kind::out_of_memory, "too little can be had"};
    }
    auto const reclaimed = wanted > free() ? wanted - free() : 0;
    training_ -= reclaimed;
    serving_ += wanted;
    if (report != nullptr) {
      report->bytes = wanted;
      report->bytes_reclaimed = reclaimed;
      report->total = std::chrono::microseconds{7};
    }
    auto* const data = static_cast<std::byte*>(std::aligned_alloc(chunk, wanted));
    auto give_back = [self = shared_from_this(), wanted](std::byte* memory) {
      std::free(memory);
      std::lock_guard const held{self->mutex_};
      self->serving_ -= wanted;
      self->changed_.notify_all();
    };
    return {std::shared_ptr<std::byte>{data, std::move(give_back)}, data, wanted};
  }

  void set_reserve(std::uint64_t bytes) override {
    std::lock_guard const lock{mutex_};
    reserve_ = bytes;
    changed_.notify_all();
  }

  [[nodiscard]] memhandover::compute_claim claim_compute() override {
    std::lock_guard const lock{mutex_};
    ++claims_;
    ++claims_ever_;
    return memhandover::compute_claim{
        std::shared_ptr<void>{nullptr, [self = shared_from_this()](void*) {
                                std::lock_guard const held{self->mutex_};
                                --self->claims_;
                                self->changed_.notify_all();
                              }}};
  }

  void fail_next(error_kind kind) {
    std::lock_guard const lock{mutex_};
    failure_ = kind;
  }
  [[nodiscard]] int claims() const {
    std::lock_guard const lock{mutex_};
    return claims_;
  }
  [[nodiscard]] int claims_ever() const {
    std::lock_guard const lock{mutex_};
    return claims_ever_;
  }
  [[nodiscard]] int acquisitions() const {
    std::lock_guard const lock{mutex_};
    return acquisitions_;
  }
  /// Whether this many claims are held before patience ends.
  [[nodiscard]] bool wait_for_claims(int claims) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return claims_ == claims; });
  }
  [[nodiscard]] bool wait_for_serving(std::uint64_t bytes) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return serving_ == bytes; });
  }
  [[nodiscard]] bool wait_for_reserve(std::uint64_t bytes) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return reserve_ == bytes; });
  }

 private:
  [[nodiscard]] std::uint64_t free() const { return shape_.bytes() - training_ - serving_; }

  memhandover::pool_shape const shape_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::uint64_t training_;
  std::uint64_t serving_ = 0;
  std::uint64_t reserve_ = 0;
  int claims_ = 0;
  int claims_ever_ = 0;
  int acquisitions_ = 0;
  std::optional<error_kind> failure_;
  std::chrono::steady_clock::time_point last_deadline_;
};

}  // namespace sluice::server::testing
