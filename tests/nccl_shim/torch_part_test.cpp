#include "nccl_shim/agreement/torch_part.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace sluice::nccl_shim {
namespace {

class torch_part_in : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  /// What is found where a file says so.
  std::string minor_from(char const* file, std::string const& text) {
    std::ofstream{folder_ / file} << text;
    auto const found = torch_minor_in(folder_.string());
    std::filesystem::remove(folder_ / file);
    return found;
  }

  std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / ("sluice-part-" + std::to_string(::getpid()));
};

TEST_F(torch_part_in, the_version_is_what_the_package_says_or_the_library) {
  EXPECT_EQ(
      minor_from("version.py", "from typing import Optional\n\n__version__ = '2.15.0+cu130'\n"),
      "2.15");
  EXPECT_EQ(minor_from("build-version", "2.9.1+cpu\n"), "2.9");
  EXPECT_EQ(minor_from("version.py", "__version__ = '3'\n"), "");
  EXPECT_EQ(minor_from("version.py", "__version__ = ''\n"), "");
  EXPECT_EQ(torch_minor_in((folder_ / "nowhere").string()), "");
}

TEST_F(torch_part_in, without_a_version_it_is_the_only_one) {
  auto const libraries = folder_.string();
  EXPECT_EQ(torch_part(libraries, "2.12"), libraries + "/_torch/2.12");
  EXPECT_EQ(torch_part(libraries, ""), libraries);
  std::filesystem::create_directories(folder_ / "_torch/2.11");
  EXPECT_EQ(torch_part(libraries, ""), libraries + "/_torch/2.11");
  std::filesystem::create_directories(folder_ / "_torch/2.12");
  EXPECT_EQ(torch_part(libraries, ""), libraries);
}

TEST_F(torch_part_in, a_process_without_torch_has_no_version) {
  EXPECT_EQ(loaded_torch_minor(), "");
}

}  // namespace
}  // namespace sluice::nccl_shim
