/// Messages changed at random, and any number of descriptors beside them, over the pool's socket.
/// SLUICE_TEST_INPUTS sets ten times how many there are.
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/wire.hpp"
#include "random_runs.hpp"
#include "tests/from_environment.hpp"

namespace sluice::memhandover::trials {
namespace {

/// What clients and brokers say to each other, a message that is too long, and nested ones.
std::string any_message(std::mt19937_64& random) {
  std::array<std::string, 8> const messages{
      R"({"type":"join","version":1,"kind":"training","name":"größe","endpoint":""})",
      R"({"type":"rejoin","version":1,"pool_id":17,"slot":3,"chunk_descriptors":200})",
      R"({"type":"chunks","first":200})",
      R"({"type":"show","from":4294967295})",
      R"({"type":"error","kind":8,"message":"no \ud834\udd1e"})",
      R"({"type":"status","pool":{"bytes":1e308},"clients":[{"slot":0},{"slot":1}]})",
      R"({"type":"x","deep":)" + std::string(random() % 5000, '['),
      R"({"type":"x","long":")" + std::string(random() % (200U << 10U), 'x') + "\"}"};
  // The long one takes as long as all others together.
  return messages.at(below(random, random() % 32 == 0 ? messages.size() : messages.size() - 1));
}

void change(std::string& text, std::mt19937_64& random) {
  for (auto changes = random() % 6; changes > 0 && !text.empty(); --changes) {
    auto const at = below(random, text.size());
    switch (random() % 4) {
      case 0:
        text[at] = static_cast<char>(random());
        break;
      case 1:
        text.erase(at, random() % 8);
        break;
      case 2:
        text.insert(at, text.substr(below(random, text.size()), random() % 16));
        break;
      default:
        text.insert(at, 1, "{}[]\",:\\"[random() % 8]);
    }
  }
}

void send_raw(int socket, std::string const& text, std::vector<int> const& descriptors) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * 253)> control{};
  if (!descriptors.empty()) {
    auto const bytes = sizeof(int) * descriptors.size();
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(bytes);
    auto* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), bytes);
  }
  ASSERT_EQ(::sendmsg(socket, &header, 0), static_cast<ssize_t>(text.size()))
      << std::strerror(errno);
}

std::size_t open_descriptors() {
  std::filesystem::directory_iterator const all{"/proc/self/fd"};
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST(wire_fuzz, every_message_is_one_of_ours_or_an_error_and_leaves_no_descriptor_behind) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  unique_fd const left{ends[0]};
  unique_fd const right{ends[1]};
  int const room = 1U << 20U;
  ASSERT_EQ(::setsockopt(left.get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
  unique_fd const bell{::eventfd(0, EFD_CLOEXEC)};
  auto const all = seeds();
  auto const inputs = from_environment("SLUICE_TEST_INPUTS", 150'000) / 10 / all.size() + 1;
  auto const open_before = open_descriptors();
  std::uint64_t understood = 0;
  std::uint64_t refused = 0;
  for (auto const seed : all) {
    std::mt19937_64 random{seed};
    for (std::uint64_t i = 0; i < inputs; ++i) {
      auto text = any_message(random);
      change(text, random);
      constexpr std::array<std::size_t, 8> counts{0, 0, 0, 1, 5, 200, 201, 253};
      std::vector<int> const descriptors(counts.at(below(random, counts.size())), bell.get());
      ASSERT_NO_FATAL_FAILURE(send_raw(left.get(), text, descriptors))
          << "SLUICE_TEST_SEED=" << seed << ", input " << i;
      try {
        auto const received = receive_message(right.get(), 1000);
        ASSERT_EQ(received.has_value(), !text.empty());
        if (received) {
          ASSERT_TRUE(received->body.at("type").is_string());
          ASSERT_EQ(received->descriptors.size(), descriptors.size());
          ++understood;
        }
      } catch (error const& why) {
        ASSERT_EQ(why.kind(), error_kind::invalid_argument) << why.what();
        ++refused;
      }
    }
  }
  EXPECT_EQ(open_descriptors(), open_before);
  EXPECT_GT(understood, inputs / 10);
  EXPECT_GT(refused, inputs / 10);
}

}  // namespace
}  // namespace sluice::memhandover::trials
