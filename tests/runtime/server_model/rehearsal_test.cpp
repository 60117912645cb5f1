#include "runtime/torch/model/rehearsal.hpp"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <thread>

#include "memhandover/base/error.hpp"

namespace sluice::server::testing {
namespace {

TEST(a_rehearsal, computes_on_every_thread_and_leaves_its_settings_alone) {
  set_torch_threads(1);
  EXPECT_NO_THROW(rehearse({}));
  EXPECT_NO_THROW(rehearse({})) << "again";
  EXPECT_EQ(at::get_num_threads(), 1);
  bool well = false;
  std::thread{[&well] {
    rehearse({});
    well = true;
  }}.join();
  EXPECT_TRUE(well);
}

TEST(a_rehearsal, says_where_it_could_not_compute) {
  try {
    rehearse({.cuda_ordinal = 63});
    FAIL() << "there is a GPU 63";
  } catch (error const& failure) {
    EXPECT_NE(std::string{failure.what()}.find("computing something small"), std::string::npos)
        << failure.what();
  }
}

}  // namespace
}  // namespace sluice::server::testing
