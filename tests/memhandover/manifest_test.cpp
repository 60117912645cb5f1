#include "memhandover/ledger/manifest.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <random>
#include <stdexcept>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

using testing::HasSubstr;

constexpr std::uint32_t manifest_chunks = 64;

/// An entry whose parts all follow from `version`, so that parts of two versions do not go together.
manifest_entry entry_of(std::string const& key, std::uint32_t version) {
  manifest_entry entry;
  entry.key = key;
  for (std::uint32_t i = 0; i < version % 7 + 1; ++i) {
    entry.chunks.push_back({i, version});
  }
  entry.offset = version;
  entry.bytes = static_cast<std::uint64_t>(version) << 20U;
  entry.blob.assign(version * 37 % 3000, static_cast<std::byte>(version));
  return entry;
}

bool same(manifest_entry const& a, manifest_entry const& b) {
  return a.key == b.key && a.offset == b.offset && a.bytes == b.bytes && a.blob == b.blob &&
         a.chunks.size() == b.chunks.size() &&
         std::equal(a.chunks.begin(), a.chunks.end(), b.chunks.begin(),
                    [](auto x, auto y) { return x.chunk == y.chunk && x.epoch == y.epoch; });
}

class manifest_test : public testing::Test {
 protected:
  manifest_test() {
    if (::ftruncate(fd_.get(), static_cast<off_t>(manifest_bytes(manifest_chunks))) != 0) {
      throw std::runtime_error{"ftruncate"};
    }
  }
  [[nodiscard]] manifest open() const {
    return {fd_.get(), manifest_chunks, shared_segment::access::read_write};
  }
  [[nodiscard]] std::vector<std::byte> image() const {
    shared_segment const segment{fd_.get(), shared_segment::access::read_only};
    return {segment.data(), segment.data() + segment.bytes()};
  }

  unique_fd fd_{::memfd_create("manifest-test", MFD_CLOEXEC)};
};

TEST_F(manifest_test, what_is_published_is_read_by_another_process_view) {
  auto writing = open();
  auto const first = entry_of("first", 5);
  auto const second = entry_of("second", 6);
  writing.publish(first);
  writing.publish(second);
  auto const found = open().entries();
  ASSERT_EQ(found.size(), 2U);
  EXPECT_TRUE(same(found[0], second)) << "the latest comes first";
  EXPECT_TRUE(same(found[1], first));
}

TEST_F(manifest_test, an_entry_with_the_same_key_replaces_and_one_withdrawn_is_gone) {
  auto writing = open();
  writing.publish(entry_of("a", 1));
  writing.publish(entry_of("b", 2));
  writing.publish(entry_of("a", 3));
  ASSERT_EQ(writing.entries().size(), 2U);
  EXPECT_TRUE(same(writing.entries()[0], entry_of("a", 3)));
  writing.withdraw("a");
  writing.withdraw("never there");
  ASSERT_EQ(writing.entries().size(), 1U);
  EXPECT_EQ(writing.entries()[0].key, "b");
  writing.clear();
  EXPECT_TRUE(writing.entries().empty());
}

TEST_F(manifest_test, what_is_in_use_is_said_until_it_is_not_and_of_the_entry_that_was_meant) {
  auto writing = open();
  auto const first = writing.publish(entry_of("bert", 3));
  auto const second = writing.publish(entry_of("vad", 4));
  auto const in_use = [this](std::string const& key) {
    auto const all = open().entries();
    return std::find_if(all.begin(), all.end(), [&](auto const& each) { return each.key == key; })
        ->in_use;
  };
  writing.set_in_use(first, true);
  EXPECT_TRUE(in_use("bert"));
  EXPECT_FALSE(in_use("vad"));
  writing.set_in_use(first, false);
  EXPECT_FALSE(in_use("bert"));
  // Of one that has gone nothing is said, also where another stands in its place.
  writing.withdraw("bert");
  writing.publish(entry_of("new", 5));
  writing.set_in_use(first, true);
  EXPECT_FALSE(in_use("new"));
  EXPECT_FALSE(in_use("vad"));
  writing.set_in_use(second, true);
  EXPECT_TRUE(in_use("vad"));
}

TEST_F(manifest_test, cells_are_used_again) {
  auto writing = open();
  for (std::uint32_t version = 1; version <= 5000; ++version) {
    writing.publish(entry_of("model", version));
  }
  ASSERT_EQ(writing.entries().size(), 1U);
  EXPECT_TRUE(same(writing.entries()[0], entry_of("model", 5000)));
}

TEST_F(manifest_test, what_does_not_fit_is_refused_and_leaves_everything_as_it_was) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP()
      << "one thread and much to read: minutes under ThreadSanitizer, which has nothing to find";
