/// An engine's memory by the chunk, in a pool with its broker, a job and a server: what comes is zero, what is gone cannot be
/// reached, and what is demanded waits for the engine's own time.

#include "memhandover/client/elastic_space.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "tests/from_environment.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/fault_world.hpp"
#include "tests/runtime/step/injected_calls.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using memhandover::client_kind;
using memhandover::demand_answer;
using memhandover::elastic_space;
using memhandover::lifetime;
using memhandover::tenant_client;
using those = std::vector<std::uint32_t>;
using std::chrono::steady_clock;

steady_clock::time_point soon() {
  return steady_clock::now() + patience;
}

/// Whether the kernel finds memory there.
bool readable(std::byte const* where) {
  std::array<int, 2> ends{};
  EXPECT_EQ(::pipe(ends.data()), 0);
  memhandover::unique_fd const from{ends[0]};
  memhandover::unique_fd const to{ends[1]};
  auto const written = ::write(to.get(), where, 1);
  EXPECT_TRUE(written == 1 || errno == EFAULT) << std::strerror(errno);
  return written == 1;
}

bool all_are(std::byte const* where, std::size_t bytes, std::byte value) {
  return std::all_of(where, where + bytes, [value](std::byte each) { return each == value; });
}

class elastic_space_test : public testing::Test {
 protected:
  void SetUp() override { world_.start_broker(); }

  [[nodiscard]] std::unique_ptr<elastic_space> space(std::uint32_t count = 24) const {
    auto made = std::make_unique<elastic_space>(world_.broker(), "vllm");
    made->reserve(count);
    return made;
  }
  [[nodiscard]] std::uint64_t engine_chunks() const {
    return memhandover::query_status(world_.folder())["pool"]["engine_bytes"].get<std::uint64_t>() /
           chunk_;
  }
  /// The writer reads a tenant's mail a moment after it has been posted.
  void await_engine_chunks(std::uint64_t count) const {
    for (auto const until = soon(); engine_chunks() != count;) {
      ASSERT_LT(steady_clock::now(), until) << engine_chunks() << " instead of " << count;
    }
  }
  [[nodiscard]] std::shared_ptr<memhandover::serving_pool> join_server() const {
    return memhandover::serving_pool::join(
        {.runtime_dir = world_.folder(), .demands_from_engines = true});
  }
  /// A job that has so many chunks, which it keeps.
  [[nodiscard]] std::unique_ptr<tenant_client> keeping_job(std::uint32_t count) const {
    auto job = tenant_client::join(world_.broker(), client_kind::training, "job",
                                   [](auto const& /*what*/) { return demand_answer{}; });
    job->ask(count, lifetime::lasting, soon());
    EXPECT_EQ(job->collect().size(), count);
    job->mailbox().kept_chunks.store(count);
    return job;
  }

  /// The space's, in the status.
  [[nodiscard]] nlohmann::json client() const {
    auto const status = memhandover::query_status(world_.folder());
    for (auto const& each : status["clients"]) {
      if (each["kind"] == "engine") {
        return each;
      }
    }
    return {};
  }
  [[nodiscard]] nlohmann::json parking() const { return client()["parking"]; }
  void order(char const* type) const {
    auto const id = memhandover::query_status(world_.folder())["pool"]["id"].get<std::string>();
    memhandover::give_order(world_.folder(), {{"type", type},
                                              {"pool_id", std::stoull(id, nullptr, 16)},
                                              {"slot", client()["slot"]},
                                              {"pid", client()["pid"]}});
  }

  fault_world world_{"host"};  // 24 chunks
  std::uint64_t chunk_ = world_.broker().chunk_bytes;
};

TEST_F(elastic_space_test, what_comes_is_zero_and_what_has_gone_cannot_be_reached) {
  auto const mine = space(4);
  auto* const base = mine->base();
  EXPECT_FALSE(readable(base));
  ASSERT_TRUE(mine->back(those{0, 2}, soon()));
  EXPECT_TRUE(all_are(base, chunk_, std::byte{0}));
  EXPECT_TRUE(all_are(base + 2 * chunk_, chunk_, std::byte{0}));
  EXPECT_FALSE(readable(base + chunk_));
  EXPECT_FALSE(readable(base + 3 * chunk_));
  std::memset(base, 1, chunk_);
  std::memset(base + 2 * chunk_, 2, chunk_);
  mine->give_back(those{0});
  EXPECT_FALSE(readable(base));
  EXPECT_TRUE(all_are(base + 2 * chunk_, chunk_, std::byte{2}));
  await_engine_chunks(1);
}

