#include "memhandover/broker/runtime_folder.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/unique_fd.hpp"

namespace sluice::memhandover {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class runtime_folder_test : public testing::Test {
 protected:
  void SetUp() override {
    auto pattern = (fs::temp_directory_path() / "sluice-folder-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    above_ = pattern;
  }
  void TearDown() override { fs::remove_all(above_); }

  /// Why a folder is refused, whether it is to be made or not.
  static std::string refusal(fs::path const& folder) {
    auto why = refusal_by(check_runtime_dir, folder);
    EXPECT_EQ(refusal_by(prepare_runtime_dir, folder), why);
    return why;
  }
  template <typename Function>
  static std::string refusal_by(Function&& function, fs::path const& folder) {
    try {
      (void)function(folder.string());
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::invalid_argument);
      return why.what();
    }
    return {};
  }

  fs::path above_;
};

TEST_F(runtime_folder_test, is_made_private_and_only_when_it_is_to_be) {
  auto const folder = above_ / "new";
  EXPECT_EQ(check_runtime_dir(folder.string()), folder);
  EXPECT_FALSE(fs::exists(folder));
  EXPECT_EQ(prepare_runtime_dir(folder.string() + "//"), folder);
  struct stat status {};
  ASSERT_EQ(::stat(folder.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0700U);
}

TEST_F(runtime_folder_test, is_the_same_wherever_a_job_goes) {
  auto const before = fs::current_path();
  fs::current_path(above_);
  auto const made = prepare_runtime_dir("mine");
  fs::current_path(before);
  EXPECT_EQ(fs::canonical(made), fs::canonical(above_ / "mine"));
}

TEST_F(runtime_folder_test, that_others_can_enter_is_refused_with_what_mends_it) {
  auto const open = above_ / "it's open";
  fs::create_directory(open);
  fs::permissions(open, fs::perms{0755});
  auto const why = refusal(open);
  EXPECT_THAT(why, HasSubstr("has mode 0755, and must have 0700"));
  auto const start = why.find('`') + 1;
  ASSERT_EQ(std::system(why.substr(start, why.find('`', start) - start).c_str()), 0) << why;
  EXPECT_EQ(refusal(open), "");
}

TEST_F(runtime_folder_test, that_is_none_is_refused_with_what_mends_it) {
  std::ofstream{above_ / "file"} << "text";
  EXPECT_THAT(refusal(above_ / "file"),
              HasSubstr("is not a folder; remove it with `rm " + (above_ / "file").string() + "`"));
  fs::create_symlink(above_ / "nowhere", above_ / "dangling");
  fs::create_symlink(above_, above_ / "link");
  for (std::string const link : {"dangling", "link"}) {
    for (std::string const end : {"", "/"}) {
      EXPECT_THAT(refusal(above_ / (link + end)),
                  HasSubstr("symbolic link, which may come to lead elsewhere; remove it with `rm " +
                            (above_ / link).string() + "`"));
    }
  }
}

TEST_F(runtime_folder_test, that_is_another_users_is_refused_with_what_mends_it) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "needs to be root, who alone gives a folder to another user";
  }
  auto const theirs = above_ / "theirs";
  fs::create_directory(theirs);
  fs::permissions(theirs, fs::perms{0700});
  ASSERT_EQ(::chown(theirs.c_str(), 4711, 4711), 0);
  EXPECT_THAT(refusal(theirs),
              HasSubstr("belongs to user 4711, and must be yours; have it given to "
                        "you with `sudo chown -R 0 "));
}

TEST_F(runtime_folder_test, whose_parent_is_missing_is_refused_with_what_mends_it) {
  EXPECT_THAT(refusal_by(prepare_runtime_dir, above_ / "a" / "b"),
              HasSubstr("with `mkdir -p " + (above_ / "a").string() + "`"));
}

TEST_F(runtime_folder_test, tells_who_has_the_brokers_lock) {
  EXPECT_FALSE(holder_of_broker_lock(above_.string()));
  unique_fd const lock{
      ::open((above_ / "broker.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)};
  EXPECT_FALSE(holder_of_broker_lock(above_.string()));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  EXPECT_EQ(holder_of_broker_lock(above_.string()), ::getpid());
}

TEST(system_error, says_which_limit_is_meant) {
  EXPECT_THAT(reason_of(EFBIG), HasSubstr("ulimit -f"));
  EXPECT_THAT(reason_of(EMFILE), HasSubstr("ulimit -n"));
  EXPECT_EQ(reason_of(ENOENT), "No such file or directory");
  EXPECT_EQ(system_error("x", error_kind::internal, EFBIG).kind(), error_kind::unavailable);
  EXPECT_EQ(system_error("x", error_kind::internal, ENOENT).kind(), error_kind::internal);
}

TEST(system_error, quotes_a_path_that_a_shell_would_take_apart) {
  EXPECT_EQ(shell_word("/tmp/a-b_c.d"), "/tmp/a-b_c.d");
  EXPECT_EQ(shell_word("/tmp/it's $HOME"), "'/tmp/it'\\''s $HOME'");
}

}  // namespace
}  // namespace sluice::memhandover
