#include "memhandover/parking/tenant_parking.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/device/disk_file.hpp"
#include "memhandover/device/held_pages.hpp"
#include "memhandover/device/host_memory.hpp"
#include "tests/memhandover/disk_folder.hpp"
#include "tests/memhandover/smaller_files.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using indices = std::vector<std::uint32_t>;

/// Memory of the host, some of whose calls fail.
class failing_memory final : public device_memory {
 public:
  explicit failing_memory(std::unique_ptr<device_memory> under) : under_(std::move(under)) {}
  [[nodiscard]] pool_shape const& shape() const noexcept override { return under_->shape(); }
  std::byte* reserve(std::uint32_t these) override { return under_->reserve(these); }
  void release(std::byte* where, std::uint32_t these) noexcept override {
    under_->release(where, these);
  }
  void map(std::byte* where, std::span<std::uint32_t const> these) override {
    count();
    under_->map(where, these);
  }
  void unmap(std::byte* where, std::uint32_t count) noexcept override {
    under_->unmap(where, count);
  }
  void revoke(std::byte* where, std::span<std::uint32_t const> these) override {
    under_->revoke(where, these);
  }
  void map_private(std::byte* where, std::uint32_t count) override {
    under_->map_private(where, count);
  }
  void scrub(std::byte* where, std::span<std::uint32_t const> these) override {
    count();
    under_->scrub(where, these);
  }

  int fails_after = 1'000'000;  ///< calls that succeed before

 private:
  void count() {
    if (fails_after-- == 0) {
      throw error{error_kind::internal, "no mapping"};
    }
  }

  std::unique_ptr<device_memory> under_;
};

class tenant_parking_test : public testing::Test {
 protected:
  static constexpr std::uint64_t chunk = 64_KiB;
  static constexpr std::uint32_t slots = 12;

  pool_shape shape_{backend_kind::host, -1, chunk, 32};
  pool_descriptors chunks_ = create_host_chunks(shape_);
  failing_memory memory_{open_device_memory(shape_, chunks_)};
  host_copy_files files_ = create_host_copies(slots * chunk, chunk);
  host_copy_share share_{{duplicate(files_.bytes.get()), duplicate(files_.table.get())},
                         {{"bytes", slots* chunk}, {"slot_bytes", chunk}, {"holder", 3}}};
  std::mutex mutex_;
  chunk_space space_{memory_, 32, 64, chunk_space::backing::pool};
  chunk_space other_{memory_, 32, 64, chunk_space::backing::pool};
  indices given_;
  tenant_parking::taker const note_ = [this](std::span<std::uint32_t const> given) {
    given_.insert(given_.end(), given.begin(), given.end());
  };

  static indices numbers(std::uint32_t from, std::uint32_t count) {
    indices result(count);
    std::iota(result.begin(), result.end(), from);
    return result;
  }
  void fill(chunk_space& of, std::uint32_t first, std::uint32_t count) {
    of.grow(numbers(first, count));
    for (std::uint32_t i = 0; i < count; ++i) {
      std::memset(of.allocate(chunk), static_cast<int>(first + i + 1), chunk);
    }
  }
  /// Whether what was filled is there.
  static bool is_intact(chunk_space const& of, std::uint32_t first, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      auto const* const at = of.at(i);
      if (std::any_of(at, at + chunk, [&](std::byte byte) {
            return byte != static_cast<std::byte>(first + i + 1);
          })) {
        return false;
      }
    }
    return true;
  }
  void take(
      tenant_parking& parking, std::uint32_t count,
      std::function<bool()> const& goes_on = [] { return true; }) {
    std::array<chunk_space*, 2> const spaces{&space_, &other_};
    parking.take(spaces, count, note_, goes_on);
  }
  /// As if others had had the chunks that were given.
  void overwrite_given() {
    for (auto const given : given_) {
      auto* const at = memory_.map_anew({&given, 1});
      std::memset(at, 0xA5, chunk);
      memory_.unmap_and_release(at, 1);
    }
  }
};

