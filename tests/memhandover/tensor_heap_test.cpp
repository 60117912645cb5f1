#include "memhandover/allocation/tensor_heap.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <new>
#include <string>

#include "tests/runtime/server_model/heap_pool.hpp"

namespace sluice::memhandover {
namespace {

using server::testing::heap_pool;
using std::chrono::steady_clock;

/// A heap over a small pool; every tensor that is loaded is filled with a number of its own.
class a_tensor_heap : public testing::Test {
 protected:
  using sizes_of = std::vector<std::uint64_t>;
  static constexpr auto chunk = heap_pool::chunk;
  static constexpr std::uint64_t unit = 256;

  void make(std::uint32_t count, std::uint32_t training = 0) {
    pool_ = std::make_shared<heap_pool>(count, training);
    heap_.emplace(pool_, unit);
  }

  [[nodiscard]] loaded_tensors load(sizes_of const& sizes, std::string_view what = "a model") {
    auto made = heap_->load({sizes, what}, steady_clock::now() + patience, &report_);
    EXPECT_EQ(made.addresses().size(), sizes.size());
    return made;
  }

  static void fill(loaded_tensors const& model, sizes_of const& sizes, int first) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      std::memset(model.addresses()[i], first + static_cast<int>(i), sizes[i]);
    }
  }
  static void expect_filled(loaded_tensors const& model, sizes_of const& sizes, int first) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      for (std::uint64_t at = 0; at < sizes[i]; ++at) {
        ASSERT_EQ(static_cast<int>(model.addresses()[i][at]), first + static_cast<int>(i))
            << "tensor " << i << " at " << at;
      }
    }
  }

  [[nodiscard]] std::uint64_t serving() const { return pool_->usage().serving_bytes; }

  std::shared_ptr<heap_pool> pool_;
  std::optional<tensor_heap> heap_;
  handover_report report_;
};

TEST_F(a_tensor_heap, gives_every_tensor_memory_of_its_own) {
  make(16);
  sizes_of const first{3 * chunk, 100, 700, 5000, 1};
  sizes_of const second{200, chunk, 2000};
  auto const a = load(first);
  auto const b = load(second);
  fill(a, first, 10);
  fill(b, second, 100);
  expect_filled(a, first, 10);
  expect_filled(b, second, 100);
  for (auto const* const address : a.addresses()) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(address) % unit, 0U);
  }
}

TEST_F(a_tensor_heap, gives_a_chunk_back_when_its_last_tensor_goes) {
  make(16);
  auto first = load({1000}, "first");
  EXPECT_EQ(pool_->note(0), "first");
  auto second = load({1000}, "second");
  EXPECT_EQ(serving(), chunk);
  EXPECT_EQ(pool_->note(0), "2 models");
  first = {};
  EXPECT_EQ(serving(), chunk);
  EXPECT_EQ(pool_->note(0), "second");
  second = {};
  EXPECT_EQ(serving(), 0U);
}

TEST_F(a_tensor_heap, stitches_a_tensor_that_is_one_piece_to_its_user) {
  make(8);
  std::vector<loaded_tensors> apart;
  for (int i = 0; i < 4; ++i) {  // two chunks each
    apart.push_back(load({2 * chunk}));
  }
  apart[0] = {};
  apart[2] = {};
  sizes_of const wanted{4 * chunk};
  {
    auto const model = load(wanted);
    EXPECT_EQ(heap_->count().stitched_ranges, 1U);
    fill(model, wanted, 77);
    expect_filled(model, wanted, 77);
    EXPECT_EQ(static_cast<int>(pool_->whole_view()[0]), 77);
    EXPECT_EQ(static_cast<int>(pool_->whole_view()[5 * chunk]), 77);
    EXPECT_NE(static_cast<int>(pool_->whole_view()[2 * chunk]), 77);
  }
  EXPECT_EQ(pool_->stitched(), 1) << "kept for the next load";
  {
    auto const again = load(wanted);
    EXPECT_EQ(heap_->count().stitched_ahead, 1U);
  }
  heap_->tidy();
  EXPECT_EQ(pool_->stitched(), 0) << "half of the pool is too much to keep";
}