#endif
  auto writing = open();
  auto refused = [&](manifest_entry const& entry) {
    try {
      writing.publish(entry);
    } catch (error const& why) {
      return why;
    }
    return error{error_kind::internal, "it was accepted"};
  };
  EXPECT_EQ(refused(entry_of("", 1)).kind(), error_kind::invalid_argument);
  EXPECT_THAT(refused(entry_of(std::string(256, 'k'), 1)).what(), HasSubstr("256"));
  auto large = entry_of("large", 1);
  large.blob.resize(max_manifest_blob + 1);
  EXPECT_EQ(refused(large).kind(), error_kind::invalid_argument);
  large.blob.resize(max_manifest_blob / 16);
  std::size_t fitted = 0;
  for (; fitted < max_manifest_entries; ++fitted) {
    large.key = std::to_string(fitted);
    try {
      writing.publish(large);
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::out_of_memory);
      break;
    }
  }
  EXPECT_GT(fitted, 200U);
  EXPECT_LT(fitted, max_manifest_entries);
  EXPECT_EQ(writing.entries().size(), fitted);
}

TEST_F(manifest_test, a_segment_of_another_size_is_refused) {
  EXPECT_THROW(manifest(fd_.get(), manifest_chunks * 1000, shared_segment::access::read_only),
               error);
}

// The writer may be killed behind any byte that it writes: cells first, then the directory's word.
TEST_F(manifest_test, an_entry_torn_at_any_byte_is_absent_and_the_others_are_whole) {
  auto writing = open();
  auto const old = entry_of("old", 9);
  writing.publish(old);
  auto const before = image();
  auto const fresh = entry_of("fresh", 40);
  writing.publish(fresh);
  auto const after = image();
  std::vector<std::size_t> in_cells;
  std::vector<std::size_t> in_directory;
  constexpr std::size_t directory_end = max_manifest_entries * sizeof(std::uint64_t);
  for (std::size_t i = 0; i < after.size(); ++i) {
    if (before[i] != after[i]) {
      (i < directory_end ? in_directory : in_cells).push_back(i);
    }
  }
  ASSERT_GT(in_cells.size(), 100U);
  shared_segment const segment{fd_.get(), shared_segment::access::read_write};
  // Killed while it wrote cells.
  std::memcpy(segment.data(), before.data(), before.size());
  for (auto const at : in_cells) {
    auto const found = open().entries();
    ASSERT_EQ(found.size(), 1U) << "byte " << at;
    ASSERT_TRUE(same(found[0], old));
    segment.data()[at] = after[at];
  }
  // The word of the directory is one store; whole, it brings the entry.
  for (auto const at : in_directory) {
    segment.data()[at] = after[at];
  }
  ASSERT_EQ(open().entries().size(), 2U);
  // Damage at any byte makes the entry absent, and no other.
  for (auto const at : in_cells) {
    segment.data()[at] = static_cast<std::byte>(~static_cast<unsigned>(after[at]));
    auto const found = open().entries();
    ASSERT_EQ(found.size(), 1U) << "byte " << at;
    ASSERT_TRUE(same(found[0], old));
    segment.data()[at] = after[at];
  }
  // Any word in the directory is survived, whatever it names.
  std::mt19937_64 random{1};
  auto* const words = reinterpret_cast<std::uint64_t*>(segment.data());
  for (int i = 0; i < 300; ++i) {
    words[500] = random() >> random() % 40;
    auto const found = open().entries();
    ASSERT_GE(found.size(), 1U);
    ASSERT_LE(found.size(), 2U);
    ASSERT_TRUE(std::any_of(found.begin(), found.end(),
                            [&](auto const& entry) { return same(entry, old); }));
  }
}

TEST_F(manifest_test, one_that_replaces_another_may_be_cut_short_between_the_two_stores) {
  auto writing = open();
  writing.publish(entry_of("a", 1));
  auto const before = image();
  writing.publish(entry_of("a", 2));
  // The old word again, as if the writer had died before it took it away.
  shared_segment const segment{fd_.get(), shared_segment::access::read_write};
  std::memcpy(segment.data(), before.data(), sizeof(std::uint64_t));
  ASSERT_EQ(open().entries().size(), 1U);
  EXPECT_TRUE(same(open().entries()[0], entry_of("a", 2)));
  writing.withdraw("a");
  EXPECT_TRUE(open().entries().empty()) << "the old one does not come back";
}

TEST_F(manifest_test, a_writer_killed_at_a_random_instant_leaves_each_entry_whole_or_absent) {
  std::mt19937 random{std::random_device{}()};
  for (int i = 0; i < 40; ++i) {
    auto const writer = ::fork();
    ASSERT_GE(writer, 0);
    if (writer == 0) {
      auto writing = open();
      for (std::uint32_t version = 1;; ++version) {
        writing.publish(entry_of("key" + std::to_string(version % 5), version));
        if (version % 3 == 0) {
          writing.withdraw("key" + std::to_string(version % 4));
        }
      }
    }
    ::usleep(static_cast<useconds_t>(random() % 5000));
    ::kill(writer, SIGKILL);
    ASSERT_EQ(::waitpid(writer, nullptr, 0), writer);
    for (auto const& entry : open().entries()) {
      ASSERT_TRUE(same(entry, entry_of(entry.key, static_cast<std::uint32_t>(entry.offset))));
    }
  }
}

}  // namespace
}  // namespace sluice::memhandover
