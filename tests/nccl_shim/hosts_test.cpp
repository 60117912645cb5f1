/// Ranks on two hosts that are joined by a cable agree through torch's store on one of them.
#include "nccl_shim/agreement/hosts.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/nccl_shim/fake_nccl.hpp"
#include "tests/nccl_shim/ranks.hpp"
#include "tests/nccl_shim/store_server.hpp"
#include "tests/nccl_shim/two_hosts.hpp"
#include "tests/runtime/gate/built_files.hpp"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using testing::ended;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::running_ranks;
using testing::two_hosts;
using testing::variables;

auto says(std::string const& text) {
  return Field(&ended::output, HasSubstr(text));
}
auto const ended_well = Field(&ended::status, 0);
auto const says_nothing = Field(&ended::output, IsEmpty());

/// What torchrun tells its ranks.
class environment_of_job : public ::testing::Test {
 protected:
  [[nodiscard]] job_hosts hosts() const {
    return hosts_of_job([this](char const* name) {
      auto const found = given.find(name);
      return found != given.end() ? found->second : std::string{};
    });
  }

  variables given{{"WORLD_SIZE", "4"},
                  {"LOCAL_WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "first-host"},
                  {"MASTER_PORT", "29500"}};
};

TEST_F(environment_of_job, tells_of_several_hosts_and_where_their_store_is) {
  auto const found = hosts();
  ASSERT_TRUE(found.store_at.has_value());
  EXPECT_EQ(found.store_at->host, "first-host");
  EXPECT_EQ(found.store_at->port, 29500);
  EXPECT_EQ(found.store_at->patience, 10s);
}

TEST_F(environment_of_job, tells_of_one_host_where_all_ranks_are_on_it_or_it_does_not_say) {
  given["LOCAL_WORLD_SIZE"] = "4";
  EXPECT_FALSE(hosts().several);
  given.erase("LOCAL_WORLD_SIZE");
  EXPECT_FALSE(hosts().several);
}

TEST_F(environment_of_job, is_told_what_is_wrong_with_it_and_what_would_be_right) {
  given["SLUICE_LOST_AFTER"] = "soon";
  EXPECT_THAT(hosts().problem, HasSubstr("from 1 to 3600, not 'soon'"));
  given["MASTER_PORT"] = "http";
  EXPECT_THAT(hosts().problem, HasSubstr("MASTER_PORT must be the port of the job's store"));
  given.erase("MASTER_ADDR");
  EXPECT_THAT(hosts().problem, HasSubstr("MASTER_ADDR must be the host of the job's store"));
  EXPECT_TRUE(hosts().several);
}

/// A job with two ranks on the first host, where the store is, and the rest on the second.
class job_on_two_hosts : public ::testing::TestWithParam<char const*> {
 protected:
  static void SetUpTestSuite() { hosts = std::make_unique<two_hosts>(); }
  static void TearDownTestSuite() { hosts.reset(); }

  job_on_two_hosts() {
    std::string name = ::testing::TempDir() + "sluice-hosts-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    meeting_file = folder_ / "job";
  }
  ~job_on_two_hosts() override { std::filesystem::remove_all(folder_); }
  void SetUp() override {
    if (!hosts->problem().empty()) {
      GTEST_SKIP() << "there are no two hosts to be had: " << hosts->problem();
    }
    store.emplace(hosts->command(0));
  }

  /// Starts so many ranks, so many of which are on the first host.
  void start(std::string const& scenario, variables const& more = {}, int ranks = 3,
             int on_first = 2) {
    for (int rank = 0; rank < ranks; ++rank) {
      std::size_t const host = rank < on_first ? 0 : 1;
      int const beside = host == 0 ? on_first : ranks - on_first;
      variables own{{"SUBMISSION", GetParam()},
                    {"WORLD_SIZE", std::to_string(ranks)},
                    {"LOCAL_WORLD_SIZE", std::to_string(beside)},
                    {"MASTER_ADDR", two_hosts::address(0)},
                    {"MASTER_PORT", std::to_string(store->port())},
                    {"SLUICE_LOST_AFTER", "10"}};
      for (auto const& [variable, value] : more) {
        own[variable] = value;
      }
      if (rank == rank_without) {
        own["SLUICE_RUN"] = "";
      }
      auto const runtime = folder_ / hosts->name(host);
      std::filesystem::create_directories(runtime);
      all.start({scenario, rank, ranks, runtime, meeting_file, preloaded,
                 testing::to_shell(hosts->command(host)), own});
    }
  }
  [[nodiscard]] std::filesystem::path const& folder() const { return folder_; }

