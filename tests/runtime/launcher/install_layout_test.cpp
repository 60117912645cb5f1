#include "runtime/launcher/install_layout.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::launcher {
namespace {

class install_layout_in : public testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() / ("layout-test-" + std::to_string(::getpid()));
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::filesystem::path root_;
};

TEST_F(install_layout_in, an_installation_has_the_python_package_beside_its_libraries) {
  std::filesystem::create_directories(root_ / "lib/python/sluice");
  auto const found = layout_around(root_ / "bin/sluice");
  EXPECT_EQ(found.program, root_ / "bin/sluice");
  EXPECT_EQ(found.server, root_ / "bin/sluice-server");
  EXPECT_EQ(found.runtime_library, root_ / "lib/libsluice_runtime.so");
  EXPECT_EQ(found.gate_library, root_ / "lib/libsluice_gate.so");
  EXPECT_EQ(found.nccl_library, root_ / "lib/libsluice_nccl.so");
  EXPECT_EQ(found.python_folder, root_ / "lib/python");
  EXPECT_EQ(found.startup_folder, root_ / "lib/python/sluice/startup");
}

TEST_F(install_layout_in, the_executor_is_the_only_one_or_that_for_the_torch_that_is_named) {
  EXPECT_TRUE(layout_around(root_ / "bin/sluice", "2.11").executor.empty());

  std::filesystem::create_directories(root_ / "lib/_torch/2.11");
  EXPECT_EQ(layout_around(root_ / "bin/sluice").executor,
            root_ / "lib/_torch/2.11/sluice-executor");
  EXPECT_TRUE(layout_around(root_ / "bin/sluice", "2.12").executor.empty());

  std::filesystem::create_directories(root_ / "lib/_torch/2.9");
  EXPECT_TRUE(layout_around(root_ / "bin/sluice").executor.empty());
  auto const named = layout_around(root_ / "bin/sluice", "2.11");
  EXPECT_EQ(named.executor, root_ / "lib/_torch/2.11/sluice-executor");
  EXPECT_EQ(named.torches, (std::vector<std::string>{"2.9", "2.11"}));
}

TEST_F(install_layout_in, without_an_executor_it_says_what_there_is) {
  auto const refusal = [this](std::string const& torch) -> std::string {
    try {
      (void)executor_of(layout_around(root_ / "bin/sluice", torch));
      return "";
    } catch (error const& failure) {
      EXPECT_EQ(failure.kind(), error_kind::unsupported);
      return failure.what();
    }
  };
  EXPECT_THAT(refusal(""), testing::HasSubstr("no inference server"));
  std::filesystem::create_directories(root_ / "lib/_torch/2.11");
  EXPECT_EQ(refusal(""), "");
  EXPECT_THAT(refusal("2.12"), testing::HasSubstr("2.11"));
}

TEST_F(install_layout_in, a_build_folder_has_it_in_the_sources_above) {
  std::filesystem::create_directories(root_ / "runtime/python/sluice");
  EXPECT_EQ(layout_around(root_ / "build/release/bin/sluice").python_folder,
            root_ / "runtime/python");
}

TEST_F(install_layout_in, a_package_that_has_the_programs_in_it_is_found_by_its_interpreter) {
  std::filesystem::create_directories(root_ / "runtime/python/sluice/bin");
  std::ofstream{root_ / "runtime/python/sluice/__init__.py"};
  auto const found = layout_around(root_ / "runtime/python/sluice/bin/sluice");
  EXPECT_EQ(found.gate_library, root_ / "runtime/python/sluice/lib/libsluice_gate.so");
  EXPECT_TRUE(found.python_folder.empty());
  EXPECT_EQ(found.startup_folder, root_ / "runtime/python/sluice/startup");
}

TEST_F(install_layout_in, without_a_package_nothing_is_named) {
  std::filesystem::create_directories(root_ / "bin");
  EXPECT_TRUE(layout_around(root_ / "bin/sluice").python_folder.empty());
  EXPECT_TRUE(layout_around(root_ / "bin/sluice").startup_folder.empty());
}

TEST_F(install_layout_in, what_ld_preload_cannot_name_is_reached_through_the_runtime_folder) {
  auto const plain = layout_around("/opt/bin/sluice");
  EXPECT_EQ(preloadable(plain, root_).gate_library, plain.gate_library);

  auto const spaced = layout_around(root_ / "my programs/bin/sluice");
  std::filesystem::create_directories(spaced.gate_library.parent_path());
  std::ofstream{spaced.gate_library} << "gate";
  auto const run = root_ / "run";
  std::filesystem::create_directories(run);
  for (int time = 0; time < 2; ++time) {  // the second finds the link
    auto const found = preloadable(spaced, run);
    EXPECT_EQ(found.gate_library.string().find_first_of(": "), std::string::npos);
    EXPECT_TRUE(std::filesystem::equivalent(found.gate_library, spaced.gate_library));
    EXPECT_EQ(found.nccl_library.parent_path(), found.gate_library.parent_path());
    EXPECT_EQ(found.runtime_library, spaced.runtime_library);
  }
}

TEST_F(install_layout_in, a_runtime_folder_that_cannot_help_is_named) {
  auto const spaced = layout_around(root_ / "my programs/bin/sluice");
  for (auto const* run : {"no such folder", "missing"}) {
    try {
      (void)preloadable(spaced, root_ / run);
      ADD_FAILURE() << run;
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::unsupported);
      EXPECT_NE(std::string{why.what()}.find((root_ / run).string()), std::string::npos);
    }
  }
}

TEST(this_installation, is_where_this_program_lies) {
  EXPECT_EQ(this_installation().program, std::filesystem::canonical("/proc/self/exe"));
}

}  // namespace
}  // namespace sluice::launcher
