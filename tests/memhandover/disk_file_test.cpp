#include "memhandover/device/disk_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "tests/memhandover/disk_folder.hpp"
#include "tests/memhandover/smaller_files.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using testing::HasSubstr;

template <typename Call>
std::string words_of(Call&& call) {
  try {
    call();
  } catch (error const& why) {
    return why.what();
  }
  return "";
}

class disk_file_test : public testing::Test {
 protected:
  static constexpr std::size_t page = 4096;
  static constexpr std::size_t piece = 256_KiB;

  void SetUp() override {
    if (folder_.path().empty()) {
      GTEST_SKIP() << "there is no folder on a disk";
    }
    fd_ = create_disk_file({folder_.path(), 4 * piece});
  }
  /// `piece` bytes that begin so far behind a page.
  std::span<std::byte> memory(std::size_t behind = 0) {
    auto* at = memory_.data();
    std::size_t space = memory_.size();
    void* aligned = at;
    std::align(page, piece + page, aligned, space);
    return {static_cast<std::byte*>(aligned) + behind, piece};
  }
  void expect_comes_back(disk_file& file, std::size_t behind) {
    auto const at = memory(behind);
    std::fill(at.begin(), at.end(), std::byte{7});
    file.write(2 * piece, at);
    std::fill(at.begin(), at.end(), std::byte{0});
    file.read(2 * piece, at);
    EXPECT_TRUE(std::all_of(at.begin(), at.end(), [](auto byte) { return byte == std::byte{7}; }));
    file.read(piece, at);
    EXPECT_TRUE(std::all_of(at.begin(), at.end(), [](auto byte) { return byte == std::byte{0}; }));
  }

  test::disk_folder folder_;
  unique_fd fd_;
  std::vector<std::byte> memory_{piece + 3 * page};
};

TEST_F(disk_file_test, has_no_name_and_all_its_blocks_and_is_its_users_alone) {
  EXPECT_TRUE(folder_.is_empty());
  struct stat status {};
  ASSERT_EQ(::fstat(fd_.get(), &status), 0);
  EXPECT_EQ(status.st_nlink, 0U);
  EXPECT_EQ(status.st_mode & 0777U, 0600U);
  EXPECT_EQ(static_cast<std::size_t>(status.st_size), 4 * piece);
  EXPECT_GE(static_cast<std::size_t>(status.st_blocks) * 512, 4 * piece);
}

TEST_F(disk_file_test, gives_back_what_was_written) {
  disk_file file{fd_.get()};
  expect_comes_back(file, 0);
}

TEST_F(disk_file_test, takes_what_the_file_system_does_not_take_past_its_cache) {
  disk_file file{fd_.get()};
  expect_comes_back(file, 8);
  expect_comes_back(file, 0);
}

TEST_F(disk_file_test, tells_of_a_write_that_fails_by_its_number_and_goes_on) {
  disk_file file{fd_.get()};
  {
    test::smaller_files const limit{piece};
    try {
      file.write(piece, memory());
      ADD_FAILURE() << "it was written";
    } catch (disk_error const& why) {
      EXPECT_EQ(why.number(), EFBIG);
      EXPECT_THAT(why.what(), HasSubstr("cannot write host copies to the disk: File too large"));
    }
  }
  expect_comes_back(file, 0);
}

TEST_F(disk_file_test, tells_of_contents_that_are_not_there_any_more) {
  disk_file file{fd_.get()};
  file.write(0, memory());
  file.write(3 * piece, memory());
  ASSERT_EQ(::ftruncate(fd_.get(), 2 * piece), 0);
  file.read(0, memory());
  try {
    file.read(3 * piece, memory());
    ADD_FAILURE() << "it was read";
  } catch (disk_error const& why) {
    EXPECT_EQ(why.number(), EIO);
    EXPECT_THAT(why.what(), HasSubstr("cannot read host copies from the disk"));
  }
}

TEST_F(disk_file_test, is_not_made_where_there_is_too_little_room) {
  auto const room = read_disk_room(folder_.path());
  disk_wish const too_much{folder_.path(), room.most};
  EXPECT_THAT(words_of([&] { (void)create_disk_file(too_much); }), HasSubstr("are available"));
  EXPECT_TRUE(folder_.is_empty());
  test::smaller_files const limit{piece};
  EXPECT_THAT(words_of([&] {
                (void)create_disk_file({folder_.path(), 2 * piece});
              }),
              HasSubstr("File too large"));
  EXPECT_TRUE(folder_.is_empty());
}

TEST_F(disk_file_test, is_not_made_in_what_is_no_folder) {
  EXPECT_THAT(refusal_of_folder(folder_.path() + "/none").value_or(""),
              HasSubstr("there is no folder"));
  auto const file = folder_.path() + "/file";
  std::ofstream{file} << "x";
  EXPECT_THAT(refusal_of_folder(file).value_or(""), HasSubstr("is not a folder"));
  EXPECT_THAT(words_of([&] {
                (void)create_disk_file({file, piece});
              }),
              HasSubstr("is not a folder"));
  EXPECT_EQ(refusal_of_folder(folder_.path()), std::nullopt);
}

TEST_F(disk_file_test, is_not_made_in_memory) {
  if (!std::filesystem::is_directory("/dev/shm")) {
    GTEST_SKIP() << "there is no file system in memory";
  }
  EXPECT_THAT(refusal_of_folder("/dev/shm").value_or(""), HasSubstr("is in memory (tmpfs)"));
}

TEST(disk_room, is_too_little_for_what_leaves_no_headroom) {
  disk_room const room{10_GiB, 2_GiB};
  EXPECT_EQ(refusal_of_disk({"/d", 10_GiB - disk_headroom}, room), std::nullopt);
  auto const never = refusal_of_disk({"/d", 10_GiB}, room).value_or("");
  EXPECT_THAT(never, HasSubstr("10 GiB on the disk of /d, which has 10 GiB"));
  EXPECT_THAT(never, HasSubstr("ask for 9984MiB at most"));
  EXPECT_EQ(shortage_of_disk({"/d", 2_GiB - disk_headroom}, room), std::nullopt);
  EXPECT_THAT(shortage_of_disk({"/d", 2_GiB}, room).value_or(""),
              HasSubstr("where 2 GiB are available, of which 256 MiB stay free; ask for 1792MiB"));
  EXPECT_THAT(shortage_of_disk({"/d", 1_GiB}, {10_GiB, 1_MiB}).value_or(""),
              HasSubstr("choose another folder"));
}

}  // namespace
}  // namespace sluice::memhandover
