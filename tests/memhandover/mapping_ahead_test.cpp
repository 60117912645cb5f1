#include "memhandover/client/detail/mapping_ahead.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/device/host_memory.hpp"

namespace sluice::memhandover::detail {
namespace {

using ::testing::ElementsAre;

/// The host's, which can be made to refuse a mapping.
class refusing_memory final : public device_memory {
 public:
  explicit refusing_memory(device_memory& of) : of_(of) {}
  [[nodiscard]] pool_shape const& shape() const noexcept override { return of_.shape(); }
  [[nodiscard]] std::byte* reserve(std::uint32_t chunks) override { return of_.reserve(chunks); }
  void release(std::byte* where, std::uint32_t chunks) noexcept override {
    of_.release(where, chunks);
  }
  void map(std::byte* where, std::span<std::uint32_t const> chunks) override {
    if (refuses) {
      throw error{error_kind::out_of_memory, "not now"};
    }
    of_.map(where, chunks);
    mapped += static_cast<int>(chunks.size());
  }
  void unmap(std::byte* where, std::uint32_t count) noexcept override {
    of_.unmap(where, count);
    mapped -= static_cast<int>(count);
  }
  void revoke(std::byte* where, std::span<std::uint32_t const> chunks) override {
    of_.revoke(where, chunks);
  }
  void map_private(std::byte* where, std::uint32_t count) override {
    of_.map_private(where, count);
  }
  void scrub(std::byte* where, std::span<std::uint32_t const> chunks) override {
    of_.scrub(where, chunks);
  }

  bool refuses = false;
  int mapped = 0;  ///< chunks, at present

 private:
  device_memory& of_;
};

class chunks_mapped_ahead : public testing::Test {
 protected:
  chunks_mapped_ahead() {
    for (std::uint32_t number = 0; number < shape_.chunk_count; ++number) {
      auto* const at = host_->map_anew({&number, 1});
      *at = std::byte(number);
      host_->unmap_and_release(at, 1);
    }
  }
  static std::vector<int> first_bytes(mapping_ahead::mapped const& of) {
    std::vector<int> found;
    for (std::size_t i = 0; i < of.chunks.size(); ++i) {
      found.push_back(static_cast<int>(of.data[i * 64_KiB]));
    }
    return found;
  }

  pool_shape shape_{backend_kind::host, -1, 64_KiB, 16};
  pool_descriptors chunks_ = create_host_chunks(shape_);
  std::unique_ptr<device_memory> host_ = open_device_memory(shape_, chunks_);
  refusing_memory memory_{*host_};
};

TEST_F(chunks_mapped_ahead,
       are_where_they_were_mapped_and_the_others_in_the_place_of_those_that_have_not_come) {
  mapping_ahead ahead{memory_};
  ahead.map(std::vector<std::uint32_t>{1, 2});
  ahead.map(std::vector<std::uint32_t>{3, 5, 7, 9});
  EXPECT_EQ(memory_.mapped, 4);
  auto const there = ahead.put_right(std::vector<std::uint32_t>{3, 6, 8, 9});
  ASSERT_TRUE(there);
  EXPECT_THAT(there->chunks, ElementsAre(3, 6, 8, 9));
  EXPECT_THAT(first_bytes(*there), ElementsAre(3, 6, 8, 9));
  EXPECT_EQ(memory_.mapped, 4);
  memory_.unmap_and_release(there->data, 4);
}

TEST_F(chunks_mapped_ahead, are_nowhere_if_there_are_fewer_or_none_was_foreseen) {
  mapping_ahead ahead{memory_};
  EXPECT_FALSE(ahead.put_right(std::vector<std::uint32_t>{3}));
  ahead.map(std::vector<std::uint32_t>{3, 5, 7});
  EXPECT_FALSE(ahead.put_right(std::vector<std::uint32_t>{3, 5}));
  EXPECT_EQ(memory_.mapped, 0);
}

TEST_F(chunks_mapped_ahead, leave_nothing_behind_where_they_cannot_be_mapped_or_are_not_wanted) {
  mapping_ahead ahead{memory_};
  memory_.refuses = true;
  ahead.map(std::vector<std::uint32_t>{3, 5});
  EXPECT_FALSE(ahead.put_right(std::vector<std::uint32_t>{3, 5}));
  memory_.refuses = false;
  ahead.map(std::vector<std::uint32_t>{3, 5, 7});
  memory_.refuses = true;
  EXPECT_FALSE(ahead.put_right(std::vector<std::uint32_t>{3, 6, 7}));
  EXPECT_EQ(memory_.mapped, 0);
  memory_.refuses = false;
  { mapping_ahead{memory_}.map(std::vector<std::uint32_t>{3, 5}); }
  EXPECT_EQ(memory_.mapped, 0);
}

}  // namespace
}  // namespace sluice::memhandover::detail
