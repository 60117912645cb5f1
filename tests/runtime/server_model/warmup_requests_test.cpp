#include "runtime/server/hosting/warmup_requests.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "memhandover/base/error.hpp"

namespace sluice::server::testing {
namespace {

using source = warmup_input::source;

warmup_input input(datatype type, std::vector<std::int64_t> shape, std::uint64_t bytes,
                   source data) {
  return {.name = "x", .type = type, .shape = std::move(shape), .bytes = bytes, .data = data};
}

template <typename Value>
std::vector<Value> values_of(tensor const& from) {
  std::vector<Value> values(from.data.size() / sizeof(Value));
  std::memcpy(values.data(), from.data.data(), from.data.size());
  return values;
}

TEST(warmup_requests, are_as_many_as_the_counts_say_in_order_and_each_alone) {
  std::vector<warmup_sample> const samples{
      {.name = "a",
       .batch_size = 2,
       .count = 2,
       .inputs = {input(datatype::fp32, {3}, 12, source::zeros)}},
      {.name = "b", .inputs = {input(datatype::fp32, {1}, 4, source::zeros)}}};
  auto const batched = warmup_requests(samples, true);
  ASSERT_EQ(batched.size(), 3U);
  EXPECT_EQ(batched[1].inputs.at(0).shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(values_of<float>(batched[1].inputs.at(0)), std::vector<float>(6));
  EXPECT_EQ(batched[2].inputs.at(0).shape, (std::vector<std::int64_t>{1, 1}));
  EXPECT_TRUE(batched[0].is_alone);
  EXPECT_EQ(warmup_requests(samples, false).at(2).inputs.at(0).shape,
            (std::vector<std::int64_t>{1}));
}

TEST(warmup_requests, have_random_elements_of_their_types) {
  auto const of = [](datatype type, std::uint64_t size) {
    return warmup_requests(
               {{.name = "s", .inputs = {input(type, {1000}, 1000 * size, source::random)}}}, false)
        .at(0)
        .inputs.at(0);
  };
  auto const reals = values_of<double>(of(datatype::fp64, 8));
  EXPECT_EQ(reals.size(), 1000U);
  EXPECT_TRUE(std::all_of(reals.begin(), reals.end(), [](double x) { return x >= 0 && x < 1; }));
  EXPECT_GT(*std::max_element(reals.begin(), reals.end()), 0.9);
  auto const integers = values_of<std::int64_t>(of(datatype::int64, 8));
  auto const ones = std::count(integers.begin(), integers.end(), 1);
  EXPECT_EQ(ones + std::count(integers.begin(), integers.end(), 0), 1000);
  EXPECT_GT(ones, 300);
  EXPECT_EQ(of(datatype::boolean, 1).data.size(), 1000U);
  EXPECT_EQ(of(datatype::bytes, 0).data.size(), 5000U);
  EXPECT_EQ(of(datatype::fp16, 2).data.size(), 2000U);
  EXPECT_EQ(values_of<float>(of(datatype::fp32, 4)), values_of<float>(of(datatype::fp32, 4)));
}

TEST(warmup_requests, have_the_elements_of_a_file) {
  auto const path =
      std::filesystem::path{::testing::TempDir()} / ("sluice-sample-" + std::to_string(::getpid()));
  std::ofstream{path, std::ios::binary} << std::string("\1\2\3\4\5", 5);
  auto from = input(datatype::uint8, {4}, 4, source::file);
  from.file = path;
  auto const requests = warmup_requests({{.name = "s", .batch_size = 2, .inputs = {from}}}, true);
  EXPECT_EQ(values_of<std::uint8_t>(requests.at(0).inputs.at(0)),
            (std::vector<std::uint8_t>{1, 2, 3, 4, 1, 2, 3, 4}));
  from.bytes = 6;
  try {
    (void)warmup_requests({{.name = "s", .inputs = {from}}}, false);
    FAIL() << "no error";
  } catch (error const& thrown) {
    EXPECT_EQ(thrown.kind(), error_kind::unavailable);
    EXPECT_NE(std::string{thrown.what()}.find(path.string()), std::string::npos);
  }
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace sluice::server::testing
