#include "memhandover/ledger/pool_account.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/chunk_notes.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using testing::HasSubstr;
using testing::Not;

class pool_account_test : public testing::Test {
 protected:
  static constexpr std::uint16_t job = 3;
  static constexpr std::uint16_t other_job = 4;
  static constexpr std::uint16_t server = 5;

  pool_account_test() { grant(100, 100); }

  void grant(std::uint32_t to_all, std::uint32_t to_parked) {
    view_.header().grantable.store(to_all);
    view_.header().grantable_to_parked.store(to_parked);
  }

  void give(std::uint32_t first, std::uint32_t count, owner who, std::uint16_t client) {
    for (auto chunk = first; chunk < first + count; ++chunk) {
      view_.chunks()[chunk].store(chunk_state{who, false, client, 1}.pack());
    }
  }

  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, 100});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
};

TEST_F(pool_account_test, tells_a_job_that_is_alone_what_it_holds_and_what_is_free) {
  give(0, 30, owner::training, job);
  view_.mailbox(job).persistent_chunks.store(10);
  EXPECT_EQ(account_of(view_, job),
            "of the pool's 200 MiB this job holds 20 MiB for good and 40 MiB in its step arena, "
            "and 140 MiB are free");
  EXPECT_EQ(remedies(view_, job),
            "a larger pool (--memory of `sluice run`, pool.memory of the policy)");
}

TEST_F(pool_account_test, names_the_models_that_hold_memory_and_the_reserve) {
  give(0, 10, owner::training, job);
  give(10, 5, owner::serving, server);
  give(15, 20, owner::serving, server);
  give(35, 5, owner::training, other_job);
  give(40, 60, owner::dirty, 0);
  chunk_notes notes{view_, server};
  notes.say(std::array{10U, 11U, 12U, 13U, 14U}, "bert");
  for (std::uint32_t chunk = 15; chunk < 35; ++chunk) {
    notes.say(std::array{chunk}, "resnet");
  }
  grant(50, 50);
  view_.mailbox(job).micro_batch.store(64);
  EXPECT_EQ(account_of(view_, job),
            "of the pool's 200 MiB this job holds 0 B for good and 20 MiB in its step arena, "
            "models hold 50 MiB (resnet 40 MiB, bert 10 MiB), other training jobs hold 10 MiB, "
            "and 120 MiB are free, of which 20 MiB are kept for cold starts");
  EXPECT_EQ(remedies(view_, job),
            "a smaller micro_batch (now 64 samples); a larger pool (--memory of `sluice run`, "
            "pool.memory of the policy); a shorter idle timeout of resnet, bert; fewer training "
            "jobs in this pool");
}

TEST_F(pool_account_test,
       tells_what_is_kept_for_jobs_that_are_parked_from_what_is_for_cold_starts) {
  give(0, 40, owner::training, other_job);
  grant(20, 60);
  EXPECT_THAT(account_of(view_, job),
              HasSubstr("and 120 MiB are free, of which 80 MiB are kept for jobs that are parked"));
  EXPECT_THAT(account_of(view_, job), Not(HasSubstr("cold starts")));
  grant(20, 30);
  EXPECT_THAT(account_of(view_, job),
              HasSubstr("and 120 MiB are free, of which 60 MiB are kept for cold starts and "
                        "20 MiB for jobs that are parked"));
}

TEST_F(pool_account_test, names_what_engines_hold_beside_other_jobs) {
  constexpr std::uint16_t engine = 6;
  give(0, 10, owner::training, job);
  give(10, 5, owner::training, other_job);
  give(15, 25, owner::engine, engine);
  EXPECT_EQ(account_of(view_, job),
            "of the pool's 200 MiB this job holds 0 B for good and 20 MiB in its step arena, "
            "other training jobs hold 10 MiB, engines hold 50 MiB, and 120 MiB are free");
  EXPECT_THAT(remedies(view_, job), HasSubstr("; engines that keep less, or fewer of them"));
  EXPECT_THAT(account_of(view_, engine), HasSubstr("other training jobs hold 30 MiB, and "));
  EXPECT_THAT(account_of(view_, engine), Not(HasSubstr("engines hold")));
}

TEST_F(pool_account_test, sums_up_the_models_that_a_sentence_has_no_room_for) {
  chunk_notes notes{view_, server};
  for (std::uint32_t i = 0; i < 9; ++i) {
    give(i, 1, owner::serving, server);
    if (i < 8) {
      notes.say(std::array{i}, "model" + std::to_string(i));
    }
  }
  auto const text = account_of(view_, job);
  EXPECT_THAT(text, HasSubstr("models hold 18 MiB (model0 2 MiB, "));
  EXPECT_THAT(text, HasSubstr("model4 2 MiB, others 8 MiB)"));
  EXPECT_THAT(text, Not(HasSubstr("model5")));
}

}  // namespace
}  // namespace sluice::memhandover