  /// Waits until all ranks have begun so many collectives. False if they do not.
  [[nodiscard]] bool has_begun(std::size_t collectives, unsigned ranks) const {
    int const file = ::open(meeting_file.c_str(), O_RDWR | O_CREAT, 0600);
    if (::ftruncate(file, sizeof(fake_nccl::meeting_file)) != 0) {
      return false;
    }
    void* const at = ::mmap(nullptr, sizeof(fake_nccl::meeting_file), PROT_READ | PROT_WRITE,
                            MAP_SHARED, file, 0);
    ::close(file);
    auto const& begun =
        static_cast<fake_nccl::meeting_file*>(at)->communicators[0].begun.at(collectives);
    auto const until = std::chrono::steady_clock::now() + 60s;
    while (begun.load() < ranks && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    bool const has = begun.load() >= ranks;
    ::munmap(at, sizeof(fake_nccl::meeting_file));
    return has;
  }

  static inline std::unique_ptr<two_hosts> hosts;
  std::optional<testing::store_server> store;
  std::filesystem::path meeting_file;
  std::string preloaded = testing::usual_libraries();
  int rank_without = -1;  // `sluice run`
  running_ranks all;

 private:
  std::filesystem::path folder_;
};

/// What is tried in all ways.
class training_on_two_hosts : public job_on_two_hosts {};

TEST_P(training_on_two_hosts, ranks_that_pause_together_come_to_rest_and_every_sum_is_right) {
  start("pauses", {{"COLLECTIVES", "300"}, {"PAUSES", "20"}});
  EXPECT_THAT(all.wait_for_all(), Each(AllOf(ended_well, says_nothing)));
}

TEST_P(training_on_two_hosts, ranks_that_may_pause_only_now_and_then_come_to_rest_when_they_do) {
  start("pauses", {{"COLLECTIVES", "300"}, {"PAUSES", "20"}, {"FICKLE", "1"}});
  EXPECT_THAT(all.wait_for_all(), Each(AllOf(ended_well, says_nothing)));
}

TEST_P(training_on_two_hosts, micro_batches_with_collectives_inside_are_kept_by_all_or_run_again) {
  start("together", {{"MICRO_BATCHES", "20"}});
  EXPECT_THAT(all.wait_for_all(),
              Each(AllOf(ended_well, Field(&ended::output, "kept 20, some again\n"))));
}

TEST_P(training_on_two_hosts, so_are_those_with_several_communicators_of_one_host_and_of_both) {
  start("together", {{"MICRO_BATCHES", "20"}, {"SEVERAL", "1"}});
  EXPECT_THAT(all.wait_for_all(),
              Each(AllOf(ended_well, Field(&ended::output, "kept 20, some again\n"))));
}

TEST_P(job_on_two_hosts, what_is_split_off_has_numbers_of_its_own) {
  start("split");
  EXPECT_THAT(all.wait_for_all(), Each(AllOf(ended_well, Field(&ended::output, "6 6\n"))));
}

TEST_P(job_on_two_hosts, ranks_that_differ_are_told_both_calls) {
  for (char const* const may_pause : {"1", "0"}) {
    all = {};
    meeting_file = folder() / ("job" + std::string{may_pause});  // another communicator
    start("differ", {{"MAY_PAUSE", may_pause}, {"AWAIT_ERROR", "1"}}, 2, 1);
    EXPECT_THAT(all.wait_for_all(),
                Each(AllOf(says("failed with 5\n"),
                           says("rank 0 calls ncclAllReduce of 8 elements of type 2, root 0, "
                                "reduction 0, rank 1 calls ncclAllReduce of 9"))));
  }
}

/// So that a job is still at work when a rank dies or its host has been cut off, however busy the machine is.
variables::value_type const long_enough{"PACE_US", "10000"};

TEST_P(job_on_two_hosts, a_rank_that_is_killed_is_named_to_those_on_the_other_host) {
  start("deaths",
        {{"DIES", "2"}, {"DIES_AFTER_US", "300000"}, {"SLUICE_LOST_AFTER", "8"}, long_enough});
  auto const became = all.wait_for_all();
  for (std::size_t const rank : {0, 1}) {
    EXPECT_THAT(became[rank],
                AllOf(ended_well, says("ended with 6\n"),
                      says("rank 2 on " + hosts->name(1) + " has died, or has been silent")));
  }
}

TEST_P(job_on_two_hosts, a_rank_that_is_killed_on_the_same_host_is_named_to_all) {
  start("deaths",
        {{"DIES", "1"}, {"DIES_AFTER_US", "300000"}, {"SLUICE_LOST_AFTER", "600"}, long_enough});
  auto const became = all.wait_for_all();
  for (std::size_t const rank : {0, 2}) {  // by its process, long before it counts as silent
    EXPECT_THAT(became[rank], AllOf(ended_well, says("ended with 6\n"),
                                    says("rank 1 on " + hosts->name(0) + " has died")));
  }
}

TEST_P(job_on_two_hosts, a_rank_that_is_stopped_for_too_long_is_named) {
  start("deaths", {{"DIES", "2"},
                   {"DIES_BY", std::to_string(SIGSTOP)},
                   {"DIES_AFTER_US", "300000"},
                   {"SLUICE_LOST_AFTER", "8"},
                   long_enough});
  for (std::size_t const rank : {0, 1}) {
    EXPECT_THAT(all.wait(rank),
                AllOf(ended_well, says("ended with 6\n"),
                      says("rank 2 on " + hosts->name(1) + " has died, or has been silent")));
  }
  pid_t stopped = 0;
  std::ifstream{meeting_file.string() + ".dies"} >> stopped;
  ASSERT_GT(stopped, 0);
  ::kill(stopped, SIGKILL);
  EXPECT_NE(all.wait(2).status, 0);
}

TEST_P(job_on_two_hosts, a_store_that_dies_ends_all_waits) {
  start("deaths", {{"SLUICE_LOST_AFTER", "8"}, long_enough});
  ASSERT_TRUE(has_begun(50, 3));
  store->kill(SIGKILL);
  EXPECT_THAT(all.wait_for_all(),
              Each(AllOf(ended_well, says("ended with 6\n"), says("does not answer"),
                         says("the store at " + two_hosts::address(0)))));
}

TEST_P(job_on_two_hosts, a_store_that_only_does_not_answer_ends_all_waits) {
  start("deaths", {{"SLUICE_LOST_AFTER", "8"}, long_enough});
  ASSERT_TRUE(has_begun(50, 3));
  store->kill(SIGSTOP);
  EXPECT_THAT(all.wait_for_all(),
              Each(AllOf(ended_well, says("ended with 6\n"), says("does not answer"))));
}

TEST_P(job_on_two_hosts, where_the_cable_is_pulled_both_sides_leave_their_waits) {
  start("deaths", {{"SLUICE_LOST_AFTER", "8"}, long_enough});
  ASSERT_TRUE(has_begun(50, 3));
  hosts->pull_cable();
  auto const became = all.wait_for_all();
  EXPECT_THAT(became, Each(AllOf(ended_well, says("ended with 6\n"))));
  EXPECT_THAT(became[0], says("rank 2 on " + hosts->name(1)));
  EXPECT_THAT(became[2], says("does not answer"));
  hosts->plug_cable();
}

TEST_P(job_on_two_hosts, communicators_of_one_host_do_without_the_store) {
  start("pauses",
        {{"COLLECTIVES", "2000"}, {"PAUSES", "40"}, {"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "2"}},
        2, 2);
  ASSERT_TRUE(has_begun(1, 2));
  store->kill(SIGKILL);
  EXPECT_THAT(all.wait_for_all(), Each(AllOf(ended_well, says_nothing)));
}

TEST_P(job_on_two_hosts, jobs_on_one_host_do_not_look_for_a_store) {
  store->kill(SIGKILL);
  start("pauses", {{"COLLECTIVES", "2000"}, {"PAUSES", "40"}}, 2, 2);
  EXPECT_THAT(all.wait_for_all(), Each(AllOf(ended_well, says_nothing)));
}

/// Ranks that make their calls all the same.
auto const works_alone = AllOf(ended_well, says("3 33 303\n"));

TEST_P(job_on_two_hosts, where_no_store_answers_nobody_is_asked_and_all_are_told_why) {
  store->kill(SIGKILL);
  start("group", {{"SLUICE_LOST_AFTER", "1"}});
  auto const became = all.wait_for_all();
  EXPECT_THAT(became, Each(AllOf(works_alone, says("no store of torch's answers at "
                                                   "MASTER_ADDR:MASTER_PORT"))));
  EXPECT_THAT(became[0], says("its ranks do not agree where they pause"));
}

TEST_P(job_on_two_hosts, where_it_is_not_said_where_the_store_is_all_are_told_so) {
  start("group", {{"MASTER_ADDR", ""}});
  EXPECT_THAT(all.wait_for_all(), Each(AllOf(works_alone, says("MASTER_ADDR must be the host"))));
}

TEST_P(job_on_two_hosts, where_the_library_for_the_store_is_missing_all_are_told_where_it_belongs) {
  std::filesystem::copy(gate::built("lib/libsluice_nccl.so"), folder());
  preloaded = gate::gate_path() + ":" + (folder() / "libsluice_nccl.so").string();
  start("group");
  EXPECT_THAT(
      all.wait_for_all(),
      Each(AllOf(works_alone,
                 says("libsluice_store.so, which belongs into the folder _torch/<version>"))));
}

TEST_P(job_on_two_hosts, where_one_rank_does_not_take_part_nobody_is_asked) {
  rank_without = 2;
  start("group");
  auto const became = all.wait_for_all();
  EXPECT_THAT(became, Each(works_alone));
  EXPECT_THAT(became[0],
              says("2 of a communicator's 3 ranks are under `sluice run` and have joined "
                   "in the store at"));
}

std::string name_of_way(::testing::TestParamInfo<char const*> const& of) {
  return of.param;
}

INSTANTIATE_TEST_SUITE_P(calls, job_on_two_hosts, ::testing::Values("direct", "deferred"),
                         name_of_way);
INSTANTIATE_TEST_SUITE_P(calls, training_on_two_hosts,
                         ::testing::Values("direct", "deferred", "unbound"), name_of_way);

}  // namespace
}  // namespace sluice::nccl_shim
