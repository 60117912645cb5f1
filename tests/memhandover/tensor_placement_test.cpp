#include "memhandover/allocation/tensor_placement.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

/// Placements beside a second book in which every unit of every chunk has its tensor.
class a_placement : public testing::Test {
 protected:
  using sizes_of = std::vector<std::uint64_t>;
  static constexpr std::uint64_t chunk = 1024;
  static constexpr std::uint64_t unit = 16;

  void make(std::uint32_t count) {
    places_.emplace(chunk, count, unit);
    free_.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
      free_.insert(i);
    }
    owners_.assign(count * (chunk / unit), nobody);
  }

  [[nodiscard]] std::vector<std::uint32_t> offered() const { return {free_.begin(), free_.end()}; }
  /// Chunks that somebody else has, such as training.
  void withhold(std::vector<std::uint32_t> const& which) {
    for (auto const each : which) {
      free_.erase(each);
    }
  }

  /// Loads, and checks that every tensor has memory that is nobody else's.
  std::optional<load_decision> load(model_id model, sizes_of const& sizes,
                                    residence lasts = residence::passing) {
    auto const made = places_->load(model, sizes, offered(), lasts);
    if (!made) {
      return made;
    }
    EXPECT_EQ(made->tensors.size(), sizes.size());
    std::set<std::uint32_t> taken{made->taken.begin(), made->taken.end()};
    EXPECT_TRUE(std::includes(free_.begin(), free_.end(), taken.begin(), taken.end()));
    std::set<std::uint32_t> touched;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      auto const& spot = made->tensors[i];
      EXPECT_EQ(spot.offset % unit, 0U);
      for (std::uint64_t at = 0; at < std::max<std::uint64_t>(sizes[i], 1); at += unit) {
        auto address = spot.offset + at;
        if (spot.range != tensor_spot::whole_view) {
          address = made->stitched.at(spot.range).at(address / chunk) * chunk + address % chunk;
        }
        auto const in = static_cast<std::uint32_t>(address / chunk);
        EXPECT_TRUE(!free_.contains(in) || taken.contains(in)) << "chunk " << in << " is not taken";
        EXPECT_EQ(owners_.at(address / unit), nobody) << "two tensors at " << address;
        owners_.at(address / unit) = model;
        touched.insert(in);
      }
    }
    EXPECT_EQ(std::vector<std::uint32_t>(touched.begin(), touched.end()), made->touched);
    for (auto const each : taken) {
      EXPECT_TRUE(touched.contains(each)) << "chunk " << each << " is taken for nothing";
      free_.erase(each);
    }
    return made;
  }

  unload_decision unload(model_id model) {
    auto gone = places_->unload(model);
    std::replace(owners_.begin(), owners_.end(), model, nobody);
    for (auto const each : gone.emptied) {
      EXPECT_EQ(live_in(each), 0U);
      free_.insert(each);
    }
    for (auto const each : gone.kept) {
      EXPECT_GT(live_in(each), 0U);
    }
    return gone;
  }

  [[nodiscard]] std::uint64_t live_in(std::uint32_t number) const {
    auto const begin = owners_.begin() + static_cast<std::ptrdiff_t>(number * (chunk / unit));
    return static_cast<std::uint64_t>(
               std::count_if(begin, begin + chunk / unit, [](auto o) { return o != nobody; })) *
           unit;
  }
  [[nodiscard]] std::uint64_t live() const {
    return static_cast<std::uint64_t>(
               std::count_if(owners_.begin(), owners_.end(), [](auto o) { return o != nobody; })) *
           unit;
  }

  static constexpr model_id nobody = ~0ULL;
  std::optional<tensor_placement> places_;
  std::set<std::uint32_t> free_;
  std::vector<model_id> owners_;
};

