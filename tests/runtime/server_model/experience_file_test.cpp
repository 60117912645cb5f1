/// What a server leaves of what it has learnt, and what the next one reads, whatever has become of the file.
#include "runtime/server/experience/experience_file.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/crc.hpp>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

using namespace std::chrono_literals;
using scheduler::instant;
using scheduler::model_controller;
using scheduler::seconds;

scheduler::model_settings settings() {
  return {.goal = {.latency = 300ms}, .weight_bytes = 1U << 20U, .may_prewarm = true};
}

scheduler::experience learnt() {
  model_controller model{settings(), instant{}};
  instant now{};
  for (int i = 0; i < 400; ++i) {
    now += seconds{0.1 + 0.01 * (i % 7)};
    (void)model.on_arrival(now);
    model.on_service(now, seconds{0.02 + 0.001 * (i % 11)}, i % 9 == 0 ? 1s : 50ms);
    if (i % 50 == 0) {
      model.on_load(now, 400ms, 30ms);
      (void)model.tick(now);
    }
  }
  return model.learnt(now);
}

scheduler::experience learnt_of_a_timer() {
  model_controller model{settings(), instant{}};
  for (int i = 0; i < 20; ++i) {
    (void)model.on_arrival(instant{seconds{60.0 * i + 0.1 * (i % 3)}});
  }
  return model.learnt(instant{seconds{20 * 60.0}});
}

experiences some() {
  return {std::chrono::system_clock::time_point{1764460800s},
          {{"add/1", "add bytes=1", learnt()},
           {"\"quoted\" name/2", "x", {}},
           {"timed/1", "timed bytes=1", learnt_of_a_timer()}}};
}

std::string with_checksum(std::string const& content) {
  boost::crc_32_type sum;
  sum.process_bytes(content.data(), content.size());
  return fmt::format("sluice-experience 2 crc32 {:08x} bytes {}\n{}", sum.checksum(),
                     content.size(), content);
}

std::string content_of(std::string const& text) {
  return text.substr(text.find('\n') + 1);
}

std::string refusal_of(std::string_view text) {
  try {
    (void)read_experiences(text);
    return "none";
  } catch (error const& refused) {
    EXPECT_EQ(refused.kind(), error_kind::invalid_argument);
    return refused.what();
  }
}

TEST(experience_text, says_all_that_it_was_made_of) {
  auto const text = text_of(some());
  EXPECT_EQ(with_checksum(content_of(text)), text);
  auto const again = read_experiences(text);
  EXPECT_EQ(text_of(again), text);
  EXPECT_EQ(again.models.at(0).learnt.services, learnt().services);
  EXPECT_EQ(again.models.at(1).model, "\"quoted\" name/2");
  EXPECT_EQ(again.models.at(1).learnt.idle_timeout, std::nullopt);
  auto const& periods = again.models.at(2).learnt.periods;
  ASSERT_TRUE(periods.found);
  EXPECT_NEAR(periods.found->period_s, 60.0, 0.1);
  EXPECT_EQ(periods.by_silence.at(0).begins, learnt_of_a_timer().periods.by_silence.at(0).begins);
}

TEST(experience_text, knows_a_timeout_without_an_end) {
  auto all = some();
  all.models[0].learnt.idle_timeout = scheduler::forever;
  EXPECT_EQ(read_experiences(text_of(all)).models[0].learnt.idle_timeout, scheduler::forever);
}

TEST(experience_text, of_another_version_is_refused_by_its_number) {
  auto text = text_of(some());
  text.replace(text.find(" 2 "), 3, " 7 ");
  EXPECT_EQ(refusal_of(text), "it is of version 7, and this server reads version 2");
}

TEST(experience_text, that_is_cut_short_or_changed_is_refused) {
  auto const text = text_of(some());
  std::mt19937 random{5};
  for (std::size_t length = 0; length < text.size(); length += 1 + random() % 97) {
    ASSERT_NE(refusal_of(std::string_view{text}.substr(0, length)), "none") << length;
  }
  ASSERT_NE(refusal_of(text + '\n'), "none");
  for (int i = 0; i < 3000; ++i) {
    auto damaged = text;
    auto& changed = damaged[random() % damaged.size()];
    auto const bit = static_cast<char>(1U << random() % 8U);
    changed = static_cast<char>(changed ^ bit);
    ASSERT_NE(refusal_of(damaged), "none") << i;
  }
}

