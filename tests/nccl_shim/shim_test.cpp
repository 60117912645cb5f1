/// NCCL's calls through the shim, in several processes with gate and shim preloaded, over the fake
/// driver and the fake NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "tests/from_environment.hpp"
#include "tests/nccl_shim/ranks.hpp"
#include "tests/runtime/gate/built_files.hpp"

namespace sluice::nccl_shim {
namespace {

using ::testing::Each;
using testing::ended;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::variables;

/// A job's ranks, each a process, in a folder of their own.
class job : public ::testing::TestWithParam<char const*> {
 protected:
  job() {
    std::string name = ::testing::TempDir() + "sluice-shim-XXXXXX";
    folder_ = ::mkdtemp(name.data());
  }
  ~job() override { std::filesystem::remove_all(folder_); }

  /// Runs so many ranks, until all have ended.
  [[nodiscard]] std::vector<ended> run(std::string const& scenario, variables const& more = {},
                                       int ranks = 2) const {
    testing::running_ranks all;
    for (int rank = 0; rank < ranks; ++rank) {
      auto own = more;
      own.emplace("SUBMISSION", GetParam());
      if (auto const without = more.find("RANK_WITHOUT");
          without != more.end() && std::stoi(without->second) == rank) {
        own["SLUICE_RUN"] = "";
      }
      all.start({scenario, rank, ranks, folder_, folder_ / "job", preloaded, {}, own});
    }
    return all.wait_for_all();
  }
  [[nodiscard]] std::filesystem::path const& folder() const { return folder_; }
  /// The next job's ranks meet anew.
  void remove_meetings() const {
    for (auto const& entry : std::filesystem::directory_iterator{folder_}) {
      if (entry.path().filename().string().starts_with("job")) {
        std::filesystem::remove(entry);
      }
    }
  }
  /// What the ranks have left where they met.
  [[nodiscard]] std::vector<std::string> left() const {
    std::vector<std::string> names;
    for (auto const& entry : std::filesystem::directory_iterator{folder_}) {
      if (auto name = entry.path().filename().string(); name.starts_with("cut-")) {
        names.push_back(std::move(name));
      }
    }
    return names;
  }

  std::string preloaded = testing::usual_libraries();

 private:
  std::filesystem::path folder_;
};

std::string times(std::uint64_t usual) {
  return std::to_string(repeated(usual));
}

/// What takes long is not tried in all ways.
class job_at_length : public job {};

auto const ended_well = ::testing::Field(&ended::status, 0);

TEST_P(job, ranks_that_pause_together_come_to_rest_and_every_sum_is_right) {
  for (int const ranks : {2, 3}) {
    remove_meetings();
    auto const all = run("pauses", {{"COLLECTIVES", times(4000)}, {"PAUSES", times(200)}}, ranks);
    EXPECT_THAT(all, Each(ended_well));
    EXPECT_THAT(all, Each(::testing::Field(&ended::output, IsEmpty())));
  }
  EXPECT_THAT(left(), IsEmpty());
}

TEST_P(job, ranks_that_may_pause_only_now_and_then_come_to_rest_when_they_do) {
  for (int const ranks : {2, 3}) {
    remove_meetings();
    auto const all = run(
        "pauses", {{"COLLECTIVES", times(8000)}, {"PAUSES", times(200)}, {"FICKLE", "1"}}, ranks);
    EXPECT_THAT(all, Each(ended_well));
    EXPECT_THAT(all, Each(::testing::Field(&ended::output, IsEmpty())));
  }
  EXPECT_THAT(left(), IsEmpty());
}

TEST_P(job_at_length, ranks_that_launch_graphs_of_collectives_come_to_rest_as_well) {
  for (char const* const fickle : {"0", "1"}) {
    for (int const ranks : {2, 3}) {
      remove_meetings();
      auto const all = run("pauses",
                           {{"GRAPHS", "1"},
                            {"COLLECTIVES", times(4000)},
                            {"PAUSES", times(200)},
                            {"FICKLE", fickle}},
                           ranks);
      EXPECT_THAT(all, Each(ended_well));
      EXPECT_THAT(all, Each(::testing::Field(&ended::output, IsEmpty())));
    }
  }
  EXPECT_THAT(left(), IsEmpty());
}

class job_with_submitter : public job {};

TEST_P(job_with_submitter, a_rank_goes_on_while_it_waits_for_one_that_comes_only_when_it_has) {
  auto const all = run("'far ahead'", {{"COLLECTIVES", "50"}});
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, "50 sums are right\n")));
}

