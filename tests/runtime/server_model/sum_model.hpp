/// A small model for tests of the host: its weights are a number in every byte of its memory, and
/// it answers the sum of its input and the first and last weight, so that an answer computed
/// without its memory is wrong.
#pragma once

#include <array>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/hosting/model_host.hpp"
#include "runtime/server/inference/hosted_model.hpp"
#include "tests/runtime/server_model/heap_pool.hpp"

namespace sluice::server::testing {

inline tensor number(std::string name, std::int64_t value) {
  tensor made{std::move(name), datatype::int64, {1}, std::vector<std::byte>(sizeof value)};
  std::memcpy(made.data.data(), &value, sizeof value);
  return made;
}

inline std::int64_t number_in(tensor const& from) {
  std::int64_t value = 0;
  std::memcpy(&value, from.data.data(), sizeof value);
  return value;
}

/// What a test holds on to while the host owns the model.
class model_control {
 public:
  /// Computations stop at their beginning until `open`.
  void close() {
    std::lock_guard const lock{mutex_};
    open_ = false;
  }
  void open() {
    std::lock_guard const lock{mutex_};
    open_ = true;
    changed_.notify_all();
  }
  /// Loads that nobody waits for stop at their beginning until `open_loads`, or until they are called off.
  void close_loads() {
    std::lock_guard const lock{mutex_};
    loads_open_ = false;
  }
  void open_loads() {
    std::lock_guard const lock{mutex_};
    loads_open_ = true;
    changed_.notify_all();
  }
  [[nodiscard]] bool wait_for_spare_loads(int loads) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return spare_loads_ >= loads; });
  }
  void fail_load(error_kind kind) {
    std::lock_guard const lock{mutex_};
    load_failure_ = kind;
  }
  /// Of an image that is not there at first.
  void set_image_steps(int steps) {
    std::lock_guard const lock{mutex_};
    image_steps_ = steps;
  }
  /// What it says of its weights to other hosts; else nothing.
  void set_fingerprint(std::string words) {
    std::lock_guard const lock{mutex_};
    fingerprint_ = std::move(words);
  }
  void fail_image(error_kind kind) {
    std::lock_guard const lock{mutex_};
    image_failure_ = kind;
  }
  [[nodiscard]] int image_steps_made() const {
    std::lock_guard const lock{mutex_};
    return image_steps_made_;
  }
  void fail_unload() {
    std::lock_guard const lock{mutex_};
    keeps_ = true;
  }
  /// Whatever fails from now on leaves the device unable to compute.
  void break_device() {
    std::lock_guard const lock{mutex_};
    device_works_ = false;
  }
  void allow_batches() {
    std::lock_guard const lock{mutex_};
    can_batch_ = true;
  }
  /// So many of its computations may run beside each other.
  void allow_at_once(std::size_t most) {
    std::lock_guard const lock{mutex_};
    most_at_once_ = most;
  }
  /// Of more than one request.
  void fail_batches() {
    std::lock_guard const lock{mutex_};
    fails_batches_ = true;
  }
  /// The sizes of the computations that have been begun.
  [[nodiscard]] std::vector<std::size_t> batches() const {
    std::lock_guard const lock{mutex_};
    return batches_;
  }
  [[nodiscard]] int loads() const {
    std::lock_guard const lock{mutex_};
    return loads_;
  }
  [[nodiscard]] bool wait_for_runs(int runs) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return runs_ >= runs; });
  }
  [[nodiscard]] bool has_begun(int runs) const {
    std::lock_guard const lock{mutex_};
    return runs_ >= runs;
  }
  [[nodiscard]] bool wait_for_rests(int rests) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return rests_ >= rests; });
  }
  [[nodiscard]] int unloads() const {
    std::lock_guard const lock{mutex_};
    return unloads_;
  }
  [[nodiscard]] bool wait_for_unloads(int unloads) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, patience, [&] { return unloads_ >= unloads; });
  }

 private:
  friend class sum_model;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool open_ = true;
  bool loads_open_ = true;
  int spare_loads_ = 0;  // begun
  bool keeps_ = false;
  bool device_works_ = true;
  bool can_batch_ = false, fails_batches_ = false;
  std::size_t most_at_once_ = 1;
  std::vector<std::size_t> batches_;
  int loads_ = 0;
  int unloads_ = 0;
  int runs_ = 0;  // begun
  int rests_ = 0;
  int image_steps_ = 0;
  int image_steps_made_ = 0;
  std::optional<error_kind> load_failure_, image_failure_;
  std::string fingerprint_;
};

class sum_model final : public hosted_model {
 public:
  sum_model(std::uint64_t bytes, unsigned char weight, std::shared_ptr<model_control> control)
      : bytes_(bytes), pieces_{bytes}, weight_(weight), control_(std::move(control)) {}