/// What a checksum does not show: then numbers, names and forms are looked at.
TEST(experience_text, with_a_checksum_that_fits_does_no_harm_either) {
  constexpr std::array<std::string_view, 14> wild{
      "null", "-1", "1e300", "1e999", "{}", "[]", "\"x\"", "true", "0.5", "18446744073709551615",
      "-0",   "[[", ",",     "1e15"};
  auto const content = content_of(text_of(some()));
  std::mt19937 random{6};
  int taken = 0;
  for (int i = 0; i < 3000; ++i) {
    auto changed = content;
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      auto const from =
          std::min(changed.find_first_of(":,[", random() % changed.size()), changed.size() - 1) + 1;
      auto const to = std::min(changed.find_first_of(",]}", from), changed.size());
      changed.replace(from, to - from, wild.at(random() % wild.size()));
    }
    try {
      auto const all = read_experiences(with_checksum(changed));
      for (auto const& each : all.models) {
        model_controller model{settings(), instant{}};
        model.recall(each.learnt, 10s, instant{});
        auto const made = model.tick(instant{});
        ASSERT_GE(made.warm.chosen.attainment, 0.0);
        ASSERT_LE(made.warm.chosen.attainment, 1.0);
      }
      ++taken;
    } catch (error const& refused) {
      ASSERT_EQ(refused.kind(), error_kind::invalid_argument);
    } catch (std::invalid_argument const&) {  // no model can have learnt that
    }
  }
  EXPECT_GT(taken, 10);
}

class an_experience_file : public ::testing::Test {
 protected:
  an_experience_file() {
    auto made = (std::filesystem::temp_directory_path() / "experience-XXXXXX").string();
    folder_ = ::mkdtemp(made.data());
  }
  ~an_experience_file() override { std::filesystem::remove_all(folder_); }

  void leave() const {
    experience_file file{path()};
    file.keep(some().models);
  }
  void write(std::string const& text) const { std::ofstream{path()} << text; }
  [[nodiscard]] std::string read() const {
    std::ostringstream text;
    text << std::ifstream{path()}.rdbuf();
    return text.str();
  }
  [[nodiscard]] std::filesystem::path path() const { return folder_ / "server-0.experience"; }
  /// What is logged while a file is opened.
  [[nodiscard]] std::string log_of_opening(bool is_sound = false) const {
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    {
      experience_file const file{path()};
      EXPECT_EQ(file.find("add/1", "add bytes=1").has_value(), is_sound);
    }
    return ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
  }

  std::filesystem::path folder_;
};

TEST_F(an_experience_file, is_found_by_the_next_one) {
  leave();
  experience_file const next{path()};
  auto const found = next.find("add/1", "add bytes=1");
  ASSERT_TRUE(found);
  EXPECT_EQ(found->learnt.services, learnt().services);
  EXPECT_GE(found->age.count(), 0.0);
  EXPECT_LT(found->age.count(), 60.0);
  EXPECT_FALSE(next.find("add/1", "another model"));
  EXPECT_FALSE(next.find("add/2", "add bytes=1"));
}

TEST_F(an_experience_file, is_for_its_user_alone) {
  leave();
  struct stat is {};
  ASSERT_EQ(::stat(path().c_str(), &is), 0);
  EXPECT_EQ(is.st_mode & 0777U, 0600U);
}

TEST_F(an_experience_file, of_a_clock_that_went_back_has_no_age) {
  auto all = some();
  all.saved_at = std::chrono::system_clock::now() + 24h;
  write(text_of(all));
  experience_file const next{path()};
  EXPECT_EQ(next.find("add/1", "add bytes=1")->age, 0s);
}

TEST_F(an_experience_file, that_is_not_there_is_no_fault) {
  EXPECT_EQ(log_of_opening(), "");
}

TEST_F(an_experience_file, that_is_damaged_is_told_in_one_line_and_replaced) {
  leave();
  auto text = read();
  text[text.size() / 2] = text[text.size() / 2] == '7' ? '8' : '7';
  write(text);
  auto const told = log_of_opening();
  EXPECT_NE(told.find("is not used"), std::string::npos) << told;
  EXPECT_NE(told.find("its checksum is"), std::string::npos) << told;
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  leave();
  EXPECT_EQ(log_of_opening(true), "");
}

TEST_F(an_experience_file, that_is_none_is_not_waited_for) {
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  EXPECT_NE(log_of_opening().find("it is no file"), std::string::npos);
  std::filesystem::remove(path());
  std::filesystem::create_directory(path());
  EXPECT_NE(log_of_opening().find("it is no file"), std::string::npos);
}

TEST_F(an_experience_file, that_cannot_be_written_is_told_once) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  {
    experience_file file{folder_ / "no folder" / "file"};
    for (int i = 0; i < 3; ++i) {
      file.keep(some().models);
      file.finish();
    }
  }
  auto const told =
      ::testing::internal::GetCapturedStdout() + ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  EXPECT_NE(told.find("is not kept"), std::string::npos) << told;
}

TEST_F(an_experience_file, is_due_when_its_pause_is_over) {
  experience_file file{path(), 1h};
  auto const now = experience_file::clock::now();
  EXPECT_FALSE(file.is_due(now));
  EXPECT_TRUE(file.is_due(now + 2h));
  file.keep(some().models);
  file.finish();
  EXPECT_FALSE(file.is_due(now + 59min));
  EXPECT_TRUE(file.is_due(now + 2h));
}

}  // namespace
}  // namespace sluice::server
