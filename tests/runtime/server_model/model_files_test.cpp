#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "runtime/server/hosting/image_file.hpp"
#include "runtime/server/hosting/latency_window.hpp"
#include "runtime/server/hosting/torch_errors.hpp"

namespace sluice::server::testing {
namespace {

std::vector<std::byte> pattern(std::size_t bytes, int start) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    made[i] = static_cast<std::byte>((static_cast<std::size_t>(start) + i * 7) % 251);
  }
  return made;
}

TEST(an_image_file, returns_each_piece_from_its_aligned_place) {
  image_file image;
  std::vector<std::vector<std::byte>> pieces{pattern(1, 3), pattern(300, 5), pattern(256, 7),
                                             pattern(20'000'001, 9)};
  std::vector<std::uint64_t> offsets;
  for (auto const& piece : pieces) {
    offsets.push_back(image.append(piece));
    EXPECT_EQ(offsets.back() % weight_alignment, 0U);
  }
  std::vector<std::byte> all(image.bytes());
  image.read(0, image.bytes(), all.data());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_TRUE(std::equal(pieces[i].begin(), pieces[i].end(),
                           all.begin() + static_cast<std::ptrdiff_t>(offsets[i])));
  }
}

TEST(an_image_file, says_so_when_more_is_read_than_there_is) {
  image_file image;
  (void)image.append(pattern(10, 1));
  std::array<std::byte, 20> into{};
  EXPECT_THROW(image.read(0, 20, into.data()), error);
}

TEST(an_image_file, is_made_elsewhere_when_the_cache_folder_does_not_exist) {
  char const* const before = ::getenv("XDG_CACHE_HOME");
  std::string const restored = before == nullptr ? "" : before;
  ::setenv("XDG_CACHE_HOME", "/nowhere/at/all", 1);
  EXPECT_NO_THROW(image_file{});
  before == nullptr ? ::unsetenv("XDG_CACHE_HOME")
                    : ::setenv("XDG_CACHE_HOME", restored.c_str(), 1);
}

TEST(a_latency_window, gives_nearest_rank_quantiles) {
  latency_window window;
  EXPECT_EQ(window.summary().n, 0U);
  for (int i = 100; i >= 1; --i) {
    window.add(std::chrono::milliseconds{i});
  }
  auto const seen = window.summary();
  EXPECT_EQ(seen.n, 100U);
  EXPECT_EQ(seen.p50, std::chrono::milliseconds{50});
  EXPECT_EQ(seen.p99, std::chrono::milliseconds{99});
}

TEST(a_latency_window, forgets_what_is_old_but_counts_it) {
  latency_window window;
  for (std::size_t i = 0; i < latency_window::capacity; ++i) {
    window.add(std::chrono::hours{1});
  }
  for (std::size_t i = 0; i < latency_window::capacity; ++i) {
    window.add(std::chrono::milliseconds{1});
  }
  EXPECT_EQ(window.summary().n, 2 * latency_window::capacity);
  EXPECT_EQ(window.summary().p99, std::chrono::milliseconds{1});
}

constexpr auto* traceback =
    "The following operation failed in the TorchScript interpreter.\n"
    "Traceback of TorchScript, serialized code (most recent call last):\n"
    "  File \"code/__torch__.py\", line 8, in forward\n"
    "      ops.prim.RaiseException(_0, \"builtins.ValueError\")\n"
    "      ~~~~~~~~~~~~~~~~~~~~~~~ <--- HERE\n"
    "\n"
    "Traceback of TorchScript, original code (most recent call last):\n"
    "  File \"model.py\", line 8, in forward\n"
    "    KeyError: quoted\n"
    "    raise ValueError(\"first\\nsecond\")\n"
    "    ~~~~~~~~~~~~~~~~~~~~~~~ <--- HERE\n";

TEST(torch_messages, are_told_with_all_lines_behind_the_traceback) {
  auto const told = [](std::string const& said) { return meaning_of(traceback + said); };
  EXPECT_EQ(told("builtins.ValueError: first\nsecond\nKeyError: third\n   fourth\n"),
            "first\nsecond\nKeyError: third\n   fourth");
  EXPECT_EQ(told("RuntimeError: AssertionError: must\nbe positive\n"),
            "AssertionError: must\nbe positive");
  EXPECT_EQ(told("RuntimeError: Traceback of TorchScript, and more\n"),
            "Traceback of TorchScript, and more");
  EXPECT_EQ(told(""), "The following operation failed in the TorchScript interpreter.");
}

TEST(torch_messages, have_a_bound_that_cuts_no_character) {
  for (std::size_t before = 0; before < 4; ++before) {
    std::string text(before, 'x');
    while (text.size() < 2 * longest_meaning) {
      text += "€";
    }
    auto const told = meaning_of(text);
    EXPECT_LE(told.size(), longest_meaning + 4);
    EXPECT_TRUE(told.ends_with("€ …"));
    EXPECT_EQ(meaning_of(traceback + ("ValueError: " + text)), told);
  }
}

TEST(torch_messages, are_told_by_the_line_behind_the_traceback) {
  constexpr auto* message =
      "The following operation failed in the TorchScript interpreter.\n"
      "Traceback of TorchScript, serialized code (most recent call last):\n"
      "  File \"code/__torch__.py\", line 8, in forward\n"
      "    ops.prim.RaiseException(\"ValueError: quoted\")\n"
      "    ~~~~~~~~~~~~~~~~~~~~~~~ <--- HERE\n"
      "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x3 and 4x2)\n";
  EXPECT_EQ(meaning_of(message), "mat1 and mat2 shapes cannot be multiplied (1x3 and 4x2)");
}

TEST(torch_messages, without_traceback_are_told_without_what_torch_says_of_itself) {
  EXPECT_EQ(meaning_of("\n no such operator\nException raised from f at g.cpp:3\nframe #0"),
            "no such operator");
  EXPECT_EQ(meaning_of("two\nlines\nException raised from f at g.cpp:3\nframe #0"), "two\nlines");
  EXPECT_EQ(meaning_of("bad (Exception raised from f at g.cpp:3)"), "bad");
  EXPECT_EQ(meaning_of(""), "");
}

TEST(torch_messages, tell_memory_and_device_failures_from_bad_input) {
  auto const otherwise = error_kind::invalid_argument;
  EXPECT_EQ(kind_of("CUDA out of memory. Tried to allocate 2 GiB", otherwise),
            error_kind::out_of_memory);
  EXPECT_EQ(
      kind_of("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes", otherwise),
      error_kind::out_of_memory);
  EXPECT_EQ(kind_of("CUDA error: an illegal memory access was encountered", otherwise),
            error_kind::internal);
  EXPECT_EQ(kind_of("shape '[2]' is invalid", otherwise), otherwise);
}

TEST(torch_messages, become_errors_that_say_what_was_being_done) {
  try {
    try {
      throw std::runtime_error{"size mismatch\nException raised from f\nframe #0"};
    } catch (...) {
      rethrow_as_error("model 'add'", error_kind::invalid_argument);
    }
  } catch (error const& failure) {
    EXPECT_STREQ(failure.what(), "model 'add': size mismatch");
    EXPECT_EQ(failure.kind(), error_kind::invalid_argument);
    return;
  }
  FAIL() << "no error";
}

}  // namespace
}  // namespace sluice::server::testing