TEST_F(elastic_space_test, its_own_old_contents_do_not_come_back) {
  auto const mine = space();
  those all(24);
  std::iota(all.begin(), all.end(), 0U);
  ASSERT_TRUE(mine->back(all, soon()));
  std::memset(mine->base(), 7, 24 * chunk_);
  mine->give_back(all);
  ASSERT_TRUE(mine->back(all, soon()));
  EXPECT_TRUE(all_are(mine->base(), 24 * chunk_, std::byte{0}));
}

TEST_F(elastic_space_test, others_contents_do_not_come) {
  auto const mine = space();
  {
    auto const server = join_server();
    auto const all = server->acquire(24 * chunk_, soon());
    std::memset(all.data(), 9, all.bytes());
  }
  those all(24);
  std::iota(all.begin(), all.end(), 0U);
  ASSERT_TRUE(mine->back(all, soon()));
  EXPECT_TRUE(all_are(mine->base(), 24 * chunk_, std::byte{0}));
}

TEST_F(elastic_space_test, all_that_is_asked_for_comes_or_nothing) {
  auto const job = keeping_job(20);
  auto const mine = space();
  EXPECT_FALSE(mine->back(those{0, 1, 2, 3, 4}, steady_clock::now()));
  EXPECT_FALSE(mine->back(those{0, 1, 2, 3, 4}, steady_clock::now() + 1ms));
  await_engine_chunks(0);
  EXPECT_FALSE(readable(mine->base()));
  EXPECT_TRUE(mine->back(those{0, 1, 2, 3}, soon()));
  EXPECT_EQ(engine_chunks(), 4U);
}

TEST_F(elastic_space_test, who_is_patient_gets_what_comes_free) {
  auto job = keeping_job(24);
  auto const mine = space();
  std::jthread const ends{[&] { job.reset(); }};
  EXPECT_TRUE(mine->back(those{0, 1}, soon()));
}

TEST_F(elastic_space_test, a_demand_waits_until_the_engine_has_given) {
  auto const mine = space();
  those all(24);
  std::iota(all.begin(), all.end(), 0U);
  ASSERT_TRUE(mine->back(all, soon()));
  std::memset(mine->base(), 3, 24 * chunk_);
  mine->answer(1);
  auto const server = join_server();
  EXPECT_EQ(mine->demanded(), 0U);
  std::jthread gives{[&] {
    auto const wanted = mine->await_demand(soon());
    EXPECT_GE(wanted, 10U);
    for (std::uint32_t place = 5; mine->demanded() > 0; ++place) {
      mine->give_back(those{place});
    }
  }};
  auto const taken = server->acquire(10 * chunk_, soon());
  gives.join();
  std::memset(taken.data(), 9, taken.bytes());
  EXPECT_FALSE(readable(mine->base() + 5 * chunk_));
  EXPECT_TRUE(all_are(mine->base(), 5 * chunk_, std::byte{3}));
  EXPECT_TRUE(all_are(mine->base() + 20 * chunk_, 4 * chunk_, std::byte{3}));
  EXPECT_EQ(mine->demanded(), 0U);
}

TEST_F(elastic_space_test, before_it_answers_all_that_it_has_counts_as_kept) {
  auto const mine = space();
  ASSERT_TRUE(mine->back(those{0, 1, 2}, soon()));
  auto const server = join_server();
  EXPECT_THROW((void)server->acquire(24 * chunk_, soon()), error);
  EXPECT_EQ(mine->demanded(), 0U);
}

TEST_F(elastic_space_test, what_is_kept_is_not_demanded) {
  auto const mine = space();
  ASSERT_TRUE(mine->back(those{0, 1, 2}, soon()));
  mine->answer(1);
  auto const server = join_server();
  try {
    (void)server->acquire(24 * chunk_, soon());
    ADD_FAILURE() << "there are not so many";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
    EXPECT_THAT(why.what(), testing::HasSubstr("keeps 64 KiB"));
  }
}

TEST_F(elastic_space_test, a_demand_ends_when_no_more_can_come) {
  auto const mine = space();
  ASSERT_TRUE(mine->back(those{0, 1, 2}, soon()));
  mine->answer(0);
  auto const server = join_server();
  std::jthread const refuses{[&] {
    EXPECT_GT(mine->await_demand(soon()), 0U);
    mine->refuse_rest();
  }};
  try {
    (void)server->acquire(24 * chunk_, steady_clock::now() + patience);
    ADD_FAILURE() << "nothing was given";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
  }
  EXPECT_EQ(mine->demanded(), 0U);
}