  [[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }
  [[nodiscard]] std::span<std::uint64_t const> pieces() const noexcept override { return pieces_; }

  [[nodiscard]] std::uint64_t image_bytes() const noexcept override {
    std::lock_guard const lock{control_->mutex_};
    return control_->image_steps_made_ < control_->image_steps_ ? 0 : bytes_;
  }

  void extend_image() override {
    std::lock_guard const lock{control_->mutex_};
    if (control_->image_failure_) {
      throw error{*std::exchange(control_->image_failure_, std::nullopt), "the file has changed"};
    }
    ++control_->image_steps_made_;
  }

  [[nodiscard]] std::string fingerprint() const override {
    std::lock_guard const lock{control_->mutex_};
    return control_->fingerprint_;
  }

  void load(std::span<std::byte* const> memory) override {
    std::lock_guard const lock{control_->mutex_};
    if (control_->load_failure_) {
      throw error{*std::exchange(control_->load_failure_, std::nullopt),
                  "the image cannot be read"};
    }
    memory_ = memory[0];
    std::memset(memory_, weight_, bytes_);
    ++control_->loads_;
  }

  void load_spare(std::span<std::byte* const> memory, std::stop_token const& called_off) override {
    {
      std::stop_callback const wakes{called_off, [this] {
                                       { std::lock_guard const held{control_->mutex_}; }
                                       control_->changed_.notify_all();
                                     }};
      std::unique_lock lock{control_->mutex_};
      ++control_->spare_loads_;
      control_->changed_.notify_all();
      control_->changed_.wait(lock,
                              [&] { return control_->loads_open_ || called_off.stop_requested(); });
    }
    if (called_off.stop_requested()) {
      throw error{error_kind::cancelled, "it is called off"};
    }
    load(memory);
  }

  void unload() override {
    std::lock_guard const lock{control_->mutex_};
    ++control_->unloads_;
    control_->changed_.notify_all();
    if (control_->keeps_) {
      throw error{error_kind::internal, "a view of the memory is kept"};
    }
    memory_ = nullptr;
  }

  [[nodiscard]] bool device_works() const noexcept override {
    std::lock_guard const lock{control_->mutex_};
    return control_->device_works_;
  }

  [[nodiscard]] std::size_t most_at_once() const noexcept override {
    std::lock_guard const lock{control_->mutex_};
    return control_->most_at_once_;
  }

  bool rest() noexcept override {
    std::lock_guard const lock{control_->mutex_};
    ++control_->rests_;
    control_->changed_.notify_all();
    return false;
  }

  [[nodiscard]] bool can_batch() const noexcept override {
    std::lock_guard const lock{control_->mutex_};
    return control_->can_batch_;
  }

  void run_together(std::span<model_call> calls) override {
    if (begin(calls.size())) {
      throw error{error_kind::model_error, "batches are not summed"};
    }
    for (auto& each : calls) {
      each.outputs = sum(each.inputs);
    }
  }

  [[nodiscard]] std::vector<tensor> run(std::vector<tensor>& inputs,
                                        std::vector<std::string> const& /*wanted*/) override {
    (void)begin(1);
    return sum(inputs);
  }

 private:
  /// Whether batches are to fail.
  [[nodiscard]] bool begin(std::size_t requests) const {
    std::unique_lock lock{control_->mutex_};
    ++control_->runs_;
    control_->batches_.push_back(requests);
    control_->changed_.notify_all();
    control_->changed_.wait(lock, [&] { return control_->open_; });
    return control_->fails_batches_;
  }
  [[nodiscard]] std::vector<tensor> sum(std::vector<tensor> const& inputs) const {
    auto const input = number_in(inputs.at(0));
    if (input < 0) {
      throw error{error_kind::invalid_argument, "negative numbers are not summed"};
    }
    if (input == 1'000'000) {
      throw std::runtime_error{"an exception that is no error of ours"};
    }
    return {number("sum",
                   input + static_cast<int>(memory_[0]) + static_cast<int>(memory_[bytes_ - 1]))};
  }

  std::uint64_t const bytes_;
  std::array<std::uint64_t, 1> const pieces_;
  unsigned char const weight_;
  std::shared_ptr<model_control> const control_;
  std::byte* memory_ = nullptr;
};

/// Collects the answers of one test, in the order in which they came.
class answers {
 public:
  [[nodiscard]] model_host::completion take(int which) {
    return [this, which](infer_result result) {
      std::lock_guard const lock{mutex_};
      got_.emplace_back(which, std::move(result));
      changed_.notify_all();
    };
  }
  void clear() {
    std::lock_guard const lock{mutex_};
    got_.clear();
  }
  /// The first `count` answers; fewer only if patience ended.
  [[nodiscard]] std::vector<std::pair<int, infer_result>> wait_for(std::size_t count) {
    std::unique_lock lock{mutex_};
    changed_.wait_for(lock, patience, [&] { return got_.size() >= count; });
    return got_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<int, infer_result>> got_;
};

inline std::int64_t sum_of(infer_result const& result) {
  auto const* const response = std::get_if<infer_response>(&result);
  return response == nullptr ? -1 : number_in(response->outputs.at(0));
}

inline std::optional<error_kind> failure_of(infer_result const& result) {
  auto const* const failure = std::get_if<error>(&result);
  return failure == nullptr ? std::nullopt : std::optional{failure->kind()};
}

}  // namespace sluice::server::testing
