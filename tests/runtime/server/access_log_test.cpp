#include "runtime/server/http/access_log.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "memhandover/base/unique_fd.hpp"
#include "tests/runtime/server/endpoint_fixture.hpp"
#include "tests/runtime/server/thrown.hpp"

namespace sluice::server {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::SizeIs;
using testing::UnorderedElementsAre;

std::vector<std::string> lines_in(std::string const& text) {
  std::vector<std::string> lines;
  std::istringstream stream{text};
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

class logged_endpoint : public http_endpoint {
 protected:
  logged_endpoint() { options_.accesses = std::make_shared<access_log>(file_.path().string()); }

  /// All lines, once the endpoint has ended.
  std::vector<std::string> lines() {
    endpoint_->stop(long_time);
    endpoint_.reset();
    options_.accesses.reset();
    return lines_in(file_.text());
  }
  written_file file_{"access.log", ""};
};

TEST_P(logged_endpoint, has_a_line_for_each_request) {
  auto connection = client();
  auto const body = addition(1, 2);
  connection.request("POST", "/v2/models/add/infer?secret=1", body,
                     "X-Request-Id: other\r\nX: secret\r\n");
  auto const answered = connection.read_response().body.size();
  connection.request("GET", "/v2/health/live", {}, "X-Request-Id: \"mine\r\n");
  connection.read_response();
  connection.request("GET", "/v2/models/none");
  connection.read_response();
  auto const start =
      R"(20..-..-..T..:..:..\.......Z info .*\[[0-9]+\] request peer=127\.0\.0\.1:[0-9]+ )";
  EXPECT_THAT(
      lines(),
      ElementsAre(
          MatchesRegex(
              start +
              fmt::format(
                  R"(method="POST" path="/v2/models/add/infer" model="add" version="1" id="r" status=200 )"
                  R"(bytes_in={} bytes_out={} total_ms=[0-9]+\.[0-9][0-9][0-9])",
                  body.size(), answered)),
          MatchesRegex(
              start +
              std::string{
                  R"re(method="GET" path="/v2/health/live" id="\\"mine" status=200 .*ms=[0-9.]+)re"}),
          MatchesRegex(
              start +
              std::string{R"(method="GET" path="/v2/models/none" status=404 .*cause=not_found)"})));
}

TEST_P(logged_endpoint, says_why_a_request_failed) {
  auto const fails = [](error_kind kind) {
    return fmt::format(
        R"({{"id":"i\nj","inputs":[{{"name":"kind","datatype":"INT32","shape":[1],"data":[{}]}}]}})",
        static_cast<int>(kind));
  };
  once("POST", "/v2/models/fails/infer", fails(error_kind::model_error));
  once("POST", "/v2/models/add/infer", "{");
  once("DELETE", "/v2");
  auto rubbish = client();
  rubbish.send("rubbish\r\n\r\n");
  rubbish.read_response();
  EXPECT_THAT(lines(), UnorderedElementsAre(
                           HasSubstr("status=500"),
                           AllOf(HasSubstr("status=400"), HasSubstr("cause=invalid_argument")),
                           AllOf(HasSubstr("method=\"DELETE\""), HasSubstr("status=405"),
                                 HasSubstr("cause=refused")),
                           AllOf(HasSubstr("status=400"), HasSubstr("cause=malformed"))));
  EXPECT_THAT(file_.text(), AllOf(HasSubstr("id=\"i\\x0aj\""), HasSubstr("cause=model_error"),
                                  Not(HasSubstr("secret"))));
}

TEST_P(logged_endpoint, says_that_a_client_has_left) {
  service_.hold();
  auto leaving = client();
  leaving.request("POST", "/v2/models/add/infer", addition(1, 2));
  service_.await_requests(1);
  leaving.vanish();
  service_.await_cancelled(1);
  await_connections(0);
  service_.release();
  EXPECT_THAT(lines(), ElementsAre(AllOf(HasSubstr("model=\"add\""), HasSubstr("status=0"),
                                         HasSubstr("cause=client_left"))));
}

TEST_P(logged_endpoint, long_texts_are_cut) {
  once("GET", "/v2/models/" + std::string(5000, 'm'), {},
       "X-Request-Id: " + std::string(4000, 'i') + "\r\n");
  auto const all = lines();
  ASSERT_THAT(all, SizeIs(1));
  EXPECT_LT(all.front().size(), 700U);
}

INSTANTIATE_TEST_SUITE_P(over, logged_endpoint, testing::Values(transport::plain, transport::tls),
                         [](auto const& of) {
                           return of.param == transport::plain ? "plain" : "tls";
                         });

access_entry numbered(int i) {
  access_entry entry;
  entry.path = fmt::format("/{}", i);
  return entry;
}

TEST(access_log, a_file_that_has_been_moved_is_opened_again) {
  written_file const file{"moved.log", ""}, moved{"moved.log.1", ""};
  auto log = std::make_unique<access_log>(file.path().string());
  log->write(numbered(1));
  while (file.text().empty()) std::this_thread::yield();
  std::filesystem::rename(file.path(), moved.path());
  log->write(numbered(2));
  log.reset();
  EXPECT_THAT(moved.text(), AllOf(HasSubstr("path=\"/1\""), Not(HasSubstr("path=\"/2\""))));
  EXPECT_THAT(file.text(), AllOf(HasSubstr("path=\"/2\""), Not(HasSubstr("path=\"/1\""))));
}

TEST(access_log, goes_on_at_the_end_of_what_is_there) {
  written_file const file{"there.log", "before\n"};
  { access_log{file.path().string()}.write(numbered(1)); }
  EXPECT_THAT(lines_in(file.text()), ElementsAre("before", HasSubstr("path=\"/1\"")));
}

// A pipe that nobody reads is the slowest disk.
TEST(access_log, who_writes_waits_for_no_disk_and_hears_what_was_dropped) {
  written_file const pipe{"pipe.log", ""};
  std::filesystem::remove(pipe.path());
  ASSERT_EQ(::mkfifo(pipe.path().c_str(), 0600), 0);
  memhandover::unique_fd const kept{::open(pipe.path().c_str(), O_RDONLY | O_NONBLOCK)};
  auto log = std::make_unique<access_log>(pipe.path().string());
  std::ifstream reader{pipe.path()};
  constexpr int entries = 40'000;  // more than a pipe and the queue hold
  for (int i = 0; i < entries; ++i) log->write(numbered(i));
  std::uint64_t seen = 0, dropped = 0;
  std::thread reading{[&] {
    for (std::string line; std::getline(reader, line);) {
      auto const at = line.find("dropped lines=");
      if (at == std::string::npos) {
        ++seen;
      } else {
        dropped += std::stoull(line.substr(at + 14));
      }
    }
  }};
  log.reset();
  reading.join();
  EXPECT_GT(dropped, 0U);
  EXPECT_EQ(seen + dropped, static_cast<std::uint64_t>(entries));
}

/// A limit on the size of files stands for a disk without room.
class small_disk : public testing::Test {
 protected:
  small_disk() {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    (void)std::signal(SIGXFSZ, SIG_IGN);
  }
  small_disk(small_disk const&) = delete;
  small_disk& operator=(small_disk const&) = delete;
  small_disk(small_disk&&) = delete;
  small_disk& operator=(small_disk&&) = delete;
  ~small_disk() override { hold(before_.rlim_cur); }
  void hold(rlim_t bytes) const {
    rlimit const limit{bytes, before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  /// Until the program's log has something to say.
  class complaint : public spdlog::sinks::base_sink<std::mutex> {
   public:
    complaint() : before_(spdlog::default_logger()) {
      spdlog::set_default_logger(std::make_shared<spdlog::logger>(
          "test", spdlog::sink_ptr{this, [](spdlog::sinks::sink*) {}}));
    }
    ~complaint() override { spdlog::set_default_logger(before_); }
    void await() { made_.get_future().wait(); }

   private:
    void sink_it_(spdlog::details::log_msg const& /*line*/) override { made_.set_value(); }
    void flush_() override {}
    std::shared_ptr<spdlog::logger> before_;
    std::promise<void> made_;
  };
  written_file file_{"full.log", ""};

 private:
  rlimit before_{};
};

TEST_F(small_disk,
       a_line_that_was_cut_ends_before_the_next_and_only_what_is_missing_counts_as_dropped) {
  auto log = std::make_unique<access_log>(file_.path().string());
  complaint made;
  log->write(numbered(1));
  while (file_.text().empty()) std::this_thread::yield();
  auto const line = std::filesystem::file_size(file_.path());
  hold(line + line / 2);
  log->write(numbered(2));
  made.await();
  hold(RLIM_INFINITY);
  log->write(numbered(3));
  log.reset();
  EXPECT_THAT(lines_in(file_.text()),
              ElementsAre(HasSubstr("path=\"/1\""), Not(HasSubstr("bytes_in")),
                          HasSubstr("path=\"/3\""), HasSubstr("dropped lines=1")));
}

TEST(access_log, a_pipe_that_nobody_reads_is_refused_and_not_waited_for) {
  written_file const pipe{"pipe.log", ""};
  std::filesystem::remove(pipe.path());
  ASSERT_EQ(::mkfifo(pipe.path().c_str(), 0600), 0);
  auto const failure = thrown_by([&] { access_log const refused{pipe.path().string()}; });
  ASSERT_TRUE(failure);
  EXPECT_THAT(failure->what(), HasSubstr("nobody reads that pipe"));
}

TEST(access_log, its_end_does_not_wait_for_who_reads_a_pipe_and_takes_nothing) {
  written_file const pipe{"pipe.log", ""};
  std::filesystem::remove(pipe.path());
  ASSERT_EQ(::mkfifo(pipe.path().c_str(), 0600), 0);
  memhandover::unique_fd const reader{::open(pipe.path().c_str(), O_RDONLY | O_NONBLOCK)};
  auto log = std::make_unique<access_log>(pipe.path().string());
  for (int i = 0; i < 8000; ++i) log->write(numbered(i));  // more than a pipe holds
  log.reset();
  std::array<char, 4096> bytes{};
  EXPECT_GT(::read(reader.get(), bytes.data(), bytes.size()), 0);
}

TEST(access_log, a_check_makes_no_file_and_says_what_opening_it_would) {
  auto const said = [](std::filesystem::path const& file) {
    auto const failure = thrown_by([&] { check_access_log(file.string()); });
    return failure ? std::string{failure->what()} : "";
  };
  written_file const file{"checked.log", ""};
  EXPECT_EQ(said(file.path()), "");
  EXPECT_EQ(said("stderr"), "");
  std::filesystem::remove(file.path());
  EXPECT_EQ(said(file.path()), "");
  EXPECT_FALSE(std::filesystem::exists(file.path()));
  EXPECT_THAT(said("/nowhere/at/all"),
              HasSubstr("server.access_log: cannot write to /nowhere/at/all"));
  EXPECT_THAT(said(testing::TempDir()), HasSubstr("directory"));
}

TEST(access_log, a_file_that_cannot_be_written_is_refused) {
  auto const failure = thrown_by([] { access_log const refused{"/nowhere/at/all"}; });
  ASSERT_TRUE(failure);
  EXPECT_EQ(failure->kind(), error_kind::invalid_argument);
  EXPECT_THAT(failure->what(), HasSubstr("server.access_log: cannot write to /nowhere/at/all"));
}

}  // namespace
}  // namespace sluice::server
