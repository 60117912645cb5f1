/// The spaces of a job and its stock, out of a pool that a broker keeps; on the host, and on a GPU whose driver is a fake one.

#include "runtime/step/training_spaces.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/ledger/chunk_counts.hpp"
#include "tests/patience.hpp"
#include "tests/runtime/step/fault_world.hpp"

namespace sluice::test::spaces {
namespace {

using namespace std::chrono_literals;
using memhandover::lifetime;
using step::training_spaces;

constexpr std::uint32_t pool_chunks = 24;

class training_spaces_test : public testing::TestWithParam<char const*> {
 protected:
  training_spaces_test() {
    world_.start_broker();
    auto const job = world_.job();
    client_ = memhandover::tenant_client::join(
        job.broker, memhandover::client_kind::training, job.name,
        [](auto const& /*wanted*/) { return memhandover::demand_answer{}; });
    chunk_ = client_->view().shape().chunk_bytes;
    memory_ = memhandover::open_device_memory(client_->view().shape(), client_->files().chunks,
                                              job.driver);
    history_.emplace(client_->view(), client_->slot());
    spaces_.emplace(*client_, *memory_, *history_,
                    training_spaces::options{.persistent = job.persistent, .on_gpu = on_gpu()});
  }

  [[nodiscard]] static bool on_gpu() { return std::string{GetParam()} == "cuda"; }

  /// Gets so many chunks into the stock.
  void get(std::uint32_t chunks) {
    client_->ask(chunks, lifetime::revocable, std::chrono::steady_clock::now() + patience);
    auto const before = spaces_->stock().size();
    spaces_->stock().collect();
    ASSERT_EQ(spaces_->stock().size(), before + chunks);
  }
  std::byte* in_arena(std::uint32_t chunks) {
    spaces_->stock().map_into(spaces_->arena(), chunks, lifetime::revocable);
    return spaces_->arena().allocate(chunks * chunk_);
  }
  std::byte* lasting(std::uint32_t chunks) {
    spaces_->stock().map_into(spaces_->persistent(), chunks, lifetime::lasting);
    return spaces_->allocate_persistent(chunks * chunk_);
  }
  [[nodiscard]] std::uint32_t held() const {
    return memhandover::count_chunks(client_->view()).by_client.at(client_->slot());
  }
  /// Of what is held, all that can be found here.
  [[nodiscard]] std::uint32_t found() const {
    return static_cast<std::uint32_t>(spaces_->arena().chunks().size()) + spaces_->unused() +
           spaces_->kept();
  }

