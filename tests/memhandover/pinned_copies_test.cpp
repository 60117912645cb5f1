#include "memhandover/client/pinned_copies.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <map>
#include <memory>
#include <sstream>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using std::chrono::milliseconds;

std::map<void*, std::size_t> registered;
std::size_t refused_from = 0;  ///< calls that succeed before
int refusals = 0;
CUcontext current = nullptr;  ///< the thread's
int context_of_the_device = 0;

CUcontext primary() {
  return reinterpret_cast<CUcontext>(&context_of_the_device);
}

class pinned_copies_test : public testing::Test {
 protected:
  static constexpr std::uint64_t slot = 32_MiB;
  static constexpr std::uint32_t slots = 5;

  pinned_copies_test() {
    registered.clear();
    refused_from = 100;
    refusals = 0;
    current = nullptr;
    auto made = std::make_shared<cuda_driver>();
    made->cuDeviceGet = [](CUdevice* device, int /*ordinal*/) {
      *device = 0;
      return CUDA_SUCCESS;
    };
    made->cuDevicePrimaryCtxRetain = [](CUcontext* context, CUdevice /*device*/) {
      *context = primary();
      return CUDA_SUCCESS;
    };
    made->cuCtxGetCurrent = [](CUcontext* context) {
      *context = current;
      return CUDA_SUCCESS;
    };
    made->cuCtxSetCurrent = [](CUcontext context) {
      current = context;
      return CUDA_SUCCESS;
    };
    made->cuGetErrorString = [](CUresult /*of*/, char const** text) {
      *text = "no";
      return CUDA_SUCCESS;
    };
    made->cuMemHostRegister = [](void* where, std::size_t bytes, unsigned flags) {
      EXPECT_EQ(flags, CU_MEMHOSTREGISTER_PORTABLE);
      if (registered.size() >= refused_from) {
        ++refusals;
        return CUDA_ERROR_OUT_OF_MEMORY;
      }
      EXPECT_TRUE(registered.emplace(where, bytes).second);
      return CUDA_SUCCESS;
    };
    made->cuMemHostUnregister = [](void* where) {
      if (current == nullptr) {
        return CUDA_ERROR_INVALID_CONTEXT;
      }
      EXPECT_EQ(registered.erase(where), 1U);
      return CUDA_SUCCESS;
    };
    driver_ = made;
  }

  void make_present(std::uint64_t bytes) { table_.header().populated.store(bytes); }

