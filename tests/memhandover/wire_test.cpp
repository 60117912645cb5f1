#include "memhandover/wire.hpp"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <filesystem>

#include "memhandover/error.hpp"

namespace sluice::memhandover {
namespace {

namespace fs = std::filesystem;

class wire_test : public testing::Test {
 protected:
  void SetUp() override {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    left_ = unique_fd{ends[0]};
    right_ = unique_fd{ends[1]};
    auto pattern = (fs::temp_directory_path() / "sluice-wire-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  unique_fd left_;
  unique_fd right_;
  fs::path folder_;
};

TEST_F(wire_test, carries_a_message_with_its_descriptors) {
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC)};
  send_message(left_.get(), {{"type", "bell"}, {"slot", 3}}, {bell.get(), bell.get()});
  auto const received = receive_message(right_.get());
  ASSERT_TRUE(received);
  EXPECT_EQ(received->body["slot"], 3);
  ASSERT_EQ(received->descriptors.size(), 2U);
  EXPECT_NE(::fcntl(received->descriptors[0].get(), F_GETFD) & FD_CLOEXEC, 0);
  ASSERT_EQ(::eventfd_write(bell.get(), 5), 0);
  eventfd_t value = 0;
  ASSERT_EQ(::eventfd_read(received->descriptors[1].get(), &value), 0);
  EXPECT_EQ(value, 5U);
}

TEST_F(wire_test, tells_the_end_of_a_conversation_from_a_message) {
  left_.reset();
  EXPECT_FALSE(receive_message(right_.get()));
}

TEST_F(wire_test, refuses_what_is_no_message_of_ours) {
  for (std::string const text : {"nonsense", "[1,2]", "{}", R"({"type":7})", "{\"type\":\"x\""}) {
    ASSERT_EQ(::send(left_.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
    EXPECT_THROW((void)receive_message(right_.get()), error) << text;
  }
}

TEST_F(wire_test, carries_a_text_that_is_not_utf_8_with_its_bytes_replaced) {
  send_message(left_.get(), {{"type", "x"}, {"name", "M\xfcller"}});
  auto const received = receive_message(right_.get());
  ASSERT_TRUE(received);
  EXPECT_EQ(received->body["name"], "M\uFFFDller");
}

TEST_F(wire_test, refuses_to_send_more_than_a_message_carries) {
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC)};
  std::vector<int> const descriptors(max_descriptors + 1, bell.get());
  EXPECT_THROW(send_message(left_.get(), {{"type", "x"}}, descriptors), error);
  EXPECT_THROW(send_message(left_.get(), {{"type", "x"}, {"text", std::string(200'000, 'x')}}),
               error);
  send_message(left_.get(), {{"type", "x"}}, {descriptors.begin(), descriptors.end() - 1});
  EXPECT_EQ(receive_message(right_.get())->descriptors.size(), max_descriptors);
}

TEST_F(wire_test, gives_up_when_nothing_comes_in_time) {
  try {
    (void)receive_message(right_.get(), 1);
    FAIL();
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unavailable);
  }
}

TEST_F(wire_test, a_peer_that_is_gone_is_an_error_and_no_signal) {
  right_.reset();
  EXPECT_THROW(send_message(left_.get(), {{"type", "x"}}), error);
}

TEST_F(wire_test, makes_the_runtime_folder_private) {
  auto const made = prepare_runtime_dir((folder_ / "new").string());
  struct stat status {};
  ASSERT_EQ(::stat(made.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0700U);
}

TEST_F(wire_test, refuses_a_runtime_folder_that_others_can_enter) {
  auto const open = folder_ / "open";
  fs::create_directory(open);
  fs::permissions(open, fs::perms::all);
  EXPECT_THROW((void)prepare_runtime_dir(open.string()), error);
  auto const link = folder_ / "link";
  fs::create_symlink(folder_, link);
  EXPECT_THROW((void)prepare_runtime_dir(link.string()), error);
}

TEST_F(wire_test, finds_no_broker_where_none_listens) {
  EXPECT_FALSE(connect_to_broker(folder_.string()));
}

TEST_F(wire_test, names_a_process_by_its_start) {
  EXPECT_GT(process_start_ticks(::getpid()), 0U);
  EXPECT_EQ(process_start_ticks(::getpid()), process_start_ticks(::getpid()));
  EXPECT_EQ(process_start_ticks(0x7fffffff), 0U);
}

}  // namespace
}  // namespace sluice::memhandover