TEST_P(job_at_length, without_the_shim_some_rank_does_not_come_to_rest) {
  preloaded = gate::gate_path();
  for (char const* const graphs : {"0", "1"}) {
    for (char const* const scenario : {"pauses", "exchanges"}) {
      remove_meetings();
      auto const all = run(scenario, {{"GRAPHS", graphs},
                                      {"COLLECTIVES", "8000"},
                                      {"ROUNDS", "8000"},
                                      {"PAUSES", "1000"},
                                      {"PATIENCE_MS", "700"}});
      EXPECT_THAT(all, ::testing::Contains(
                           ::testing::Field(&ended::output, HasSubstr("does not come to rest"))));
    }
  }
}

TEST_P(job, ranks_that_send_and_receive_come_to_rest_and_all_of_it_arrives) {
  for (int const ranks : {2, 3, 4}) {
    remove_meetings();
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    auto const all = run("exchanges", {{"ROUNDS", times(3000)}, {"PAUSES", times(100)}}, ranks);
    EXPECT_THAT(all, Each(ended_well));
    EXPECT_THAT(all, Each(::testing::Field(&ended::output, IsEmpty())));
  }
  EXPECT_THAT(left(), IsEmpty());
}

TEST_P(job, ranks_that_send_and_receive_may_pause_only_now_and_then) {
  auto const all =
      run("exchanges",
          {{"ROUNDS", times(3000)}, {"PAUSES", times(100)}, {"FICKLE", "1"}, {"ALONE", "1"}}, 3);
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, IsEmpty())));
}

TEST_P(job, what_was_left_before_a_communicator_is_made_does_not_wait_for_those_that_make_it) {
  EXPECT_THAT(run("'send before split'", {{"SUBMISSION", "deferred"}}),
              Each(::testing::Field(&ended::output, "7\n")));
}

TEST_P(job, a_rank_that_receives_from_one_that_has_died_is_told_so) {
  auto const all = run("receive");
  EXPECT_THAT(all[0].output, HasSubstr("rank 1 has died; ncclRecv will not be made"));
  EXPECT_THAT(all[0].output, HasSubstr("failed with 6\n"));
}

TEST_P(job, a_group_is_one_call) {
  auto const all = run("group");
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, "1 21 201\n")));
}

TEST_P(job, what_ranks_have_left_that_died_before_they_met_is_removed) {
  std::ofstream{folder() / "cut-of-the-dead"} << "nobody has it open";
  std::ofstream{folder() / "somebody-elses"} << "not to be touched";
  EXPECT_THAT(run("group"), Each(ended_well));
  EXPECT_THAT(left(), IsEmpty());
  EXPECT_TRUE(std::filesystem::exists(folder() / "somebody-elses"));
}

TEST_P(job, what_is_split_off_has_numbers_of_its_own) {
  auto const all = run("split");
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, "3 3\n")));
  EXPECT_THAT(left(), IsEmpty());
}

TEST_P(job, ranks_that_cannot_meet_may_be_waited_for) {
  auto const all = run("split", {{"SLUICE_RUNTIME_DIR", ""}, {"ALONE", "1"}});
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, "3 3\n")));
}

TEST_P(job, a_group_in_which_a_communicator_is_made_goes_to_nccl_as_it_is) {
  auto const all = run("'split in group'");
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, "3 3\n")));
}

