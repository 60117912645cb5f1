#include "runtime/launcher/install_layout.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <string>

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
}

TEST_F(install_layout_in, a_build_folder_has_it_in_the_sources_above) {
  std::filesystem::create_directories(root_ / "runtime/python/sluice");
  EXPECT_EQ(layout_around(root_ / "build/release/bin/sluice").python_folder,
            root_ / "runtime/python");
}

TEST_F(install_layout_in, without_a_package_nothing_is_named) {
  std::filesystem::create_directories(root_ / "bin");
  EXPECT_TRUE(layout_around(root_ / "bin/sluice").python_folder.empty());
}

TEST(this_installation, is_where_this_program_lies) {
  EXPECT_EQ(this_installation().program, std::filesystem::canonical("/proc/self/exe"));
}

}  // namespace
}  // namespace sluice::launcher