TEST_F(a_tensor_heap, tells_where_a_model_lies_in_chunks_that_it_shares_and_in_those_it_stitches) {
  make(8);
  auto const small = load({1000}, "small");
  auto const other = load({1000}, "other");
  std::vector<loaded_tensors> apart;
  for (int i = 0; i < 7; ++i) {
    apart.push_back(load({chunk}));
  }
  apart[0] = {};
  apart[2] = {};
  auto const before = pool_->uses().size();
  ASSERT_EQ(before, 9U);
  EXPECT_EQ(pool_->uses()[1].what, "other") << "who has come, not all who are there";
  EXPECT_EQ(pool_->uses()[1].chunks, pool_->uses()[0].chunks);
  EXPECT_EQ(pool_->uses()[1].where, nullptr);
  auto const large = load({2 * chunk}, "large");
  auto const uses = pool_->uses();
  ASSERT_EQ(uses.size(), before + 2) << "in the whole view, and where it is stitched";
  EXPECT_EQ(uses[before].where, nullptr);
  EXPECT_EQ(uses[before + 1].where, large.addresses()[0]);
  EXPECT_EQ(uses[before + 1].chunks.size(), 2U);
  EXPECT_EQ(uses[before + 1].what, "large");
}

TEST_F(a_tensor_heap, stitches_ahead_what_a_load_will_need) {
  make(16);
  std::vector<loaded_tensors> apart;
  for (int i = 0; i < 16; ++i) {
    apart.push_back(load({chunk}));
  }
  apart[3] = {};
  apart[7] = {};
  sizes_of const wanted{2 * chunk};
  heap_->prepare(wanted);
  heap_->prepare(wanted);
  EXPECT_EQ(pool_->stitched(), 1);
  EXPECT_EQ(serving(), 14 * chunk) << "nothing is taken";
  auto const model = load(wanted);
  EXPECT_EQ(heap_->count().stitched_ahead, 1U);
  heap_.reset();
  EXPECT_EQ(pool_->stitched(), 1) << "a model outlives the heap";
}

TEST_F(a_tensor_heap, unmaps_all_that_it_stitched_when_it_goes) {
  make(4);
  {
    auto const first = load({chunk});
    auto second = load({chunk});
    auto const third = load({chunk});
    second = {};
    auto const stitched = load({2 * chunk});
    EXPECT_EQ(pool_->stitched(), 1);
  }
  heap_.reset();
  EXPECT_EQ(pool_->stitched(), 0);
  EXPECT_EQ(serving(), 0U);
}

TEST_F(a_tensor_heap, takes_trainings_chunks_only_if_free_ones_do_not_do) {
  make(8, 6);
  auto const first = load({2 * chunk});
  EXPECT_EQ(report_.bytes_reclaimed, 0U);
  EXPECT_EQ(pool_->acquisitions(), 0);
  auto const second = load({2 * chunk, 100});
  EXPECT_EQ(report_.bytes_reclaimed, 3 * chunk);
  EXPECT_EQ(report_.bytes, 3 * chunk);
}

TEST_F(a_tensor_heap, lies_in_the_chunks_that_training_gave_whatever_was_foreseen) {
  for (bool const wrongly : {false, true}) {
    make(16, 12);
    if (wrongly) {
      pool_->foresee_wrongly();
    }
    sizes_of const first{2 * chunk, 900, 3 * chunk};
    sizes_of const second{5 * chunk, 300, 100};
    {
      auto const a = load(first, "first");
      auto const b = load(second, "second");
      fill(a, first, 10);
      fill(b, second, 100);
      expect_filled(a, first, 10);
      expect_filled(b, second, 100);
      EXPECT_EQ(pool_->uses().front().chunks.front(), 0U);
      EXPECT_EQ(serving(), heap_->hole_bytes() + 10 * chunk + 1024 + 512 + 256);
    }
    EXPECT_EQ(serving(), 0U);
    EXPECT_EQ(heap_->hole_bytes(), 0U);
  }
}