TEST_P(job, ranks_that_differ_are_told_both_calls) {
  for (char const* const may_pause : {"1", "0"}) {
    remove_meetings();
    auto const all = run("differ", {{"MAY_PAUSE", may_pause}, {"AWAIT_ERROR", "1"}});
    EXPECT_THAT(all, Each(::testing::Field(&ended::output, HasSubstr("failed with 5\n"))));
    EXPECT_THAT(all, Each(::testing::Field(
                         &ended::output,
                         HasSubstr("rank 0 calls ncclAllReduce of 8 elements of type 2, "
                                   "root 0, reduction 0, rank 1 calls ncclAllReduce of 9"))));
  }
}

TEST_P(job, ranks_whose_graphs_differ_are_told_both) {
  for (char const* const may_pause : {"1", "0"}) {
    remove_meetings();
    auto const all = run(
        "differ",
        {{"GRAPHS", "1"}, {"GRAPHS_DIFFER", "1"}, {"MAY_PAUSE", may_pause}, {"AWAIT_ERROR", "1"}});
    // Who finds it in the launch is told by the driver, others by the communicator.
    EXPECT_THAT(all, Each(::testing::Field(&ended::output,
                                           ::testing::AnyOf(HasSubstr("failed with 5\n"),
                                                            HasSubstr("failed with 800\n")))));
    EXPECT_THAT(all, Each(::testing::Field(
                         &ended::output, HasSubstr("rank 0 calls a CUDA graph of 2 collectives, "
                                                   "rank 1 calls a CUDA graph of 1 collective"))));
  }
}

TEST_P(job_at_length,
       ranks_that_launch_graphs_of_two_communicators_or_with_sends_come_to_rest_as_well) {
  for (char const* const holds : {"GRAPH_OF_TWO_COMMUNICATORS", "GRAPH_SENDS"}) {
    for (char const* const fickle : {"0", "1"}) {
      for (int const ranks : {2, 3}) {
        SCOPED_TRACE(std::string{holds} + ", " + std::to_string(ranks) + " ranks, " + fickle);
        remove_meetings();
        auto const all = run("pauses",
                             {{"GRAPHS", "1"},
                              {holds, "1"},
                              {"COLLECTIVES", times(4000)},
                              {"PAUSES", times(200)},
                              {"FICKLE", fickle}},
                             ranks);
        EXPECT_THAT(all, Each(ended_well));
        EXPECT_THAT(all, Each(::testing::Field(&ended::output, IsEmpty())));
      }
    }
  }
  EXPECT_THAT(left(), IsEmpty());
}

TEST_P(job, a_launch_of_such_a_graph_waits_for_no_rank_that_has_died) {
  auto const all = run("death", {{"GRAPHS", "1"}, {"GRAPH_SENDS", "1"}, {"AWAIT_ERROR", "1"}});
  EXPECT_THAT(all[0].output,
              HasSubstr("rank 1 has died; a CUDA graph of 3 collectives will not be made"));
  EXPECT_THAT(all[0].output,
              ::testing::AnyOf(HasSubstr("failed with 6\n"), HasSubstr("failed with 800\n")));
}

TEST_P(job, where_ranks_cannot_tell_each_other_such_a_graph_passes_and_that_is_told_once) {
  auto const all = run("pauses", {{"GRAPHS", "1"},
                                  {"GRAPH_OF_TWO_COMMUNICATORS", "1"},
                                  {"PAUSES", "0"},
                                  {"RANK_WITHOUT", "1"}});
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all[0].output,
              HasSubstr("sluice: a CUDA graph has collectives of several communicators"));
  EXPECT_THAT(all[0].output, ::testing::EndsWith("and a pause may wait for other ranks\n"));
  EXPECT_EQ(all[0].output.find("a CUDA graph"), all[0].output.rfind("a CUDA graph"));
}

TEST_P(job, communicators_that_are_not_to_block_are_agreed_on_as_well) {
  auto const all = run("differ", {{"NOT_BLOCKING", "1"}, {"AWAIT_ERROR", "1"}});
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, ::testing::Not(HasSubstr("init")))));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, HasSubstr("failed with 5\n"))));
}

