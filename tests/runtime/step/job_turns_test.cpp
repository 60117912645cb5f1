/// A job that is parked and comes back by the rules for turns: over the fake driver, in one process with its server.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/ledger/ledger.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using memhandover::monotonic_ns;
using std::chrono::steady_clock;
using testing::HasSubstr;

constexpr std::uint32_t pool_of_turns = 24;
constexpr std::uint32_t chunks_of_job = 16;
constexpr std::uint32_t wanted_of_it = 20;  ///< of which the job has to give 12
constexpr std::uint32_t parked_by_that = wanted_of_it - (pool_of_turns - chunks_of_job);

/// A gate of a device that is at rest once `rest` has returned.
class resting_gate final : public step::launch_gate {
 public:
  bool close(std::int64_t /*deadline_ns*/) override { return true; }
  bool wait_idle(std::int64_t /*deadline_ns*/) override {
    if (auto const* const wait = rest.load()) {
      (*wait)();
    }
    return true;
  }
  void open() override {}
  void abort_begin() override {}
  void abort_end() override {}
  void set_urgent(bool /*urgent*/) override {}

  [[nodiscard]] bool others_may_wait() const override { return others_wait.load(); }

  std::atomic<std::function<void()> const*> rest{nullptr};
  std::atomic<bool> others_wait{false};
};

/// The thread of this process waits in the kernel.
bool sleeps(pid_t thread) {
  std::ifstream stat{"/proc/self/task/" + std::to_string(thread) + "/stat"};
  std::string text;
  std::getline(stat, text);
  auto const name_ends = text.rfind(") ");
  return name_ends != std::string::npos && text.compare(name_ends + 2, 1, "S") == 0;
}

/// The job has memory that lasts, and the server takes some of it.
class job_in_turns : public testing::Test {
 protected:
  void start(memhandover::serving_pool::options how,
             std::optional<std::chrono::nanoseconds> longest_absence = std::nullopt) {
    auto wanted = world_.broker();
    chunk_ = wanted.chunk_bytes;
    wanted.host_copy_bytes = pool_of_turns * chunk_;
    presence_ = memhandover::ensure_broker(wanted);
    auto options = world_.job();
    options.gate = &gate_;
    options.longest_absence = longest_absence;
    job_.emplace(options);
    how.runtime_dir = wanted.runtime_dir;
    how.backend = wanted.backend;
    server_ = memhandover::serving_pool::join(how);
    (void)job_->allocate_persistent(chunks_of_job * chunk_);
    ASSERT_TRUE(eventually([&] { return box().parkable_chunks.load() == chunks_of_job; }));
  }

  [[nodiscard]] memhandover::mailbox_header const& box() { return job_->client().mailbox(); }

  std::optional<memhandover::placement> acquire(std::uint32_t chunks) {
    try {
      return server_->acquire(chunks * chunk_, steady_clock::now() + patience);
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::out_of_memory) << why.what();
      said_ = why.what();
      retry_after_ = why.retry_after();
      return std::nullopt;
    }
  }

  template <typename Holds>
  [[nodiscard]] static bool eventually(Holds const& holds) {
    for (auto const until = steady_clock::now() + patience; !holds(); ::poll(nullptr, 0, 1)) {
      if (steady_clock::now() > until) {
        return false;
      }
    }
    return true;
  }
  [[nodiscard]] bool comes_back() {
    return eventually([this] { return box().parked_chunks.load() == 0; });
  }

  fault_world world_{"cuda", pool_of_turns};
  memhandover::unique_fd presence_;
  resting_gate gate_;
  std::uint64_t chunk_ = 0;
  std::optional<step::training_memory> job_;
  std::shared_ptr<memhandover::serving_pool> server_;
  std::string said_;
  std::optional<std::chrono::milliseconds> retry_after_;
};