TEST_F(tenant_parking_test, contents_go_and_come_back_under_the_same_addresses_in_other_chunks) {
  fill(space_, 0, 6);
  fill(other_, 10, 3);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 8);
  EXPECT_EQ(given_, (indices{0, 1, 2, 3, 4, 5, 10, 11}));
  EXPECT_EQ(parking.parked().dirty, 8U);
  EXPECT_EQ(share_.copies().count().free, slots - 8);
  EXPECT_EQ(parking.lost(), std::nullopt);
  overwrite_given();
  parking.bring_back(numbers(20, 8));
  EXPECT_EQ(parking.parked().all(), 0U);
  EXPECT_TRUE(is_intact(space_, 0, 6) && is_intact(other_, 10, 3));
  EXPECT_EQ(share_.copies().count().free, slots - 8);
  EXPECT_EQ(share_.copies().count().kept, 8U);
}

TEST_F(tenant_parking_test, what_nothing_lives_in_goes_first_without_a_copy_and_comes_back_zeroed) {
  fill(space_, 0, 4);
  EXPECT_GT(space_.free(space_.at(1)), 0U);
  EXPECT_GT(space_.free(space_.at(3)), 0U);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 3);
  EXPECT_EQ(given_, (indices{1, 3, 0}));
  EXPECT_EQ(parking.parked().zero, 2U);
  overwrite_given();
  parking.bring_back(given_);
  EXPECT_EQ(static_cast<int>(space_.at(1)[5]), 0) << "another's contents";
  EXPECT_EQ(static_cast<int>(space_.at(0)[5]), 1);
  EXPECT_EQ(static_cast<int>(space_.at(2)[5]), 3);
}

TEST_F(tenant_parking_test, what_is_freed_meanwhile_comes_back_empty) {
  fill(space_, 0, 2);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 2);
  EXPECT_GT(space_.free(space_.at(0)), 0U);
  overwrite_given();
  parking.bring_back(given_);
  EXPECT_EQ(static_cast<int>(space_.at(0)[5]), 0);
  EXPECT_EQ(static_cast<int>(space_.at(1)[5]), 2);
}

TEST_F(tenant_parking_test, no_more_goes_than_there_are_slots_for) {
  fill(space_, 0, slots + 4);
  auto const others = share_.copies().hold(2, 7);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, slots + 4);
  EXPECT_EQ(given_, numbers(0, slots - 2));
  EXPECT_EQ(share_.copies().count().free, 0U);
  take(parking, 1);
  EXPECT_EQ(given_.size(), slots - 2);
  overwrite_given();
  parking.bring_back(given_);
  EXPECT_TRUE(is_intact(space_, 0, slots + 4));
  EXPECT_EQ(share_.copies().count().held, 2U);
}

TEST_F(tenant_parking_test, what_has_not_changed_since_it_came_back_is_not_copied_again) {
  fill(space_, 0, 4);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 4);
  overwrite_given();
  parking.bring_back(given_);
  given_.clear();
  space_.at(2)[chunk - 1] = std::byte{99};
  std::memset(space_.at(3), 0, chunk);
  take(parking, 4);
  EXPECT_EQ(given_.size(), 4U);
  EXPECT_EQ(parking.parked().clean, 2U);
  EXPECT_EQ(parking.parked().dirty, 1U);
  EXPECT_EQ(parking.parked().zero, 1U);
  EXPECT_EQ(share_.copies().count().held, 3U) << "a slot whose contents are old is used again";
  overwrite_given();
  parking.bring_back(numbers(20, 4));
  EXPECT_TRUE(is_intact(space_, 0, 2));
  EXPECT_EQ(static_cast<int>(space_.at(2)[chunk - 1]), 99);
  EXPECT_EQ(static_cast<int>(space_.at(2)[0]), 3);
  EXPECT_EQ(static_cast<int>(space_.at(3)[7]), 0);
}

