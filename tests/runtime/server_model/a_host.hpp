/// A host over a pool of heap memory, with as many models as a test wants, each of which the test
/// can hold and fail.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/server/hosting/model_host.hpp"
#include "tests/runtime/server_model/heap_pool.hpp"
#include "tests/runtime/server_model/sum_model.hpp"

namespace sluice::server::testing {

inline constexpr std::uint64_t model_bytes = 2 * heap_pool::chunk;

class a_host : public ::testing::Test {
 protected:
  template <typename Holds>
  [[nodiscard]] static bool eventually(Holds const& holds) {
    for (auto const until = std::chrono::steady_clock::now() + patience; !holds();
         std::this_thread::sleep_for(std::chrono::milliseconds{1})) {
      if (std::chrono::steady_clock::now() > until) {
        return false;
      }
    }
    return true;
  }

  model_control& add(unsigned char weight, scheduler::seconds idle = scheduler::seconds{1e6},
                     std::uint64_t bytes = model_bytes) {
    controls_.push_back(std::make_shared<model_control>());
    served_model made;
    made.name = "model" + std::to_string(models_.size());
    made.version = "1";
    made.model = std::make_unique<sum_model>(bytes, weight, controls_.back());
    made.scheduling.goal.latency = scheduler::seconds{0.1};
    made.scheduling.limits = {idle, idle};
    models_.push_back(std::move(made));
    return *controls_.back();
  }

  void start(std::uint32_t pool_chunks, std::uint32_t training_chunks = 0) {
    pool_ = std::make_shared<heap_pool>(pool_chunks, training_chunks);
    host_ = std::make_unique<model_host>(options_, pool_, std::move(models_));
  }

  /// No tick comes after the first, so that what loads take has no part in what is decided.
  void start_with_one_tick(std::uint32_t pool_chunks) {
    options_.tick = std::chrono::hours{1};
    start(pool_chunks);
    ASSERT_TRUE(eventually(
        [this] { return !host_->snapshot().models.back().report.warm.candidates.empty(); }));
  }

  request_ticket send(std::size_t model, std::int64_t value, int which = 0,
                      std::optional<std::chrono::microseconds> timeout = std::nullopt) {
    infer_request request;
    request.model = "model" + std::to_string(model);
    request.id = std::to_string(which);
    request.timeout = timeout;
    request.inputs.push_back(number("input", value));
    return host_->submit(model, std::move(request), answers_.take(which));
  }

  infer_result ask(std::size_t model, std::int64_t value) {
    auto const before = asked_++;
    send(model, value);
    auto got = answers_.wait_for(before + 1);
    return got.size() > before ? got[before].second : error{error_kind::internal, "no answer came"};
  }

  void TearDown() override {
    for (auto const& each : controls_) {
      each->open();
    }
    if (host_) {
      EXPECT_TRUE(host_->stop(patience));
      host_.reset();
      EXPECT_EQ(pool_->usage().serving_bytes, 0U) << "memory was leaked";
      EXPECT_EQ(pool_->claims(), 0) << "a compute claim was leaked";
    }
  }

  host_options options_;
  std::vector<served_model> models_;
  std::vector<std::shared_ptr<model_control>> controls_;
  answers answers_;
  std::size_t asked_ = 0;
  std::shared_ptr<heap_pool> pool_;
  std::unique_ptr<model_host> host_;
};

}  // namespace sluice::server::testing