TEST_F(a_tensor_heap, leaves_nothing_where_a_load_was_foreseen_that_failed) {
  make(16, 16);
  pool_->fail_next(error_kind::deadline_exceeded);
  EXPECT_THROW((void)load({5 * chunk}), error);
  EXPECT_EQ(heap_->hole_bytes(), 0U);
  auto const after = load({16 * chunk});
  EXPECT_EQ(serving(), 16 * chunk);
}

TEST_F(a_tensor_heap, gives_chunks_back_that_holes_made_needless) {
  make(8, 6);
  auto const first = load({chunk + 1024});
  auto const second = load({2 * chunk, 1024});
  EXPECT_EQ(serving(), 4 * chunk);
  EXPECT_EQ(pool_->usage().free_bytes, chunk);
}

TEST_F(a_tensor_heap, fills_holes_when_training_has_too_little_without_asking_it) {
  make(3, 0);
  auto const first = load({2304});
  auto const second = load({2304});
  auto const third = load({2304});
  ASSERT_EQ(serving(), 3 * chunk);
  auto const fourth = load({1536, 1536, 1536});
  EXPECT_EQ(heap_->count().tight_loads, 1U);
  EXPECT_EQ(pool_->acquisitions(), 0);
  try {
    (void)load({1536});
    ADD_FAILURE() << "there was no room";
  } catch (error const& refused) {
    EXPECT_EQ(refused.kind(), error_kind::out_of_memory);
  }
}

TEST_F(a_tensor_heap, decides_again_when_training_was_faster) {
  make(8);
  pool_->lose_races(2);
  auto const first = load({chunk});
  EXPECT_EQ(pool_->acquisitions(), 0);
  pool_->lose_races(100);
  auto const second = load({chunk});
  EXPECT_EQ(pool_->acquisitions(), 1);
  EXPECT_EQ(serving(), 2 * chunk);
}

TEST_F(a_tensor_heap, holds_nothing_of_a_load_that_failed) {
  make(8);
  for (auto const kind : {error_kind::out_of_memory, error_kind::deadline_exceeded}) {
    pool_->fail_next(kind);
    try {
      (void)load({chunk, 100});
      ADD_FAILURE() << "the pool had nothing to give";
    } catch (error const& refused) {
      EXPECT_EQ(refused.kind(), kind);
    }
    EXPECT_EQ(serving(), 0U);
    EXPECT_EQ(heap_->hole_bytes(), 0U);
  }
  EXPECT_TRUE(load({chunk, 100}));
}

TEST_F(a_tensor_heap, has_what_it_had_after_any_call_of_the_pool_has_failed_in_a_load) {
  bool hit = true;
  for (int which = 1; hit; ++which) {
    SCOPED_TRACE("call " + std::to_string(which));
    ASSERT_LT(which, 100);
    hit = false;
    for (bool const wrongly : {false, true}) {
      make(12, 4);
      if (wrongly) {
        pool_->foresee_wrongly();
      }
      auto const stays = load({chunk + 1000}, "stays");
      std::vector<loaded_tensors> apart;
      for (int i = 0; i < 4; ++i) {
        apart.push_back(load({chunk}, "apart"));
      }
      apart[0] = {};
      apart[2] = {};
      for (sizes_of const& wanted :
           {sizes_of{100}, sizes_of{2 * chunk, 300, 2 * chunk + 1}, sizes_of{5 * chunk, 600}}) {
        auto const before = pool_->usage();
        auto const holes = heap_->hole_bytes();
        pool_->fail_call(which);
        try {
          auto const model = load(wanted, "large");
        } catch (std::bad_alloc const&) {
          heap_->tidy();
        }
        hit = pool_->call_failed() || hit;
        auto const now = pool_->usage();
        EXPECT_EQ(now.serving_bytes, before.serving_bytes);
        EXPECT_EQ(heap_->hole_bytes(), holes);
        EXPECT_EQ(pool_->wrongly_given_back(), 0);
      }
      apart.clear();
      EXPECT_EQ(serving(), 2 * chunk);
    }
  }
}

}  // namespace
}  // namespace sluice::memhandover