TEST_F(job_in_turns, keeps_what_it_has_while_devices_of_others_may_wait_for_it) {
  start({.park_stay = 1});
  gate_.others_wait = true;
  ASSERT_TRUE(eventually([this] { return box().parkable_chunks.load() == 0; }));
  EXPECT_EQ(box().why_unparkable.load(),
            static_cast<std::uint32_t>(memhandover::unparkable::communicators));
  EXPECT_EQ(acquire(wanted_of_it), std::nullopt);
  EXPECT_EQ(box().parked_chunks.load(), 0U);

  gate_.others_wait = false;
  ASSERT_TRUE(eventually([this] { return box().parkable_chunks.load() == chunks_of_job; }));
  EXPECT_EQ(box().why_unparkable.load(), static_cast<std::uint32_t>(memhandover::unparkable::none));
  EXPECT_NE(acquire(wanted_of_it), std::nullopt);
}

/// Memory that nobody waits for.
class job_beside_spare_loads : public job_in_turns {
 protected:
  using outcome = std::optional<error_kind>;  ///< nothing: it was had, and has been given back

  outcome take_spare(std::uint32_t chunks, std::stop_token called_off = {}) {
    try {
      auto const given = server_->acquire_chunks(
          chunks,
          memhandover::urgency::spare(steady_clock::now() + patience, std::move(called_off)),
          nullptr);
      EXPECT_EQ(given.size(), chunks);
      server_->give_back_chunks(given);
      return std::nullopt;
    } catch (error const& why) {
      return why.kind();
    }
  }
  /// How often the job has been asked for memory.
  [[nodiscard]] std::uint32_t demands() {
    auto const& client = job_->client();
    return memhandover::numbered::unpack(client.view().controls()[client.slot()].demand.load()).seq;
  }
  /// The device is busy with a micro-batch until `rests`, so that the job does not answer.
  void begin_a_micro_batch(std::uint32_t chunks) {
    busy_ = [this] {
      asked_ = true;
      while (!rests_) {
        ::poll(nullptr, 0, 1);
      }
    };
    gate_.rest = &busy_;
    job_->begin();
    (void)job_->allocate_arena(chunks * chunk_);
  }
  void TearDown() override { rests_ = true; }

  std::atomic<bool> rests_{false}, asked_{false};
  std::function<void()> busy_;
};

TEST_F(job_beside_spare_loads, is_neither_parked_nor_asked_for_what_would_need_that) {
  start({.park_stay = 1});
  EXPECT_EQ(take_spare(wanted_of_it), error_kind::out_of_memory);
  EXPECT_EQ(demands(), 0U);
  EXPECT_EQ(take_spare(pool_of_turns - chunks_of_job), std::nullopt);
  EXPECT_EQ(demands(), 0U) << "that was free";
  EXPECT_EQ(box().parks.load(), 0U);
  EXPECT_NE(acquire(wanted_of_it), std::nullopt) << "of whom somebody waits for it, it is";
  EXPECT_TRUE(eventually([this] { return box().parks.load() == 1; }));
}

TEST_F(job_beside_spare_loads, is_not_parked_even_if_it_seems_to_keep_less_than_it_does) {
  start({.park_stay = 1});
  for (int round = 0; round < 20; ++round) {
    job_->client().mailbox().kept_chunks.store(0);
    EXPECT_EQ(take_spare(wanted_of_it), error_kind::out_of_memory);
  }
  EXPECT_GT(demands(), 0U);
  EXPECT_EQ(box().parks.load(), 0U);
}

TEST_F(job_beside_spare_loads, gives_a_micro_batch_for_them) {
  start({.park_stay = 1});
  rests_ = true;
  begin_a_micro_batch(pool_of_turns - chunks_of_job);
  EXPECT_EQ(take_spare(pool_of_turns - chunks_of_job), std::nullopt);
  EXPECT_EQ(box().parks.load(), 0U);
  EXPECT_NE(job_->state(), step::arena_state::sound);
  job_->discard();
}

