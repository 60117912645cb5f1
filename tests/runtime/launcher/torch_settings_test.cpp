#include "runtime/launcher/torch_settings.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::launcher {
namespace {

using testing::HasSubstr;
using testing::Optional;

std::optional<std::string> said_of(std::string const& entry) {
  return memory_outside_pool(environment{{"HOME=/", entry}});
}

TEST(torch_settings, that_take_memory_past_the_pool_are_named) {
  EXPECT_THAT(said_of("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
              Optional(HasSubstr("PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True")));
  EXPECT_THAT(said_of("PYTORCH_ALLOC_CONF=max_split_size_mb:64, expandable_segments: True"),
              Optional(HasSubstr("PYTORCH_ALLOC_CONF has expandable_segments:True")));
  EXPECT_THAT(said_of("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync,max_split_size_mb:64"),
              Optional(HasSubstr("backend:cudaMallocAsync")));
}

TEST(torch_settings, that_leave_memory_in_the_pool_are_let_through) {
  for (auto const* entry :
       {"OTHER=expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF=",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native",
        "PYTORCH_ALLOC_CONF=max_split_size_mb:64,garbage_collection_threshold:0.8"}) {
    EXPECT_EQ(said_of(entry), std::nullopt) << entry;
  }
}

}  // namespace
}  // namespace sluice::launcher