TEST_F(elastic_space_test, a_demand_that_is_withdrawn_is_none_any_more) {
  auto const mine = space();
  ASSERT_TRUE(mine->back(those{0, 1, 2}, soon()));
  mine->answer(0);
  auto const server = join_server();
  EXPECT_THROW((void)server->acquire(24 * chunk_, steady_clock::now() + 50ms), error);
  for (auto const until = soon(); mine->demanded() > 0;) {
    ASSERT_LT(steady_clock::now(), until);
  }
  EXPECT_TRUE(mine->back(those{3}, soon()));
}

TEST_F(elastic_space_test, an_order_takes_all_and_what_is_needed_comes_back_when_it_ends) {
  auto const mine = space();
  ASSERT_TRUE(mine->back(those{0, 1, 2}, soon()));
  std::memset(mine->base(), 4, 3 * chunk_);
  EXPECT_THROW(order("park"), error) << "it does not answer yet";
  mine->answer(1);
  EXPECT_FALSE(mine->is_ordered_away());
  std::jthread const orders{[&] { order("park"); }};
  EXPECT_EQ(mine->await_demand(soon()), 0U);
  ASSERT_TRUE(mine->is_ordered_away());
  EXPECT_FALSE(parking()["operator"]["done"]);
  EXPECT_THROW(mine->rest(1), error) << "it has some still";
  mine->give_back(those{0, 1, 2});
  EXPECT_THROW(mine->rest(0), error);
  mine->rest(1);
  EXPECT_THROW(mine->rest(1), error);
  EXPECT_TRUE(mine->is_parked());
  EXPECT_FALSE(mine->is_ordered_away());
  EXPECT_TRUE(parking()["operator"]["done"]);
  EXPECT_EQ(parking()["parked_bytes"], chunk_);
  EXPECT_EQ(parking()["zero_bytes"], chunk_);
  await_engine_chunks(0);
  EXPECT_FALSE(mine->back(those{0}, soon())) << "it is to stay away";

  std::jthread const wakes{[&] { order("wake"); }};
  (void)mine->await_demand(soon());
  ASSERT_TRUE(mine->back(those{0}, soon()));
  EXPECT_FALSE(mine->is_parked());
  EXPECT_TRUE(all_are(mine->base(), chunk_, std::byte{0}));
  EXPECT_EQ(parking()["parked_bytes"], 0);
  EXPECT_TRUE(parking()["operator"].is_null());
  EXPECT_EQ(parking()["parks"], 1);
  EXPECT_TRUE(mine->back(those{1, 2}, soon())) << "as before";
}

TEST_F(elastic_space_test, one_that_is_never_parked_takes_no_order) {
  auto const mine = space();
  ASSERT_TRUE(mine->back(those{0}, soon()));
  mine->answer(1, false);
  EXPECT_THROW(order("park"), error);
}

TEST_F(elastic_space_test, what_requests_use_is_told) {
  auto const mine = space();
  EXPECT_EQ(client()["elastic"]["used_bytes"], 0);
  mine->show_used(4711);
  EXPECT_EQ(client()["elastic"]["used_bytes"], 4711);
}

TEST_F(elastic_space_test, who_waits_for_a_demand_is_woken_by_none) {
  auto const mine = space();
  EXPECT_EQ(mine->await_demand(steady_clock::now()), 0U);
}

TEST_F(elastic_space_test, who_waits_for_a_demand_can_be_roused_also_before) {
  auto const mine = space();
  mine->rouse();
  auto const begun = steady_clock::now();
  EXPECT_EQ(mine->await_demand(soon()), 0U);
  std::jthread const rouses{[&] { mine->rouse(); }};
  EXPECT_EQ(mine->await_demand(soon()), 0U);
  EXPECT_LT(steady_clock::now(), begun + patience);
}

TEST_F(elastic_space_test, a_space_that_ends_holds_up_no_demand_and_leaves_all_free) {
  auto mine = space();
  ASSERT_TRUE(mine->back(those{0, 1, 2}, soon()));
  mine->answer(0);
  auto const server = join_server();
  std::jthread const ends{[&] {
    EXPECT_GT(mine->await_demand(soon()), 0U);
    mine.reset();
  }};
  EXPECT_EQ(server->acquire(24 * chunk_, soon()).bytes(), 24 * chunk_);
}