TEST_F(tenant_parking_test, what_is_zero_needs_no_slot) {
  fill(space_, 0, slots + 4);
  for (std::uint32_t position = 0; position < 4; ++position) {
    std::memset(space_.at(position), 0, chunk);
  }
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, slots + 4);
  EXPECT_EQ(given_.size(), slots + 4);
  EXPECT_EQ(parking.parked().zero, 4U);
  overwrite_given();
  parking.bring_back(given_);
  EXPECT_EQ(static_cast<int>(space_.at(3)[chunk / 2]), 0);
  EXPECT_EQ(static_cast<int>(space_.at(4)[chunk / 2]), 5);
}

TEST_F(tenant_parking_test, kept_copies_give_way_to_who_needs_the_slot) {
  fill(space_, 0, 6);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 6);
  overwrite_given();
  parking.bring_back(given_);
  given_.clear();
  auto const others = share_.copies().hold(slots - 6, 9);  // all that were free
  auto const stolen = share_.copies().steal(4, 9);
  ASSERT_EQ(stolen.size(), 4U);
  fill(other_, 10, 1);
  std::array<chunk_space*, 2> const spaces{&other_, &space_};
  parking.take(spaces, 7, note_, [] { return true; });
  EXPECT_EQ(parking.parked().all(), 2U) << "as many as it has slots";
  EXPECT_EQ(parking.lost(), std::nullopt);
  overwrite_given();
  parking.bring_back(given_);
  EXPECT_TRUE(is_intact(space_, 0, 6) && is_intact(other_, 10, 1));
}

TEST_F(tenant_parking_test, what_will_go_is_said_before_any_of_it_has_gone) {
  fill(space_, 0, 4);
  fill(other_, 10, 3);
  EXPECT_GT(space_.free(space_.at(1)), 0U);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  std::array<chunk_space*, 2> const spaces{&space_, &other_};
  std::vector<indices> said;
  parking.take(
      spaces, 5, note_, [] { return true; },
      [&](std::span<std::uint32_t const> chosen) {
        EXPECT_TRUE(given_.empty());
        said.emplace_back(chosen.begin(), chosen.end());
      });
  EXPECT_EQ(said, (std::vector<indices>{{1, 0, 2, 3, 10}}));
  EXPECT_EQ(given_, said.front());
}

TEST_F(tenant_parking_test, it_stops_when_nobody_wants_it_any_more_and_may_go_on_later) {
  fill(space_, 0, 10);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  int left = 3;
  take(parking, 10, [&left] { return left-- > 0; });
  EXPECT_EQ(given_, numbers(0, 3));
  EXPECT_EQ(share_.copies().count().held, 3U);
  take(parking, 4);
  EXPECT_EQ(given_, numbers(0, 7));
  overwrite_given();
  parking.bring_back(given_);
  EXPECT_TRUE(is_intact(space_, 0, 10));
}

TEST_F(tenant_parking_test, other_than_as_many_chunks_as_are_parked_are_refused) {
  fill(space_, 0, 3);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 3);
  EXPECT_THROW(parking.bring_back(numbers(0, 2)), error);
  EXPECT_EQ(parking.parked().all(), 3U);
  parking.bring_back(given_);
  EXPECT_TRUE(is_intact(space_, 0, 3));
}

TEST_F(tenant_parking_test, whatever_fails_on_the_way_back_everything_is_parked_as_it_was) {
  fill(space_, 0, 4);
  fill(other_, 4, 6);
  EXPECT_GT(other_.free(other_.at(1)), 0U);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 10);
  overwrite_given();
  int failed = 0;
  for (;; ++failed) {
    memory_.fails_after = failed;
    try {
      parking.bring_back(numbers(16, 10));
      break;
    } catch (error const&) {
      EXPECT_EQ(parking.parked().all(), 10U);
      EXPECT_EQ(parking.lost(), std::nullopt);
      EXPECT_EQ(space_.parked() + other_.parked(), 10U);
    }
  }
  EXPECT_EQ(failed, 3) << "two spaces, and one position that is empty";
  EXPECT_TRUE(is_intact(space_, 0, 4));
  EXPECT_EQ(static_cast<int>(other_.at(1)[0]), 0);
  EXPECT_EQ(static_cast<int>(other_.at(5)[0]), 10);
}