TEST_F(job_beside_spare_loads, is_not_asked_while_something_is_owed) {
  start({.park_stay = 1, .resident_share = 0.5, .resident_window = 60s});
  auto of_what_was_free = acquire(pool_of_turns - chunks_of_job);
  auto const of_the_job = acquire(parked_by_that);
  ASSERT_TRUE(of_what_was_free && of_the_job) << said_;
  of_what_was_free.reset();
  ASSERT_EQ(take_spare(pool_of_turns - chunks_of_job), std::nullopt) << "nobody waits for it";
  job_->want_parked();
  ASSERT_TRUE(eventually([this] { return server_->owed().has_value(); }));
  EXPECT_EQ(take_spare(1), error_kind::out_of_memory);
}

TEST_F(job_beside_spare_loads, keeps_what_it_has_when_one_is_called_off) {
  start({});
  begin_a_micro_batch(pool_of_turns - chunks_of_job);
  std::stop_source ends;
  auto taken = std::async(std::launch::async, [&] {
    return take_spare(pool_of_turns - chunks_of_job, ends.get_token());
  });
  ASSERT_TRUE(eventually([this] { return asked_.load(); }));
  ends.request_stop();
  EXPECT_EQ(taken.get(), error_kind::cancelled);
  EXPECT_EQ(take_spare(1, ends.get_token()), error_kind::cancelled) << "nor asked for another";
  rests_ = true;
  job_->discard();
}

TEST_F(job_beside_spare_loads, keeps_nobody_waiting_who_wants_memory_meanwhile) {
  start({});
  begin_a_micro_batch(pool_of_turns - chunks_of_job - 2);
  auto taken =
      std::async(std::launch::async, [&] { return take_spare(pool_of_turns - chunks_of_job); });
  ASSERT_TRUE(eventually([this] { return asked_.load(); }));
  EXPECT_NE(acquire(2), std::nullopt) << "what is free, while the device is busy";
  EXPECT_EQ(taken.get(), error_kind::cancelled);
  rests_ = true;
  job_->discard();
}

TEST_F(job_in_turns, is_owed_its_memory_when_it_waits_and_so_early_that_it_keeps_its_share) {
  start({.park_stay = 1, .resident_share = 0.5, .resident_window = 60s});
  auto const before = monotonic_ns();
  auto const taken = acquire(wanted_of_it);
  ASSERT_TRUE(taken) << said_;
  auto const after = monotonic_ns();
  EXPECT_EQ(box().parked_chunks.load(), parked_by_that);
  EXPECT_EQ(box().owed_ns.load(), 0) << "nobody waits for it";
  EXPECT_FALSE(server_->owed());
  job_->want_parked();
  ASSERT_TRUE(eventually([&] { return box().owed_ns.load() != 0; }));
  EXPECT_NE(box().waits_since_ns.load(), 0);
  auto const owed_ns = box().owed_ns.load();
  auto const half = std::chrono::nanoseconds{30s}.count();
  EXPECT_LE(owed_ns, after + half);
  EXPECT_GE(owed_ns, before + half - 2 * static_cast<std::int64_t>(box().park_ns.load()));
  auto const owed = server_->owed();
  ASSERT_TRUE(owed);
  EXPECT_EQ(owed->missing_bytes, parked_by_that * chunk_);
  EXPECT_GT(owed->at, steady_clock::now());
}