TEST_F(a_placement, fills_neighbouring_chunks_without_a_gap) {
  make(8);
  auto const made = load(1, {700, 700, 700, 400, 400});  // 2 KiB and 912 bytes, with the rounding
  ASSERT_TRUE(made);
  EXPECT_EQ(made->taken, (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_TRUE(made->stitched.empty());
  EXPECT_EQ(made->way, placing_way::tidy);
}

TEST_F(a_placement, shares_a_chunk_between_small_models) {
  make(8);
  ASSERT_TRUE(load(1, {300}));
  auto const second = load(2, {300, 16});
  ASSERT_TRUE(second);
  EXPECT_TRUE(second->taken.empty());
  EXPECT_TRUE(std::ranges::equal(places_->models_in(0), sizes_of{1, 2}));
  EXPECT_EQ(places_->held_bytes(), chunk);
}

TEST_F(a_placement, gives_whole_chunks_back_when_a_model_goes_whose_tail_is_shared) {
  make(8);
  ASSERT_TRUE(load(1, {chunk, chunk, chunk, 304}));
  ASSERT_TRUE(load(2, {304}));
  auto const gone = unload(1);
  EXPECT_EQ(gone.emptied, (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(gone.kept, (std::vector<std::uint32_t>{3}));
  EXPECT_TRUE(std::ranges::equal(places_->models_in(3), sizes_of{2}));
  EXPECT_EQ(unload(2).emptied, (std::vector<std::uint32_t>{3}));
  EXPECT_EQ(places_->held_bytes(), 0U);
}

TEST_F(a_placement, lets_others_use_the_end_of_a_large_tensors_last_chunk) {
  make(8);
  ASSERT_TRUE(load(1, {2 * chunk + 512}));
  auto const small = load(2, {256, 256});
  ASSERT_TRUE(small);
  EXPECT_TRUE(small->taken.empty());
}

TEST_F(a_placement, takes_the_shortest_run_that_holds_a_model) {
  make(12);
  withhold({3, 4, 7});  // runs of 3, 2 and 4
  auto const made = load(1, {2 * chunk});
  ASSERT_TRUE(made);
  EXPECT_EQ(made->taken, (std::vector<std::uint32_t>{5, 6}));
}

TEST_F(a_placement, stitches_a_tensor_that_no_run_holds_from_the_shortest_runs) {
  make(9);
  withhold({1, 3, 6});  // runs of 1, 1, 2 and 2
  auto const made = load(1, {3 * chunk + 16, 16});
  ASSERT_TRUE(made);
  ASSERT_EQ(made->stitched.size(), 1U);
  EXPECT_EQ(made->stitched[0], (std::vector<std::uint32_t>{0, 2, 4, 5}));
  EXPECT_EQ(made->tensors[0].range, 0U);
  EXPECT_EQ(made->tensors[1].range, tensor_spot::whole_view);
}

TEST_F(a_placement, needs_no_stitching_for_tensors_that_fit_the_runs_there_are) {
  make(9);
  withhold({2, 5});
  auto const made = load(1, {chunk, chunk, chunk, chunk, chunk, chunk});
  ASSERT_TRUE(made);
  EXPECT_TRUE(made->stitched.empty());
}

TEST_F(a_placement, stitches_across_the_ends_of_runs_rather_than_need_another_chunk) {
  make(5);
  withhold({1, 3});  // single chunks: three tensors of 640 bytes fill two
  withhold({4});
  auto const made = load(1, {640, 640, 640});
  ASSERT_TRUE(made);
  EXPECT_EQ(made->way, placing_way::dense);
  EXPECT_EQ(made->stitched.size(), 1U);
  EXPECT_EQ(places_->held_bytes(), 2 * chunk);
}

TEST_F(a_placement, uses_ends_and_beginnings_of_chunks_that_others_hold_before_it_refuses) {
  make(3);
  ASSERT_TRUE(load(1, {640}));
  ASSERT_TRUE(load(2, {640}));
  ASSERT_TRUE(load(3, {640}));
  auto const made = load(4, {384, 384, 384});
  ASSERT_TRUE(made);
  EXPECT_EQ(made->way, placing_way::tight);
  EXPECT_EQ(live(), 3 * chunk);
}

TEST_F(a_placement, stitches_the_end_of_one_chunk_to_the_beginning_of_another) {
  make(2);
  for (model_id model = 1; model <= 4; ++model) {  // two in each chunk
    ASSERT_TRUE(load(model, {496}));
  }
  unload(1);
  unload(4);
  auto const made = load(5, {1024});
  ASSERT_TRUE(made);
  ASSERT_EQ(made->stitched.size(), 1U);
  EXPECT_EQ(made->stitched[0], (std::vector<std::uint32_t>{1, 0}));
  EXPECT_EQ(made->tensors[0].offset, 496U);
}

TEST_F(a_placement, changes_nothing_when_a_load_does_not_fit) {
  make(4);
  ASSERT_TRUE(load(1, {chunk, 300, 300}));
  auto const before = places_->held_bytes();
  EXPECT_FALSE(load(2, {chunk, chunk, 500, 500, 500}));
  EXPECT_EQ(places_->held_bytes(), before);
  EXPECT_EQ(places_->live_bytes(), live());
  EXPECT_TRUE(load(2, {chunk, chunk, 400}));
}

TEST_F(a_placement, keeps_what_stays_apart_from_what_goes) {
  make(8);
  ASSERT_TRUE(load(1, {300}, residence::lasting));
  auto const passing = load(2, {300});
  ASSERT_TRUE(passing);
  EXPECT_EQ(passing->taken.size(), 1U);
  auto const lasting = load(3, {300}, residence::lasting);
  ASSERT_TRUE(lasting);
  EXPECT_TRUE(lasting->taken.empty());
  EXPECT_EQ(unload(2).emptied.size(), 1U);
}

TEST_F(a_placement, mixes_what_stays_with_what_goes_before_it_refuses) {
  make(1);
  ASSERT_TRUE(load(1, {300}, residence::lasting));
  EXPECT_TRUE(load(2, {300}));
}

TEST_F(a_placement, places_a_model_without_tensors_and_tensors_without_bytes) {
  make(2);
  ASSERT_TRUE(load(1, {}));
  EXPECT_EQ(places_->held_bytes(), 0U);
  ASSERT_TRUE(load(2, {0, 0}));
  EXPECT_EQ(places_->live_bytes(), 2 * unit);
  EXPECT_TRUE(unload(1).emptied.empty());
}

TEST_F(a_placement, succeeds_with_as_many_chunks_as_it_says_wherever_they_lie) {
  std::mt19937_64 random{5};
  for (int round = 0; round < 300; ++round) {
    make(64);
    sizes_of sizes(1 + random() % 20);
    for (auto& each : sizes) {
      each = 1 + random() % (random() % 4 == 0 ? 4 * chunk : chunk);
    }
    auto const need = places_->chunks_that_suffice(sizes);
    std::vector<std::uint32_t> all(64);
    std::iota(all.begin(), all.end(), 0U);
    std::shuffle(all.begin(), all.end(), random);
    withhold({all.begin() + need, all.end()});
    EXPECT_TRUE(load(1, sizes)) << "round " << round;
  }
}

TEST_F(a_placement, refuses_what_the_caller_may_not_offer) {
  make(4);
  ASSERT_TRUE(load(1, {chunk}));
  auto offering = [&](std::vector<std::uint32_t> const& which) {
    return [this, which] { (void)places_->load(2, sizes_of{16}, which); };
  };
  EXPECT_THROW(offering({0})(), error) << "held";
  EXPECT_THROW(offering({4})(), error) << "does not exist";
  EXPECT_THROW(offering({2, 1})(), error) << "out of order";
  EXPECT_THROW((void)places_->load(1, sizes_of{16}, offered()), error) << "loaded already";
  EXPECT_THROW(places_->unload(9), error);
  EXPECT_THROW(tensor_placement(chunk, 4, 48), error);
  EXPECT_THROW(tensor_placement(chunk, 0, 16), error);
}

TEST_F(a_placement, keeps_its_books_through_random_loads_and_unloads) {
  std::map<placing_way, int> ways;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random{seed};
    make(40);
    std::set<std::uint32_t> withheld;
    std::set<model_id> loaded;
    int refused = 0;
    for (model_id step = 0; step < 1500; ++step) {
      if (random() % 2 == 0) {  // training takes a chunk, or gives one
        auto& from = random() % 2 == 0 && free_.size() > 2 ? free_ : withheld;
        auto& to = &from == &free_ ? withheld : free_;
        if (!from.empty()) {
          to.insert(from.extract(
              std::next(from.begin(), static_cast<std::ptrdiff_t>(random() % from.size()))));
        }
      }
      if (!loaded.empty() && random() % 5 < 2) {
        auto const victim =
            std::next(loaded.begin(), static_cast<std::ptrdiff_t>(random() % loaded.size()));
        unload(*victim);
        loaded.erase(victim);
      } else {
        sizes_of sizes(random() % 12);
        for (auto& each : sizes) {
          each = random() % 3 == 0 ? random() % (6 * chunk) : random() % (chunk / 2);
        }
        auto const before = places_->live_bytes();
        if (auto const made =
                load(step, sizes, random() % 8 == 0 ? residence::lasting : residence::passing)) {
          loaded.insert(step);
          ++ways[made->way];
        } else {
          ++refused;
          EXPECT_EQ(places_->live_bytes(), before);
        }
      }
      ASSERT_GE(places_->live_bytes(), live());
      ASSERT_LE(places_->live_bytes(), places_->held_bytes());
      ASSERT_FALSE(HasFailure()) << "seed " << seed << ", step " << step;
    }
    EXPECT_GT(refused, 0);
    for (auto const model : loaded) {
      unload(model);
    }
    EXPECT_EQ(live(), 0U);
    EXPECT_EQ(places_->held_bytes(), 0U);
    EXPECT_EQ(places_->live_bytes(), 0U);
    EXPECT_EQ(free_.size() + withheld.size(), 40U);
  }
  EXPECT_EQ(ways.size(), 3U) << "not every way has been tried";
}

TEST_F(a_placement, takes_for_placed_what_lies_there_already_and_nothing_twice) {
  make(6);
  ASSERT_TRUE(load(1, {chunk / 2}));
  std::vector<extent> const free{{chunk / 2, chunk}, {2 * chunk, 3 * chunk + unit}};
  EXPECT_TRUE(places_->restore(2, free, residence::passing));
  EXPECT_EQ(places_->live_bytes(), chunk / 2 + chunk / 2 + chunk + unit);
  EXPECT_EQ(places_->models_in(0).size(), 2U);
  auto const live = places_->live_bytes();
  for (std::vector<extent> const& taken : {std::vector<extent>{{4 * chunk, 5 * chunk}, {0, unit}},
                                           {{3 * chunk, 3 * chunk + unit}},
                                           {{5 * chunk, 7 * chunk}},
                                           {{4 * chunk, 4 * chunk}}}) {
    EXPECT_FALSE(places_->restore(3, taken, residence::passing));
    EXPECT_EQ(places_->live_bytes(), live);
  }
  EXPECT_THROW((void)places_->restore(2, {}, residence::passing), error);
  EXPECT_EQ(places_->unload(2).emptied, (std::vector<std::uint32_t>{2, 3}));
  EXPECT_EQ(places_->unload(1).emptied, (std::vector<std::uint32_t>{0}));
}

}  // namespace
}  // namespace sluice::memhandover