TEST_F(tenant_parking_test, a_slot_that_has_changed_hands_is_a_loss) {
  fill(space_, 0, 2);
  tenant_parking parking{mutex_, memory_, share_, nullptr};
  take(parking, 2);
  EXPECT_EQ(parking.lost(), std::nullopt);
  share_.copies().sweep([](auto /*holder*/) { return true; });
  EXPECT_NE(parking.lost(), std::nullopt);
}

TEST_F(tenant_parking_test, what_is_still_parked_in_the_end_leaves_no_slot_behind) {
  fill(space_, 0, 2);
  {
    tenant_parking parking{mutex_, memory_, share_, nullptr};
    take(parking, 2);
  }
  EXPECT_EQ(share_.copies().count().free, slots);
}

/// Four slots in memory and eight on a disk.
class parking_on_disk_test : public tenant_parking_test {
 protected:
  static constexpr std::uint32_t in_memory = 4;

  void SetUp() override {
    if (folder_.path().empty()) {
      GTEST_SKIP() << "there is no folder on a disk";
    }
    files_ = create_host_copies(in_memory * chunk, chunk,
                                create_disk_file({folder_.path(), (slots - in_memory) * chunk}));
    disk_share_.emplace(duplicate(files_),
                        nlohmann::json{{"bytes", in_memory * chunk},
                                       {"slot_bytes", chunk},
                                       {"disk_bytes", (slots - in_memory) * chunk},
                                       {"holder", 3}});
    parking_.emplace(mutex_, memory_, *disk_share_, nullptr);
  }
  [[nodiscard]] copy_counts on_disk() const {
    return disk_share_->copies().count(copy_place::disk);
  }
  /// Back in other chunks, after others have had those.
  void bring_back(std::uint32_t first) {
    overwrite_given();
    parking_->bring_back(numbers(first, static_cast<std::uint32_t>(given_.size())));
    given_.clear();
  }

  test::disk_folder folder_;
  std::optional<host_copy_share> disk_share_;
  std::optional<tenant_parking> parking_;
};

TEST_F(parking_on_disk_test, what_memory_has_no_room_for_goes_to_the_disk_and_comes_back) {
  fill(space_, 0, 9);
  take(*parking_, 9);
  EXPECT_EQ(given_, numbers(0, 9));
  EXPECT_EQ(parking_->parked().dirty, 9U);
  EXPECT_EQ(parking_->parked().disk, 5U);
  EXPECT_EQ(on_disk().held, 5U);
  EXPECT_EQ(parking_->written().chunks, 5U);
  bring_back(20);
  EXPECT_TRUE(is_intact(space_, 0, 9));
  EXPECT_EQ(parking_->read().chunks, 5U);
  EXPECT_GT(parking_->read().time.count(), 0);
  EXPECT_EQ(on_disk().kept, 5U);
  EXPECT_EQ(parking_->written().chunks, 0U) << "it is of one absence";
}

TEST_F(parking_on_disk_test, what_has_not_changed_is_not_written_again) {
  fill(space_, 0, 9);
  take(*parking_, 9);
  bring_back(20);
  space_.at(7)[3] = std::byte{99};
  take(*parking_, 9);
  EXPECT_EQ(parking_->parked().clean, 8U);
  EXPECT_EQ(parking_->parked().disk, 5U);
  EXPECT_EQ(parking_->written().chunks, 1U);
  bring_back(0);
  EXPECT_EQ(space_.at(7)[3], std::byte{99});
  space_.at(7)[3] = std::byte{8};
  EXPECT_TRUE(is_intact(space_, 0, 9));
}

