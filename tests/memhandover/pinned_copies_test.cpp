#include "memhandover/client/pinned_copies.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <map>
#include <memory>

#include "memhandover/base/bytes.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using std::chrono::milliseconds;

std::map<void*, std::size_t> registered;
std::size_t refused_from = 0;  ///< calls that succeed before

class pinned_copies_test : public testing::Test {
 protected:
  static constexpr std::uint64_t slot = 32_MiB;
  static constexpr std::uint32_t slots = 5;

  pinned_copies_test() {
    registered.clear();
    refused_from = 100;
    auto made = std::make_shared<cuda_driver>();
    made->cuCtxGetCurrent = [](CUcontext* context) {
      *context = reinterpret_cast<CUcontext>(registered_context());
      return CUDA_SUCCESS;
    };
    made->cuGetErrorString = [](CUresult /*of*/, char const** text) {
      *text = "no";
      return CUDA_SUCCESS;
    };
    made->cuMemHostRegister = [](void* where, std::size_t bytes, unsigned flags) {
      EXPECT_EQ(flags, CU_MEMHOSTREGISTER_PORTABLE);
      if (registered.size() >= refused_from) {
        return CUDA_ERROR_OUT_OF_MEMORY;
      }
      EXPECT_TRUE(registered.emplace(where, bytes).second);
      return CUDA_SUCCESS;
    };
    made->cuMemHostUnregister = [](void* where) {
      EXPECT_EQ(registered.erase(where), 1U);
      return CUDA_SUCCESS;
    };
    driver_ = made;
  }

  static int* registered_context() {
    static int context = 0;
    return &context;
  }
  void make_present(std::uint64_t bytes) { table_.header().populated.store(bytes); }

  host_copy_files files_ = create_host_copies(slots * slot, slot);
  host_copy_table table_{files_.table.get()};
  host_copy_share share_{{duplicate(files_.bytes.get()), duplicate(files_.table.get())},
                         {{"bytes", slots* slot}, {"slot_bytes", slot}, {"holder", 0}}};
  std::shared_ptr<cuda_driver const> driver_;
};

TEST_F(pinned_copies_test, come_in_pieces_of_whole_slots_as_their_pages_are_there) {
  {
    pinned_copies pinned{share_, driver_, 0};
    EXPECT_GT(pinned.advance().value(), milliseconds{0});
    EXPECT_TRUE(registered.empty()) << "no page is there";
    make_present(3 * slot);
    EXPECT_EQ(pinned.advance(), milliseconds{0});
    EXPECT_EQ(pinned.slots(), 2U);
    EXPECT_EQ(registered.at(share_.at(0).data()), 2 * slot);
    EXPECT_GT(pinned.advance().value(), milliseconds{0});
    make_present(slots * slot);
    EXPECT_EQ(pinned.advance(), milliseconds{0});
    EXPECT_EQ(pinned.advance(), std::nullopt);
    EXPECT_EQ(pinned.slots(), slots);
    EXPECT_EQ(registered.at(share_.at(4).data()), slot);
    EXPECT_EQ(pinned.advance(), std::nullopt);
  }
  EXPECT_TRUE(registered.empty()) << "the driver keeps what is unmapped";
}

TEST_F(pinned_copies_test, that_the_driver_refuses_are_asked_for_once) {
  make_present(slots * slot);
  refused_from = 1;
  pinned_copies pinned{share_, driver_, 0};
  EXPECT_EQ(pinned.advance(), milliseconds{0});
  EXPECT_EQ(pinned.advance(), std::nullopt);
  EXPECT_EQ(pinned.slots(), 2U);
}

TEST_F(pinned_copies_test, a_driver_that_cannot_pin_is_not_asked) {
  make_present(slots * slot);
  auto const lacking = std::make_shared<cuda_driver>(*driver_);
  lacking->cuMemHostUnregister = nullptr;
  pinned_copies pinned{share_, lacking, 0};
  EXPECT_EQ(pinned.advance(), std::nullopt);
  EXPECT_EQ(pinned.slots(), 0U);
  EXPECT_TRUE(registered.empty());
}

TEST_F(pinned_copies_test, of_a_share_that_is_not_what_was_said_there_are_none) {
  EXPECT_ANY_THROW(
      (host_copy_share{{duplicate(files_.bytes.get()), duplicate(files_.table.get())},
                       {{"bytes", slots * slot}, {"slot_bytes", slot / 2}, {"holder", 0}}}));
  EXPECT_ANY_THROW(
      (host_copy_share{{duplicate(files_.table.get()), duplicate(files_.table.get())},
                       {{"bytes", slots * slot}, {"slot_bytes", slot}, {"holder", 0}}}));
  EXPECT_ANY_THROW((void)share_.at(slots));
}

}  // namespace
}  // namespace sluice::memhandover
