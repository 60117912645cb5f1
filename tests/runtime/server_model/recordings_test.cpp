#include "runtime/torch/model/detail/recordings.hpp"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

namespace sluice::server::testing {
namespace {

/// What "launching again" means on a host: into the same memory, as on a device.
class host_recorder final : public detail::launch_recorder {
 public:
  explicit host_recorder(int& recorded) : recorded_{recorded} {}

  [[nodiscard]] std::unique_ptr<detail::recording> record(
      std::function<void()> const& compute) override {
    ++recorded_;
    TORCH_CHECK_WITH(OutOfMemoryError, !is_out_of_memory_, "out of memory");
    compute();
    return std::make_unique<again>(compute_);
  }
  std::function<void()> compute_ = [] {};
  bool is_out_of_memory_ = false;

 private:
  class again final : public detail::recording {
   public:
    explicit again(std::function<void()> what) : what_{std::move(what)} {}
    void replay() override { what_(); }

   private:
    std::function<void()> what_;
  };
  int& recorded_;
};

at::Tensor filled(std::vector<std::int64_t> const& shape, double value) {
  return at::full(shape, value, at::kFloat);
}

class recorded_forward : public ::testing::Test {
 protected:
  recorded_forward() {
    auto recorder = std::make_unique<host_recorder>(recorded_);
    recorder_ = recorder.get();
    all_.emplace(std::move(recorder));
  }

  /// Twice as much as `x`, into memory of its own, which a recording fills again.
  at::Tensor twice(at::Tensor const& x) {
    auto const result = all_->run({x}, [this](std::vector<c10::IValue> given) -> c10::IValue {
      ++computed_;
      auto const from = given.at(0).toTensor();
      auto to = at::add(from, from, extra_);
      recorder_->compute_ = [from, to]() mutable { to.copy_(from + from); };
      return to;
    });
    return result.toTensor().clone();
  }

  int recorded_ = 0, computed_ = 0;
  double extra_ = 1.0;
  host_recorder* recorder_ = nullptr;
  std::optional<detail::recordings> all_;
};

TEST_F(recorded_forward, is_computed_until_its_shape_has_come_often) {
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(at::equal(twice(filled({3}, i)), filled({3}, 2 * i))) << i;
  }
  EXPECT_EQ(recorded_, 1);
  EXPECT_EQ(computed_, static_cast<int>(detail::recordings::often) + 2);  // once more, and recorded
  EXPECT_EQ(all_->count(), 1U);
}

TEST_F(recorded_forward, is_recorded_for_each_shape_and_type) {
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(twice(filled({2}, i)).numel(), 2);
    EXPECT_EQ(twice(filled({5}, i)).numel(), 5);
    EXPECT_EQ(twice(at::full({5}, i + 0.5, at::kDouble)).scalar_type(), at::kDouble);
  }
  EXPECT_EQ(recorded_, 3);
}

TEST_F(recorded_forward, is_computed_as_ever_if_a_recording_computes_something_else) {
  extra_ = 2.0;  // 3x, of which the recording knows nothing
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(at::equal(twice(filled({3}, i + 1)), filled({3}, 3 * (i + 1)))) << i;
  }
  EXPECT_EQ(all_->refusal(), "what was recorded computes something else");
  EXPECT_EQ(all_->count(), 0U);
  EXPECT_EQ(recorded_, 1);
}

TEST_F(recorded_forward, is_tried_again_where_memory_was_short) {
  recorder_->is_out_of_memory_ = true;
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(at::equal(twice(filled({3}, i)), filled({3}, 2 * i))) << i;
  }
  EXPECT_FALSE(all_->refusal());
  EXPECT_EQ(all_->count(), 0U);
  recorder_->is_out_of_memory_ = false;
  for (int i = 0; i < 4; ++i) {
    EXPECT_TRUE(at::equal(twice(filled({3}, i)), filled({3}, 2 * i))) << i;
  }
  EXPECT_EQ(all_->count(), 1U);
}

TEST_F(recorded_forward, of_random_numbers_is_not_recorded) {
  for (int i = 0; i < 6; ++i) {
    (void)all_->run({at::ones({1})}, [this](std::vector<c10::IValue> const& given) -> c10::IValue {
      auto to = given.at(0).toTensor() * at::rand({}).item();
      recorder_->compute_ = [] {};
      return to;
    });
  }
  EXPECT_EQ(all_->refusal(), "it takes random numbers of the host");
}

TEST_F(recorded_forward, keeps_the_shapes_that_were_used_last) {
  auto const most = static_cast<int>(detail::recordings::most);
  for (int size = 1; size <= most + 1; ++size) {
    for (int i = 0; i < 3; ++i) {
      (void)twice(filled({size}, i));
    }
  }
  EXPECT_EQ(all_->count(), detail::recordings::most);
  (void)twice(filled({most + 1}, 1));
  EXPECT_EQ(recorded_, most + 1);
}

}  // namespace
}  // namespace sluice::server::testing