TEST_F(parking_on_disk_test, what_has_changed_moves_to_memory_where_that_has_room_now) {
  fill(space_, 0, 6);
  auto const others = disk_share_->copies().hold(in_memory, 7);
  take(*parking_, 6);
  EXPECT_EQ(parking_->parked().disk, 6U);
  bring_back(20);
  for (auto const& each : others) {
    EXPECT_TRUE(disk_share_->copies().give_back(each));
  }
  space_.at(0)[0] = std::byte{55};
  take(*parking_, 6);
  EXPECT_EQ(parking_->parked().disk, 5U) << "what is clean lies where it was";
  EXPECT_EQ(disk_share_->copies().count(copy_place::memory).held, 1U);
  EXPECT_EQ(on_disk().free, 3U);
  bring_back(0);
  EXPECT_EQ(space_.at(0)[0], std::byte{55});
  EXPECT_EQ(space_.at(5)[0], std::byte{6});
}

TEST_F(parking_on_disk_test, no_more_goes_than_memory_and_disk_have_slots_for) {
  fill(space_, 0, slots + 3);
  take(*parking_, slots + 3);
  EXPECT_EQ(given_, numbers(0, slots));
  bring_back(16);
  EXPECT_TRUE(is_intact(space_, 0, slots + 3));
}

TEST_F(parking_on_disk_test, nothing_more_goes_to_it_when_nobody_wants_it_any_more) {
  fill(space_, 0, 9);
  take(*parking_, 9, [this] { return given_.size() < in_memory + 1; });
  EXPECT_GE(given_.size(), in_memory + 1U);
  EXPECT_LE(given_.size(), in_memory + 1U + host_copy_share::staged);
  EXPECT_EQ(on_disk().held, given_.size() - in_memory) << "no slot is left behind";
  bring_back(20);
  EXPECT_TRUE(is_intact(space_, 0, 9));
}

TEST_F(parking_on_disk_test, what_cannot_be_written_stays_and_the_disk_is_used_no_more) {
  fill(space_, 0, 9);
  {
    test::smaller_files const limit{2 * chunk};
    take(*parking_, 9);
  }
  EXPECT_EQ(given_.size(), in_memory + 2U) << "two slots are below the limit";
  EXPECT_EQ(parking_->disk_fault(), EFBIG);
  EXPECT_EQ(on_disk().held, 2U);
  EXPECT_EQ(on_disk().free, slots - in_memory - 2);
  for (std::uint32_t i = in_memory + 2; i < 9; ++i) {
    EXPECT_EQ(space_.at(i)[0], static_cast<std::byte>(i + 1));
  }
  bring_back(20);
  EXPECT_TRUE(is_intact(space_, 0, 9)) << "what had been written is read";
  take(*parking_, 9);
  EXPECT_EQ(parking_->parked().disk, 0U);
  EXPECT_EQ(given_.size(), in_memory);
  bring_back(0);
  EXPECT_TRUE(is_intact(space_, 0, 9));
}

TEST_F(parking_on_disk_test, what_cannot_be_read_is_lost_and_said_to_be) {
  fill(space_, 0, 9);
  take(*parking_, 9);
  ASSERT_EQ(::ftruncate(files_.disk.get(), chunk), 0);
  EXPECT_THROW(parking_->bring_back(numbers(16, 9)), contents_lost);
  EXPECT_EQ(parking_->parked().all(), 9U);
  EXPECT_EQ(space_.parked(), 9U);
}

/// Contents of a process's own pages, which threads use whenever they like.
class parking_own_pages_test : public tenant_parking_test {
 protected:
  void SetUp() override {
    try {
      parking_.emplace(mutex_, memory_, share_, nullptr, std::make_unique<held_pages>());
    } catch (error const& why) {
      GTEST_SKIP() << why.what();
    }
  }
  void take_own(
      std::uint32_t count, std::function<bool()> const& goes_on = [] { return true; }) {
    std::array<chunk_space*, 1> const spaces{&own_};
    parking_->take(spaces, count, note_, goes_on);
  }

  chunk_space own_{memory_, 32, 64, chunk_space::backing::process};
  std::optional<tenant_parking> parking_;
};

