#include "memhandover/device/chunk_transfer.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {
namespace {

/// A driver whose copies end when the test says, and one of whose calls may fail.
struct slow_driver {
  std::size_t calls = 0;
  std::size_t fails_at = ~std::size_t{0};
  std::uint64_t recorded = 0;
  std::uint64_t ended = 0;
  int streams = 0;
  int events = 0;
  int synchronised = 0;
};

slow_driver state;

CUresult counted() {
  return state.calls++ == state.fails_at ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

/// What an event says: the number of the record that it follows.
std::uint64_t* as_number(CUevent event) {
  return reinterpret_cast<std::uint64_t*>(event);
}

std::shared_ptr<cuda_driver const> make_driver() {
  auto driver = std::make_shared<cuda_driver>();
  driver->cuGetErrorString = [](CUresult, char const** text) {
    *text = "failed";
    return CUDA_SUCCESS;
  };
  driver->cuStreamCreateWithPriority = [](CUstream* out, unsigned, int) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      *out = reinterpret_cast<CUstream>(&state);
      ++state.streams;
    }
    return result;
  };
  driver->cuStreamDestroy = [](CUstream) {
    --state.streams;
    return CUDA_SUCCESS;
  };
  driver->cuStreamSynchronize = [](CUstream) {
    ++state.synchronised;
    state.ended = state.recorded;
    return CUDA_SUCCESS;
  };
  driver->cuEventCreate = [](CUevent* out, unsigned) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      *out = reinterpret_cast<CUevent>(std::make_unique<std::uint64_t>(0).release());
      ++state.events;
    }
    return result;
  };
  driver->cuEventDestroy = [](CUevent event) {
    std::unique_ptr<std::uint64_t> const gone{as_number(event)};
    --state.events;
    return CUDA_SUCCESS;
  };
  driver->cuEventRecord = [](CUevent event, CUstream) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      *as_number(event) = ++state.recorded;
    }
    return result;
  };
  driver->cuEventQuery = [](CUevent event) {
    return *as_number(event) <= state.ended ? counted() : CUDA_ERROR_NOT_READY;
  };
  driver->cuMemcpyDtoHAsync = [](void* to, CUdeviceptr from, std::size_t bytes, CUstream) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      std::memcpy(to, reinterpret_cast<void const*>(from), bytes);
    }
    return result;
  };
  driver->cuMemcpyHtoDAsync = [](CUdeviceptr to, void const* from, std::size_t bytes, CUstream) {
    auto const result = counted();
    if (result == CUDA_SUCCESS) {
      std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    }
    return result;
  };
  return driver;
}

class chunk_transfer_test : public testing::Test {
 protected:
  chunk_transfer_test() { state = {}; }

  std::vector<std::byte> there_ = std::vector<std::byte>(64, std::byte{5});
  std::vector<std::byte> here_ = std::vector<std::byte>(64);
};

TEST_F(chunk_transfer_test, copies_of_the_host_end_at_once) {
  auto const ring = open_chunk_transfer(nullptr);
  ring->out(here_.data(), there_.data(), here_.size());
  EXPECT_EQ(ring->in_flight(), 1U);
  EXPECT_EQ(here_, there_);
  EXPECT_EQ(ring->poll(), 1U);
  EXPECT_EQ(ring->poll(), 0U);
}

TEST_F(chunk_transfer_test, no_more_than_the_window_is_in_flight) {
  for (auto const& driver : {std::shared_ptr<cuda_driver const>{}, make_driver()}) {
    auto const ring = open_chunk_transfer(driver);
    for (std::size_t i = 0; i < chunk_transfer::window; ++i) {
      EXPECT_TRUE(ring->room());
      ring->out(here_.data(), there_.data(), here_.size());
    }
    EXPECT_FALSE(ring->room());
    EXPECT_THROW(ring->out(here_.data(), there_.data(), here_.size()), error);
    EXPECT_EQ(ring->in_flight(), chunk_transfer::window);
  }
}

TEST_F(chunk_transfer_test, copies_are_counted_in_the_order_they_were_begun) {
  auto const ring = open_chunk_transfer(make_driver());
  for (std::uint64_t begun = 0; begun < 50; ++begun) {
    ring->in(there_.data(), here_.data(), here_.size());
    if (begun < 2) {
      EXPECT_EQ(ring->poll(), 0U);
      continue;
    }
    ++state.ended;
    EXPECT_EQ(ring->poll(), 1U);
    EXPECT_EQ(ring->in_flight(), 2U);
  }
  EXPECT_EQ(here_, there_);
  ring->wait();
  EXPECT_EQ(ring->poll(), 2U);
}

TEST_F(chunk_transfer_test, a_failure_at_any_call_leaves_nothing_behind) {
  auto const round = [this] {
    auto const ring = open_chunk_transfer(make_driver());
    ring->out(here_.data(), there_.data(), here_.size());
    state.ended = state.recorded;
    EXPECT_EQ(ring->poll(), 1U);
  };
  round();
  auto const calls = state.calls;
  ASSERT_GE(calls, chunk_transfer::window + 4);
  for (std::size_t at = 0; at < calls; ++at) {
    state = {};
    state.fails_at = at;
    EXPECT_THROW(round(), error) << at;
    EXPECT_EQ(state.streams, 0) << at;
    EXPECT_EQ(state.events, 0) << at;
  }
}

TEST_F(chunk_transfer_test, a_copy_that_nobody_follows_is_waited_for) {
  auto const ring = open_chunk_transfer(make_driver());
  state.fails_at = state.calls + 1;
  EXPECT_THROW(ring->out(here_.data(), there_.data(), here_.size()), error);
  EXPECT_EQ(state.synchronised, 1);
  EXPECT_EQ(ring->in_flight(), 0U);
}

}  // namespace
}  // namespace sluice::memhandover
