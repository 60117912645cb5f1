/// A job that holds the whole pool, and a server; on the host, and on a GPU whose driver is a fake one.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "memhandover/base/error.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {

/// The parameter is the backend. `Gate`: of the job on the GPU.
template <typename Gate>
class job_and_server_test : public testing::TestWithParam<char const*> {
 protected:
  explicit job_and_server_test(std::uint32_t pool_chunks = 24) : world_{GetParam(), pool_chunks} {
    world_.start_broker();
    auto options = world_.job();
    if (on_gpu()) {
      options.gate = &gate_;
    }
    memory_.emplace(options);
    server_ = world_.join_server();
    chunk_ = server_->shape().chunk_bytes;
    chunks_ = server_->shape().chunk_count;
  }

  [[nodiscard]] static bool on_gpu() { return std::string{GetParam()} == "cuda"; }

  /// What the server gets, of so many chunks; nothing if it has to go without.
  std::optional<memhandover::placement> acquire(std::uint32_t chunks,
                                                std::chrono::milliseconds limit = patience) {
    try {
      return server_->acquire(chunks * chunk_, std::chrono::steady_clock::now() + limit);
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
      said_ = why.what();
      return std::nullopt;
    }
  }

  fault_world world_;
  Gate gate_;
  std::optional<step::training_memory> memory_;
  std::shared_ptr<memhandover::serving_pool> server_;
  std::uint64_t chunk_ = 0;
  std::uint32_t chunks_ = 0;
  std::string said_;
};

}  // namespace sluice::test