TEST_P(job, memory_of_the_pool_is_not_registered) {
  EXPECT_THAT(run("registration"),
              Each(::testing::Field(
                  &ended::output, ::testing::AllOf(HasSubstr("not registered with NCCL"),
                                                   HasSubstr("\nnot registered\nregistered\n")))));
}

TEST_P(job, a_rank_that_waits_for_one_that_has_died_is_told_so) {
  auto const all = run("death");
  EXPECT_THAT(all[0].output, HasSubstr("rank 1 has died"));
  EXPECT_THAT(all[0].output, HasSubstr("failed with 6\n"));
}

TEST_P(job, a_communicator_is_aborted_whatever_its_device_has_still_to_be_given) {
  auto const all = run("abort", {{"MAY_PAUSE", "0"}});
  EXPECT_THAT(all[0].output, HasSubstr("failed with 6\naborted\n"));
}

TEST_P(job, what_is_aborted_is_neither_waited_for_nor_kept) {
  auto const all = run("aborts", {{"MAY_PAUSE", "0"}, {"PATIENCE_MS", "60000"}});
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, "3, kept 0\n")));
}

TEST_P(job_at_length, whenever_a_rank_dies_the_others_leave_their_waits) {
  std::minstd_rand random{std::random_device{}()};
  for (auto kills = from_environment("SLUICE_TEST_KILLS", 40); kills > 0; --kills) {
    remove_meetings();
    auto const victim = random() % 3;
    auto const after_us = std::to_string(random() % 30'000);
    SCOPED_TRACE("rank " + std::to_string(victim) + " after " + after_us + " us");
    auto const all = run(
        "deaths",
        {{"DIES", std::to_string(victim)}, {"DIES_AFTER_US", after_us}, {"PACE_US", "1000"}}, 3);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (rank != victim) {
        EXPECT_EQ(all[rank].status, 0);
        EXPECT_THAT(all[rank].output, HasSubstr("ended with 6\n"));
      }
    }
    EXPECT_THAT(left(), IsEmpty());
  }
}

TEST_P(job, the_error_of_a_call_is_its_result_or_the_communicators_asynchronous_error) {
  EXPECT_THAT(run("fail"), Each(::testing::Field(&ended::output, "failed with 1\n")));
}

TEST_P(job, a_call_inside_of_a_micro_batch_is_refused) {
  EXPECT_THAT(
      run("expendable"),
      Each(::testing::Field(&ended::output, ::testing::AllOf(HasSubstr("inside of a micro-batch"),
                                                             HasSubstr("failed with 5\n")))));
}

TEST_P(job, a_launch_of_a_graph_with_sends_inside_of_a_micro_batch_is_refused) {
  EXPECT_THAT(run("expendable", {{"GRAPHS", "1"}, {"GRAPH_SENDS", "1"}}),
              Each(::testing::Field(
                  &ended::output,
                  ::testing::AllOf(HasSubstr("it is not of all ranks of one communicator alone"),
                                   HasSubstr("failed with 800\n")))));
}

TEST_P(job, a_launch_of_a_graph_inside_of_a_micro_batch_is_refused) {
  EXPECT_THAT(run("expendable", {{"GRAPHS", "1"}}),
              Each(::testing::Field(
                  &ended::output,
                  ::testing::AllOf(HasSubstr("a CUDA graph of 2 collectives was launched inside of "
                                             "a micro-batch: other ranks would wait"),
                                   HasSubstr("failed with 800\n")))));
}

TEST_P(job, micro_batches_with_collectives_inside_are_kept_by_all_or_run_again) {
  for (int const ranks : {2, 3}) {
    remove_meetings();
    auto const all = run("together", {}, ranks);
    EXPECT_THAT(all, Each(ended_well));
    EXPECT_THAT(all, Each(::testing::Field(&ended::output, "kept 60, some again\n")));
  }
  EXPECT_THAT(left(), IsEmpty());
}