  host_copy_files files_ = create_host_copies(slots * slot, slot);
  host_copy_table table_{files_};
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

TEST_F(pinned_copies_test, end_with_what_is_staged_for_a_disk) {
  constexpr std::uint64_t small = 2_MiB;
  unique_fd disk{::memfd_create("disk", MFD_CLOEXEC)};
  ASSERT_EQ(::ftruncate(disk.get(), 3 * small), 0);
  auto const files = create_host_copies(2 * small, small, std::move(disk));
  host_copy_table{files}.header().populated.store(2 * small);
  auto const said = nlohmann::json{
      {"bytes", 2 * small}, {"slot_bytes", small}, {"disk_bytes", 3 * small}, {"holder", 0}};
  host_copy_share share{duplicate(files), said};
  EXPECT_EQ(share.staging().size(), host_copy_share::staged * small);
  EXPECT_EQ(share.disk_offset(2), 0U);
  EXPECT_EQ(share.disk_offset(4), 2 * small);
  EXPECT_ANY_THROW((void)share.disk_offset(1));
  EXPECT_ANY_THROW((void)share.disk_offset(5));
  EXPECT_ANY_THROW((void)share.at(2));
  {
    pinned_copies pinned{share, driver_, 0};
    EXPECT_EQ(pinned.advance(), milliseconds{0});
    EXPECT_FALSE(pinned.has_all());
    EXPECT_EQ(pinned.slots(), 2U);
    EXPECT_EQ(pinned.advance(), std::nullopt);
    EXPECT_TRUE(pinned.has_all());
    EXPECT_EQ(registered.at(share.staging().data()), share.staging().size());
  }
  EXPECT_TRUE(registered.empty());
  auto without = said;
  without["disk_bytes"] = small;
  EXPECT_ANY_THROW((host_copy_share{duplicate(files), without}));
}

TEST_F(pinned_copies_test, that_the_driver_refuses_are_asked_for_once_and_what_is_left_is_said) {
  make_present(slots * slot);
  refused_from = 1;
  std::ostringstream said;
  auto const logger = spdlog::default_logger();
  spdlog::set_default_logger(std::make_shared<spdlog::logger>(
      "test", std::make_shared<spdlog::sinks::ostream_sink_st>(said)));
  {
    pinned_copies pinned{share_, driver_, 0};
    EXPECT_EQ(pinned.advance(), milliseconds{0});
    EXPECT_EQ(pinned.advance(), std::nullopt);
    EXPECT_EQ(pinned.advance(), std::nullopt);
    EXPECT_EQ(pinned.slots(), 2U);
  }
  spdlog::set_default_logger(logger);
  EXPECT_EQ(refusals, 1);
  EXPECT_THAT(said.str(), testing::HasSubstr("64 MiB of the 160 MiB"));
  EXPECT_THAT(said.str(), testing::HasSubstr("no (CUDA error 2)"));
  EXPECT_TRUE(registered.empty());
}

TEST_F(pinned_copies_test, are_unpinned_by_a_thread_that_has_no_context) {
  make_present(slots * slot);
  {
    pinned_copies pinned{share_, driver_, 0};
    EXPECT_EQ(pinned.advance(), milliseconds{0});
    EXPECT_EQ(current, primary());
    current = nullptr;
  }
  EXPECT_TRUE(registered.empty());
  EXPECT_EQ(current, nullptr) << "the thread has none afterwards either";
}

TEST_F(pinned_copies_test, are_not_touched_by_a_forked_child) {
  make_present(slots * slot);
  auto pinned = std::make_unique<pinned_copies>(share_, driver_, 0);
  EXPECT_EQ(pinned->advance(), milliseconds{0});
  auto const child = ::fork();
  if (child == 0) {
    pinned.reset();
    ::_exit(registered.size() == 1 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  pinned.reset();
  EXPECT_TRUE(registered.empty());
}

TEST_F(pinned_copies_test, stay_within_the_mapping_whatever_is_written_to_the_table) {
  auto& header = table_.header();
  pinned_copies pinned{share_, driver_, 0};
  for (auto const slot_bytes : {0ULL, 1ULL, 1ULL << 40U}) {
    for (auto const count : {0U, 1U, ~0U}) {
      header.slot_bytes.store(slot_bytes);
      header.slots.store(count);
      header.populated.store(0);
      EXPECT_GT(pinned.advance().value(), milliseconds{0});
      EXPECT_EQ(share_.at(slots - 1).size(), slot);
      EXPECT_ANY_THROW((void)share_.at(slots));
    }
  }
  header.populated.store(~0ULL);
  while (pinned.advance()) {
  }
  EXPECT_EQ(pinned.slots(), slots);
  for (auto const& [where, bytes] : registered) {
    EXPECT_GE(where, share_.at(0).data());
    EXPECT_LE(static_cast<std::byte*>(where) + bytes, share_.at(slots - 1).data() + slot);
  }
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
  for (auto const& holder : {nlohmann::json(copy_holders), nlohmann::json(65536),
                             nlohmann::json(-1), nlohmann::json("0"), nlohmann::json()}) {
    EXPECT_THROW(
        (host_copy_share{{duplicate(files_.bytes.get()), duplicate(files_.table.get())},
                         {{"bytes", slots * slot}, {"slot_bytes", slot}, {"holder", holder}}}),
        error)
        << holder;
  }
  EXPECT_ANY_THROW((void)share_.at(slots));
}

}  // namespace
}  // namespace sluice::memhandover
