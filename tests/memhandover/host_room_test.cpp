#include "memhandover/device/host_room.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <string>

#include "memhandover/base/bytes.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using testing::HasSubstr;
namespace fs = std::filesystem;

/// A tree of files as the kernel shows them, below a folder of its own.
class host_room_test : public testing::Test {
 protected:
  void SetUp() override {
    auto pattern = (fs::temp_directory_path() / "sluice-room-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    write("proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(std::string const& file, std::string const& text) const {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream{root_ / file} << text;
  }
  void group(std::string const& folder, std::string const& limit, std::uint64_t used,
             std::uint64_t cache = 0) const {
    write(folder + "/memory.max", limit + "\n");
    write(folder + "/memory.current", std::to_string(used) + "\n");
    write(folder + "/memory.stat", "anon 1\ninactive_file " + std::to_string(cache) + "\n");
  }
  [[nodiscard]] host_room read() const { return read_host_room(root_); }

  fs::path root_;
};

TEST_F(host_room_test, without_cgroups_the_machine_limits) {
  EXPECT_EQ(read().most, 8_GiB);
  EXPECT_EQ(read().available, 6_GiB);
  EXPECT_EQ(read().available_set_by, "the machine");
}

TEST_F(host_room_test, the_tightest_of_all_groups_above_counts_and_is_named) {
  write("proc/self/cgroup", "0::/user/job/worker\n");
  group("sys/fs/cgroup/user", "max", 5_GiB);
  group("sys/fs/cgroup/user/job", std::to_string(2_GiB), 512_MiB);
  group("sys/fs/cgroup/user/job/worker", std::to_string(4_GiB), 64_MiB);
  EXPECT_EQ(read().most, 2_GiB);
  EXPECT_EQ(read().most_set_by, "the limit of the memory cgroup /user/job");
  EXPECT_EQ(read().available, 1536_MiB);
  EXPECT_EQ(read().available_set_by, "the limit of the memory cgroup /user/job");
}

TEST_F(host_room_test, a_wide_limit_that_is_used_up_leaves_least) {
  write("proc/self/cgroup", "0::/a/b\n");
  group("sys/fs/cgroup/a", std::to_string(7_GiB), 6656_MiB);
  group("sys/fs/cgroup/a/b", std::to_string(4_GiB), 1_GiB);
  EXPECT_EQ(read().most, 4_GiB);
  EXPECT_EQ(read().available, 512_MiB);
  EXPECT_EQ(read().available_set_by, "the limit of the memory cgroup /a");
}

TEST_F(host_room_test, idle_caches_count_as_available) {
  write("proc/self/cgroup", "0::/a\n");
  group("sys/fs/cgroup/a", std::to_string(2_GiB), 2_GiB, 1536_MiB);
  EXPECT_EQ(read().available, 1536_MiB);
}

TEST_F(host_room_test, a_group_that_is_used_beyond_its_limit_has_nothing_left) {
  write("proc/self/cgroup", "0::/a\n");
  group("sys/fs/cgroup/a", std::to_string(1_GiB), 2_GiB);
  EXPECT_EQ(read().available, 0U);
}

TEST_F(host_room_test, a_container_that_sees_only_its_own_group_is_limited_by_that) {
  write("proc/self/cgroup", "0::/machine/container\n");
  group("sys/fs/cgroup", std::to_string(3_GiB), 1_GiB);
  EXPECT_EQ(read().most, 3_GiB);
  EXPECT_EQ(read().available, 2_GiB);
}

TEST_F(host_room_test, version_one_has_other_files_and_a_huge_number_for_no_limit) {
  write("proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/x/y\n0::/\n");
  auto version_1 = [this](std::string const& folder, std::uint64_t limit, std::uint64_t used) {
    write(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    write(folder + "/memory.stat", "inactive_file 7\ntotal_inactive_file 1048576\n");
  };
  version_1("sys/fs/cgroup/memory", 9223372036854771712U, 7_GiB);
  version_1("sys/fs/cgroup/memory/x", 2_GiB, 1_GiB);
  version_1("sys/fs/cgroup/memory/x/y", 9223372036854771712U, 1_GiB);
  EXPECT_EQ(read().most, 2_GiB);
  EXPECT_EQ(read().available, 1_GiB + 1_MiB);
  EXPECT_EQ(read().most_set_by, "the limit of the memory cgroup /x");
}

TEST_F(host_room_test, files_that_make_no_sense_do_not_limit) {
  write("proc/self/cgroup", "nonsense\n0::\n0::/../../a\n:::\n");
  write("sys/fs/cgroup/a/memory.max", "many\n");
  write("sys/fs/cgroup/memory.max", "");
  EXPECT_EQ(read().most, 8_GiB);
  EXPECT_EQ(read().available, 6_GiB);
}

TEST_F(host_room_test, a_shortage_is_told_with_its_cause) {
  write("proc/self/cgroup", "0::/a\n");
  group("sys/fs/cgroup/a", std::to_string(2_GiB), 1_GiB);
  EXPECT_EQ(shortage(1_GiB, read()), std::nullopt);
  auto const said = shortage(3_GiB, read());
  ASSERT_TRUE(said);
  EXPECT_THAT(*said, HasSubstr("3 GiB"));
  EXPECT_THAT(*said,
              HasSubstr("1 GiB of memory are available (the limit of the memory cgroup /a)"));
}

TEST(host_copies, that_the_host_can_never_have_are_refused_with_all_numbers) {
  host_room const room{8_GiB, "the machine", 3_GiB, "the machine"};
  EXPECT_FALSE(refusal_of_host_copies(7_GiB, 64_MiB, 512_MiB, room));
  auto const why = refusal_of_host_copies(8_GiB, 64_MiB, 1_GiB, room);
  ASSERT_TRUE(why);
  EXPECT_THAT(*why, testing::HasSubstr("host copies are to have 8 GiB, but of the 8 GiB that there "
                                       "are (the machine), 1 GiB are for pools on the host and 256 "
                                       "MiB stay free; ask for 6912MiB at most"));
  EXPECT_THAT(refusal_of_host_copies(8_GiB, 64_MiB, 8_GiB, room).value_or(""),
              testing::HasSubstr("ask for none"));
}

TEST(host_copies, that_there_is_too_little_for_now_are_a_warning_with_both_numbers) {
  host_room const room{8_GiB, "the machine", 3_GiB, "the machine"};
  EXPECT_FALSE(shortage_of_host_copies(2_GiB, room));
  EXPECT_THAT(shortage_of_host_copies(4_GiB, room).value_or(""),
              testing::HasSubstr("are to have 4 GiB, but only 3 GiB of memory are available now"));
}

TEST(read_host_room, of_this_machine_is_more_than_nothing) {
  EXPECT_GT(read_host_room().most, 0U);
  EXPECT_LT(read_host_room().most, 1ULL << 50U);
  EXPECT_LE(read_host_room().available, read_host_room().most);
}

}  // namespace
}  // namespace sluice::memhandover