TEST_P(job, graphs_of_collectives_inside_of_micro_batches_are_kept_by_all_or_launched_again) {
  for (int const ranks : {2, 3}) {
    remove_meetings();
    auto const all = run("together", {{"GRAPHS", "1"}}, ranks);
    EXPECT_THAT(all, Each(ended_well));
    EXPECT_THAT(all, Each(::testing::Field(&ended::output, "kept 60, some again\n")));
  }
}

TEST_P(job, micro_batches_with_several_communicators_inside_are_kept_by_all_or_run_again) {
  for (int const ranks : {3, 4}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    remove_meetings();
    auto const all = run("together", {{"SEVERAL", "1"}}, ranks);
    EXPECT_THAT(all, Each(ended_well));
    EXPECT_THAT(all, Each(::testing::Field(&ended::output, "kept 60, some again\n")));
  }
  EXPECT_THAT(left(), IsEmpty());
}

TEST_P(job, a_communicator_with_ranks_that_do_not_end_the_micro_batch_is_refused_inside) {
  // One that lost its memory might be refused, and end, before another has come to its first call.
  auto const all = run("together", {{"SEVERAL", "1"}, {"UNTOLD", "1"}, {"LOSES_MEMORY", "0"}}, 4);
  EXPECT_THAT(all,
              Each(::testing::Field(
                  &ended::output,
                  ::testing::AllOf(HasSubstr("ncclAllReduce was called inside of a micro-batch: "
                                             "its communicator has ranks that are not in"),
                                   HasSubstr("ended with 5\n")))));
}

TEST_P(job, where_others_are_not_told_of_what_runs_again_ranks_part) {
  EXPECT_THAT(run("together", {{"SECRETLY", "1"}}),
              ::testing::Contains(::testing::Field(
                  &ended::output,
                  ::testing::AnyOf(HasSubstr("sum "), HasSubstr("ranks differ in collective")))));
}

TEST_P(job, a_rank_that_dies_in_a_micro_batch_ends_the_others_waits) {
  std::minstd_rand random{std::random_device{}()};
  for (auto kills = 2 + from_environment("SLUICE_TEST_KILLS", 40) / 4; kills > 0; --kills) {
    remove_meetings();
    bool const several = kills % 2 == 1;
    int const ranks = several ? 4 : 3;
    auto const after_us = std::to_string(random() % 20'000);
    SCOPED_TRACE("after " + after_us + " us, of " + std::to_string(ranks) + " ranks");
    auto const all = run("together",
                         {{"DIES", "1"},
                          {"DIES_AFTER_US", after_us},
                          {"SEVERAL", several ? "1" : "0"},
                          {"MICRO_BATCHES", "800"},
                          {"PATIENCE_MS", "100"}},
                         ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank != 1) {
        EXPECT_EQ(all[static_cast<std::size_t>(rank)].status, 0);
        EXPECT_THAT(all[static_cast<std::size_t>(rank)].output, HasSubstr("ended with 6\n"));
      }
    }
  }
}

TEST_P(job, where_a_rank_does_not_take_part_nobody_is_asked) {
  auto const all = run("group", {{"RANK_WITHOUT", "1"}});
  EXPECT_THAT(all, Each(ended_well));
  EXPECT_THAT(all[0].output, HasSubstr("1 of a communicator's 2 ranks are under `sluice run`"));
  EXPECT_THAT(all, Each(::testing::Field(&ended::output, HasSubstr("1 21 201\n"))));
  EXPECT_THAT(left(), IsEmpty());
}

std::string name_of_way(::testing::TestParamInfo<char const*> const& of) {
  return of.param;
}

INSTANTIATE_TEST_SUITE_P(calls, job, ::testing::Values("direct", "deferred", "unbound"),
                         name_of_way);
INSTANTIATE_TEST_SUITE_P(calls, job_with_submitter, ::testing::Values("deferred", "unbound"),
                         name_of_way);
INSTANTIATE_TEST_SUITE_P(calls, job_at_length, ::testing::Values("direct", "deferred"),
                         name_of_way);

}  // namespace
}  // namespace sluice::nccl_shim