TEST_F(job_in_turns, comes_back_beyond_the_reserve_when_it_is_owed_and_not_before) {
  // Owed after twelve, less twice what going took: seconds too, where each access is checked and others work.
  start({.park_stay = 1, .resident_share = 0.25, .resident_window = 16s});
  auto taken = acquire(wanted_of_it);
  ASSERT_TRUE(taken) << said_;
  server_->set_reserve(pool_of_turns * chunk_);
  taken.reset();
  job_->want_parked();
  ASSERT_TRUE(eventually([&] { return box().owed_ns.load() != 0; }));
  auto const owed_ns = box().owed_ns.load();
  EXPECT_EQ(box().parked_chunks.load(), parked_by_that) << "the rest is the reserve's";
  ASSERT_TRUE(comes_back());
  EXPECT_GE(monotonic_ns(), owed_ns);
  EXPECT_EQ(box().owed_ns.load(), 0);
  ASSERT_TRUE(eventually([&] { return box().waits_since_ns.load() == 0; }));
  EXPECT_GT(box().window_away_ns.load(), 0U);
  EXPECT_EQ(box().window_ns.load(), 16'000'000'000U);
}

TEST_F(job_in_turns, that_has_come_back_stays_and_a_demand_is_refused_with_the_numbers) {
  start({.park_stay = 1000, .resident_share = 0.5, .resident_window = 60s});
  auto taken = acquire(wanted_of_it);
  ASSERT_TRUE(taken) << said_;
  taken.reset();
  job_->want_parked();
  ASSERT_TRUE(comes_back());
  ASSERT_FALSE(acquire(wanted_of_it));
  EXPECT_THAT(said_, HasSubstr("40 MiB are wanted, of which 24 MiB are missing"));
  EXPECT_THAT(said_, HasSubstr("pid " + std::to_string(::getpid()) + " (job) could give 32 MiB"));
  EXPECT_THAT(said_,
              HasSubstr("stays for another " + std::to_string(retry_after_->count()) + " ms"));
  EXPECT_GT(retry_after_->count(), 0);
  EXPECT_EQ(box().parks.load(), 1U) << "nothing was touched";
  EXPECT_TRUE(acquire(pool_of_turns - chunks_of_job)) << "what is free is had all the same";
}

TEST_F(job_in_turns, is_parked_again_when_its_stay_is_over) {
  start({.park_stay = 1, .resident_share = 0.5, .resident_window = 60s});
  for (unsigned round = 1; round <= 5; ++round) {
    std::optional<memhandover::placement> taken;
    ASSERT_TRUE(eventually([&] { return (taken = acquire(wanted_of_it)).has_value(); })) << said_;
    EXPECT_GE(monotonic_ns(), box().stays_until_ns.load());
    EXPECT_TRUE(eventually([&] { return box().parks.load() == round; }));
    taken.reset();
    job_->want_parked();
    ASSERT_TRUE(comes_back());
  }
  EXPECT_EQ(box().missed_ns.load(), 0U);
}

TEST_F(job_in_turns, that_is_owed_is_not_kept_waiting_by_who_comes_after) {
  start({.park_stay = 1, .resident_share = 0.9, .resident_window = 1s});
  auto of_what_was_free = acquire(pool_of_turns - chunks_of_job);
  auto of_the_job = acquire(parked_by_that);
  ASSERT_TRUE(of_what_was_free && of_the_job) << said_;
  job_->want_parked();
  ASSERT_TRUE(eventually([&] { return box().owed_ns.load() != 0; }));
  auto const owed_ns = box().owed_ns.load();
  ASSERT_TRUE(eventually([&] { return monotonic_ns() > owed_ns; }));
  of_what_was_free.reset();
  EXPECT_EQ(server_->usage().free_bytes, 0U) << "it is the job's";
  EXPECT_TRUE(server_->free_chunks().empty());
  EXPECT_EQ(server_->owed()->missing_bytes, 4 * chunk_);
  ASSERT_FALSE(acquire(2));
  EXPECT_THAT(said_, HasSubstr("4 MiB are wanted, of which 4 MiB are missing"));
  EXPECT_THAT(said_, HasSubstr("(job) is to have 24 MiB back"));
  EXPECT_GT(retry_after_->count(), 0);
  EXPECT_EQ(box().parked_chunks.load(), parked_by_that);
  // As long as going and coming takes it could not have been back.
  auto const swap_ns = 4 * static_cast<std::int64_t>(box().park_ns.load());
  ASSERT_TRUE(eventually([&] { return monotonic_ns() > owed_ns + swap_ns; }));
  of_the_job.reset();
  ASSERT_TRUE(comes_back());
  EXPECT_GT(box().missed_ns.load(), 0U) << "the server held on to it for longer than it should";
}

TEST_F(job_in_turns, that_is_parked_while_it_allocates_waits_until_it_is_back) {
  start({.park_stay = 1});
  std::promise<void> closed;
  std::atomic<pid_t> allocates{0};
  std::atomic<bool> once{false};
  std::function<void()> const let_it_go_first = [&] {
    if (once.exchange(true)) {
      return;
    }
    closed.set_value();
    // The other thread lets this demand go first then.
    EXPECT_TRUE(eventually([&] { return allocates != 0 && sleeps(allocates); }));
  };
  gate_.rest.store(&let_it_go_first);
  auto parking = std::async(std::launch::async, [this] { return acquire(wanted_of_it); });
  auto allocating = std::async(std::launch::async, [&] {
    closed.get_future().wait();
    allocates = ::gettid();
    return job_->allocate_persistent(chunk_);
  });
  auto taken = parking.get();
  ASSERT_TRUE(taken) << said_;
  EXPECT_EQ(box().parked_chunks.load(), parked_by_that);
  EXPECT_TRUE(eventually([&] {
    return box().waits_since_ns.load() != 0 || allocating.wait_for(0s) == std::future_status::ready;
  }));
  taken.reset();
  std::byte* more = nullptr;
  EXPECT_NO_THROW(more = allocating.get());
  gate_.rest.store(nullptr);
  EXPECT_TRUE(more != nullptr && job_->free(more));
  EXPECT_EQ(box().parked_chunks.load(), 0U);
}

TEST_F(job_in_turns, whose_demand_could_never_be_met_is_refused_at_once_and_nothing_is_touched) {
  start({.park_stay = 1, .resident_share = 0.5, .resident_window = 60s});
  auto const others = memhandover::tenant_client::join(
      world_.broker(), memhandover::client_kind::engine, "engine",
      [](memhandover::demand const& /*what*/) { return memhandover::demand_answer{}; });
  others->ask(4, memhandover::lifetime::revocable, steady_clock::now() + patience);
  ASSERT_EQ(others->collect().size(), 4U);
  ASSERT_FALSE(acquire(pool_of_turns - 3));
  EXPECT_THAT(said_, HasSubstr("42 MiB are wanted, and at most 40 MiB"));
  EXPECT_THAT(said_, HasSubstr("(engine) keeps 8 MiB"));
  EXPECT_FALSE(retry_after_) << "time does not help";
  EXPECT_EQ(box().parks.load(), 0U);
}

TEST_F(job_in_turns, without_a_share_is_owed_nothing) {
  start({.park_stay = 1});
  auto taken = acquire(wanted_of_it);
  ASSERT_TRUE(taken) << said_;
  job_->want_parked();
  ASSERT_TRUE(eventually([&] { return box().waits_since_ns.load() != 0; }));
  EXPECT_EQ(box().owed_ns.load(), 0);
  taken.reset();
  ASSERT_TRUE(comes_back());
}

TEST_F(job_in_turns, with_the_whole_share_is_never_parked) {
  start({.park_stay = 1, .resident_share = 1.0, .resident_window = 60s});
  ASSERT_TRUE(eventually([&] { return box().stays_until_ns.load() > 0; }));
  EXPECT_FALSE(acquire(wanted_of_it));
  EXPECT_EQ(box().parks.load(), 0U);
}

TEST_F(job_in_turns, that_others_wait_for_is_owed_its_memory_before_they_give_it_up) {
  start({.park_stay = 1, .resident_share = 0.0}, 60s);
  auto const by = steady_clock::now() + 70s;
  auto taken = acquire(wanted_of_it);
  ASSERT_TRUE(taken) << said_;
  job_->want_parked();
  ASSERT_TRUE(eventually([&] { return box().owed_ns.load() != 0; }));
  EXPECT_LT(box().owed_ns.load(), std::chrono::nanoseconds{by.time_since_epoch()}.count());
}

TEST_F(job_in_turns, that_nobody_would_wait_for_is_not_parked) {
  start({.park_stay = 1, .resident_share = 0.5, .resident_window = 60s}, 0s);
  EXPECT_FALSE(acquire(wanted_of_it));
  EXPECT_EQ(box().parks.load(), 0U);
}

}  // namespace
}  // namespace sluice::test