  fault_world world_{GetParam(), pool_chunks};
  std::unique_ptr<memhandover::tenant_client> client_;
  std::unique_ptr<memhandover::device_memory> memory_;
  std::optional<memhandover::chunk_history> history_;
  std::optional<training_spaces> spaces_;
  std::uint64_t chunk_ = 0;
};

TEST_P(training_spaces_test, at_first_there_is_nothing) {
  EXPECT_EQ(found(), 0U);
  EXPECT_EQ(spaces_->idle(), 0U);
  EXPECT_EQ(spaces_->generation(), 1U);
  EXPECT_TRUE(spaces_->revocable().empty());
  EXPECT_FALSE(spaces_->release_unused());
  EXPECT_EQ(spaces_->allocate_persistent(1), nullptr);
}

TEST_P(training_spaces_test, an_address_is_of_the_space_that_it_was_allocated_in) {
  get(6);
  auto* const used = in_arena(2);
  auto* const lasts = lasting(3);
  EXPECT_TRUE(spaces_->owns(used) && spaces_->owns(lasts));
  EXPECT_FALSE(spaces_->is_former(used) || spaces_->is_former(lasts));
  EXPECT_EQ(spaces_->persistent_range(lasts + chunk_), std::pair(lasts, std::size_t{3 * chunk_}));
  EXPECT_EQ(spaces_->persistent_range(used).first, nullptr);
  EXPECT_EQ(spaces_->kept(), 3U);
  EXPECT_EQ(spaces_->unused(), 1U);
  int elsewhere = 0;
  EXPECT_FALSE(spaces_->free(reinterpret_cast<std::byte*>(&elsewhere)));
  EXPECT_TRUE(spaces_->free(used));
  EXPECT_FALSE(spaces_->free(used));
  EXPECT_TRUE(spaces_->free(lasts));
  EXPECT_EQ(found(), 6U) << "what is free stays mapped";
}

TEST_P(training_spaces_test, of_what_nothing_uses_the_stock_goes_first_and_persistent_memory_last) {
  get(6);
  auto* const used = in_arena(2);
  auto* const lasts = lasting(2);
  ASSERT_TRUE(spaces_->free(used) && spaces_->free(lasts));
  EXPECT_EQ(spaces_->idle(), 6U);
  std::vector<std::uint32_t> given;
  spaces_->take_idle(3, given);
  EXPECT_EQ(given.size(), 3U);
  EXPECT_EQ(spaces_->stock().size(), 0U);
  EXPECT_EQ(spaces_->arena().chunks().size(), 1U);
  EXPECT_EQ(spaces_->persistent().mapped_chunks(), 2U);
  spaces_->take_idle(9, given);
  EXPECT_EQ(given.size(), 6U);
  EXPECT_EQ(found(), 0U);
}

TEST_P(training_spaces_test, a_revoked_arena_is_retired_until_the_last_allocation_in_it_is_freed) {
  get(5);
  auto* const used = in_arena(4);
  ASSERT_EQ(spaces_->revocable(), (std::vector{&spaces_->arena()}));
  std::vector<std::uint32_t> kept{spaces_->arena().chunks().begin(),
                                  spaces_->arena().chunks().end()};
  kept.resize(2);  // the rest would be the server's
  spaces_->arena().revoke(!on_gpu());
  if (on_gpu()) {
    kept.push_back(spaces_->stock().chunks().front());
    spaces_->keep_until_unmapped(kept);
    EXPECT_EQ(spaces_->unused(), 3U);
    EXPECT_EQ(spaces_->stock().size(), 0U) << "they are mapped still";
    EXPECT_TRUE(spaces_->unmapping() && spaces_->awaits_unmapping());
    EXPECT_TRUE(spaces_->finish_unmapping());
    EXPECT_FALSE(spaces_->finish_unmapping());
  } else {
    spaces_->stock().add(kept);
    memory_->sweep();
  }
  EXPECT_EQ(spaces_->stock().size(), 3U);
  EXPECT_FALSE(spaces_->unmapping() || spaces_->awaits_unmapping());

  spaces_->retire_arena();
  EXPECT_EQ(spaces_->generation(), 2U);
  EXPECT_TRUE(spaces_->is_former(used));
  EXPECT_EQ(spaces_->survivors(), 1U);
  auto* const next = in_arena(3);
  EXPECT_NE(next, used) << "its addresses are not used again";
  EXPECT_TRUE(spaces_->free(used));
  EXPECT_FALSE(spaces_->owns(used));
  EXPECT_EQ(spaces_->survivors(), 0U);
  EXPECT_EQ(found(), 3U);
}

TEST_P(training_spaces_test, of_a_promoted_arena_the_chunks_in_which_something_lives_are_kept) {
  get(6);
  auto* const goes = in_arena(4);
  auto* const lives_on = in_arena(1);
  ASSERT_TRUE(spaces_->free(goes));
  spaces_->promote_arena();
  EXPECT_EQ(spaces_->promoted().size(), 1U);
  EXPECT_EQ(spaces_->kept(), 1U);
  EXPECT_EQ(spaces_->needed_for_good(), 1U);
  EXPECT_EQ(spaces_->stock().size(), 5U);
  EXPECT_TRUE(spaces_->revocable().empty()) << "it is never a victim";
  EXPECT_TRUE(spaces_->is_former(lives_on));

  EXPECT_TRUE(spaces_->free(lives_on));
  EXPECT_FALSE(spaces_->owns(lives_on));
  EXPECT_TRUE(spaces_->promoted().empty());
  EXPECT_EQ(spaces_->stock().size(), 6U);
}

TEST_P(training_spaces_test, before_the_first_micro_batch_the_set_ups_memory_goes) {
  get(8);
  auto* const prepared = lasting(5);
  auto* const lasts = lasting(2);
  ASSERT_TRUE(spaces_->free(prepared));
  spaces_->tidy();
  EXPECT_EQ(spaces_->kept(), 2U);
  EXPECT_EQ(spaces_->persistent().mapped_chunks(), 0U) << "what lasts lies in sparse memory";
  EXPECT_EQ(spaces_->persistent_range(lasts), std::pair(lasts, std::size_t{2 * chunk_}));
  // The arena would be parted by them on a GPU: they go to the pool.
  EXPECT_EQ(spaces_->stock().size(), on_gpu() ? 1U : 6U);

  auto* const more = lasting(1);
  EXPECT_EQ(spaces_->persistent_range(more), std::pair(more, std::size_t{chunk_}));
  EXPECT_TRUE(spaces_->free(lasts));
  EXPECT_FALSE(spaces_->owns(lasts));
  EXPECT_EQ(spaces_->kept(), 1U);
}

TEST_P(training_spaces_test, idle_persistent_memory_goes_at_once_on_the_host_and_later_on_a_gpu) {
  spaces_->tidy();
  get(2);
  ASSERT_TRUE(spaces_->free(lasting(2)));
  EXPECT_EQ(spaces_->kept(), 2U);
  EXPECT_EQ(spaces_->needed_for_good(), 0U);
  int turns = 0;
  for (; spaces_->kept() > 0 && turns < 1000; ++turns) {
    spaces_->release_idle();
    spaces_->count_turn();
  }
  if (on_gpu()) {
    EXPECT_GT(turns, 64);
    EXPECT_LT(turns, 1000);
  } else {
    EXPECT_EQ(turns, 1);
    EXPECT_EQ(spaces_->stock().size(), 2U);
  }
}

TEST_P(training_spaces_test, what_no_server_could_give_back_is_short_for_good) {
  get(6);
  (void)in_arena(2);
  (void)lasting(4);
  EXPECT_EQ(spaces_->short_for_good(pool_chunks - 6), 0U);
  EXPECT_EQ(spaces_->short_for_good(pool_chunks - 6 + 3), 3U);
}

TEST_P(training_spaces_test, the_pool_has_what_the_arena_does_not_use) {
  get(7);
  auto* const used = in_arena(2);
  auto* const rest = in_arena(3);
  ASSERT_TRUE(spaces_->free(rest));
  spaces_->release_idle_arena(1);
  EXPECT_EQ(spaces_->arena().chunks().size(), 4U);
  EXPECT_EQ(spaces_->stock().size(), 2U);
  EXPECT_TRUE(spaces_->release_unused());
  EXPECT_EQ(spaces_->arena().chunks().size(), 2U);
  EXPECT_EQ(spaces_->stock().size(), 0U);
  EXPECT_FALSE(spaces_->release_unused());
  EXPECT_TRUE(spaces_->free(used));
}

TEST_P(training_spaces_test, the_mailbox_shows_what_there_is) {
  get(9);
  (void)in_arena(2);
  auto* const below = lasting(3);
  (void)lasting(1);
  spaces_->publish();
  auto const& box = client_->mailbox();
  EXPECT_EQ(box.arena_chunks, 2U + 3U);
  EXPECT_EQ(box.spare_chunks, 3U);
  EXPECT_EQ(box.persistent_chunks, 4U);
  EXPECT_EQ(box.kept_chunks, 4U);
  EXPECT_TRUE(spaces_->free(below));
  spaces_->publish_stranded();
  EXPECT_EQ(box.stranded_chunks, 3U);
  EXPECT_EQ(held(), found());
}

INSTANTIATE_TEST_SUITE_P(both, training_spaces_test, testing::Values("host", "cuda"),
                         [](auto const& of) { return std::string{of.param}; });

}  // namespace
}  // namespace sluice::test::spaces