TEST_F(elastic_space_test, what_is_no_place_of_its_own_is_refused_and_changes_nothing) {
  auto const mine = space(3);
  ASSERT_TRUE(mine->back(those{1}, soon()));
  EXPECT_THROW((void)mine->back(those{0, 1}, soon()), error);
  EXPECT_THROW((void)mine->back(those{0, 0}, soon()), error);
  EXPECT_THROW((void)mine->back(those{3}, soon()), error);
  EXPECT_THROW(mine->give_back(those{0}), error);
  EXPECT_THROW(mine->give_back(those{1, 1}), error);
  EXPECT_THROW(mine->give_back(those{7}), error);
  EXPECT_THROW(mine->reserve(3), error);
  EXPECT_TRUE(readable(mine->base() + chunk_));
  EXPECT_EQ(engine_chunks(), 1U);
}

TEST_F(elastic_space_test, a_range_has_as_many_places_as_the_pool_has_chunks_at_most) {
  elastic_space mine{world_.broker(), "vllm"};
  EXPECT_THROW(mine.reserve(0), error);
  EXPECT_THROW(mine.reserve(25), error);
  EXPECT_NO_THROW(mine.reserve(24));
}

/// Each mapping, and each zeroing, in turn.
TEST_F(elastic_space_test, a_call_of_the_system_that_fails_leaves_everything_as_it_was) {
  auto const mine = space();
  those const before{0, 1};
  ASSERT_TRUE(mine->back(before, soon()));
  std::memset(mine->base(), 5, 2 * chunk_);
  ASSERT_TRUE(mine->back(those{2, 3, 4}, soon()));
  mine->give_back(those{2, 3, 4});  // so that they are zeroed when they come again
  for (auto const* const call : {"mmap", "fallocate"}) {
    int failures = 0;
    for (unsigned which = 1;; ++which) {
      fail_call(call, which, ENOMEM);
      bool came = false;
      try {
        came = mine->back(those{2, 3, 4}, soon());
      } catch (error const&) {
        ++failures;
      }
      bool const failed = call_failed();
      fail_no_call();
      if (came) {
        mine->give_back(those{2, 3, 4});
      }
      EXPECT_NE(came, failed) << call << ' ' << which;
      EXPECT_FALSE(readable(mine->base() + 2 * chunk_));
      await_engine_chunks(2);
      if (!failed) {
        break;
      }
    }
    EXPECT_GE(failures, 3) << call;
  }
  EXPECT_TRUE(all_are(mine->base(), 2 * chunk_, std::byte{5}));
}

/// What each place holds is written down in the plainest way; a server takes at random instants, and writes all over it.
TEST_F(elastic_space_test, contents_are_right_whatever_is_taken_meanwhile) {
  auto const seed =
      static_cast<std::uint32_t>(from_environment("SLUICE_TEST_SEED", std::random_device{}()));
  RecordProperty("seed", std::to_string(seed));
  std::mt19937 random{seed};
  auto const mine = space();
  mine->answer(0);
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> taken{0};
  std::jthread const serves{[&] {
    auto const server = join_server();
    while (!over) {
      try {
        auto const some = server->acquire((1 + taken % 20) * chunk_, soon());
        std::memset(some.data(), 0xa5, some.bytes());
        ++taken;
      } catch (error const& why) {
        EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
      }
      std::this_thread::yield();
    }
  }};
  std::vector<int> holds(24, -1);  // by place: −1: nothing
  auto const give = [&](std::uint32_t place) {
    auto const* const where = mine->base() + place * chunk_;
    EXPECT_TRUE(all_are(where, chunk_, static_cast<std::byte>(holds[place])));
    mine->give_back(those{place});
    EXPECT_FALSE(readable(where));
    holds[place] = -1;
  };
  for (auto const until = steady_clock::now() + patience;
       taken < 200U && steady_clock::now() < until && !HasFailure();) {
    for (std::uint32_t place = 0; place < 24 && mine->demanded() > 0; ++place) {
      if (holds[place] >= 0) {
        give(place);
      }
    }
    auto const place = static_cast<std::uint32_t>(random() % 24);
    if (holds[place] >= 0 && random() % 2 == 0) {
      give(place);
    } else if (holds[place] < 0 && mine->back(those{place}, steady_clock::now())) {
      EXPECT_TRUE(all_are(mine->base() + place * chunk_, chunk_, std::byte{0}));
      holds[place] = 1 + static_cast<int>(random() % 100);
      std::memset(mine->base() + place * chunk_, holds[place], chunk_);
    }
  }
  over = true;
  for (auto place = 0U; place < 24; ++place) {
    if (holds[place] >= 0) {
      give(place);
    }
  }
  EXPECT_GE(taken, 200U);
}

}  // namespace
}  // namespace sluice::test