TEST_F(parking_own_pages_test, contents_go_and_come_back) {
  fill(own_, 0, 5);
  std::memset(own_.at(1), 0, chunk);
  EXPECT_GT(own_.free(own_.at(3)), 0U);
  take_own(5);
  EXPECT_EQ(given_, (indices{3, 1, 0, 2, 4}));
  EXPECT_EQ(parking_->parked().zero, 2U);
  EXPECT_EQ(parking_->parked().dirty, 3U);
  EXPECT_FALSE(parking_->touched());
  parking_->bring_back(numbers(20, 5));
  EXPECT_TRUE(is_intact(own_, 0, 1));
  EXPECT_EQ(own_.at(1)[7], std::byte{0});
  EXPECT_EQ(own_.at(3)[7], std::byte{0});
  EXPECT_EQ(own_.at(4)[7], std::byte{5});
  given_.clear();
  take_own(5);
  EXPECT_EQ(parking_->parked().clean, 3U) << "what has not changed is copied once";
  parking_->bring_back(numbers(9, 5));
  EXPECT_TRUE(is_intact(own_, 0, 1));
}

TEST_F(parking_on_disk_test, a_processs_own_pages_go_there_and_come_back) {
  std::unique_ptr<held_pages> pages;
  try {
    pages = std::make_unique<held_pages>();
  } catch (error const& why) {
    GTEST_SKIP() << why.what();
  }
  chunk_space own{memory_, 32, 64, chunk_space::backing::process};
  fill(own, 0, 10);
  tenant_parking parking{mutex_, memory_, *disk_share_, nullptr, std::move(pages)};
  std::array<chunk_space*, 1> const spaces{&own};
  auto const take_own = [&](std::uint32_t count) {
    parking.take(spaces, count, note_, [] { return true; });
  };
  take_own(8);
  EXPECT_EQ(parking.parked().disk, 4U);
  parking.bring_back(numbers(12, 8));
  EXPECT_TRUE(is_intact(own, 0, 10));
  given_.clear();
  own.at(9)[0] = std::byte{77};
  {
    test::smaller_files const limit{0};
    take_own(10);
  }
  EXPECT_EQ(parking.parked().clean, 8U);
  EXPECT_EQ(parking.disk_fault(), EFBIG);
  EXPECT_EQ(own.at(9)[0], std::byte{77}) << "nobody waits for what has stayed";
  own.at(9)[0] = std::byte{10};
  parking.bring_back(numbers(0, 8));
  EXPECT_TRUE(is_intact(own, 0, 10));
}

TEST_F(parking_own_pages_test, who_writes_meanwhile_waits_and_has_written_afterwards) {
  fill(own_, 0, 4);
  take_own(4);
  std::thread writer{[this] { own_.at(2)[5] = std::byte{99}; }};
  while (!parking_->touched()) {
    std::this_thread::yield();
  }
  parking_->bring_back(numbers(10, 4));
  writer.join();
  EXPECT_EQ(own_.at(2)[5], std::byte{99});
  own_.at(2)[5] = std::byte{3};
  EXPECT_TRUE(is_intact(own_, 0, 4));
}

TEST_F(parking_own_pages_test, what_has_no_slot_stays_and_nobody_waits_for_it) {
  fill(own_, 0, 20);
  take_own(20);
  EXPECT_EQ(parking_->parked().dirty, slots);
  for (auto i = slots; i < 20; ++i) {
    EXPECT_EQ(own_.at(i)[0], static_cast<std::byte>(i + 1));
  }
  parking_->bring_back(numbers(0, slots));
  EXPECT_TRUE(is_intact(own_, 0, 20));
}

TEST_F(parking_own_pages_test, what_nobody_waits_for_any_more_stays) {
  fill(own_, 0, 12);
  int asked = 0;
  take_own(12, [&asked] { return ++asked <= 3; });
  EXPECT_LT(given_.size(), 12U);
  parking_->bring_back(numbers(15, static_cast<std::uint32_t>(given_.size())));
  EXPECT_TRUE(is_intact(own_, 0, 12));
}

TEST_F(parking_own_pages_test, its_end_holds_nobody) {
  fill(own_, 0, 3);
  take_own(3);
  parking_.reset();
  EXPECT_EQ(own_.at(1)[0], std::byte{0});
  EXPECT_EQ(share_.copies().count().free, slots);
}

}  // namespace
}  // namespace sluice::memhandover
