#include "memhandover/ledger/promised_chunks.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "memhandover/base/bytes.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using indices = std::vector<std::uint32_t>;

class promised_chunks : public testing::Test {
 protected:
  void give_to(std::uint32_t chunk, std::uint16_t client) {
    view_.chunks()[chunk].store(chunk_state{owner::training, false, client, 0}.pack());
  }

  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, 8});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
};

TEST_F(promised_chunks, are_known_when_they_have_been_chosen) {
  for (std::uint32_t const chunk : {2U, 3U, 5U}) {
    give_to(chunk, 1);
  }
  EXPECT_EQ(promised(view_, 1, 7), std::nullopt);
  promise(view_, 1, 7, indices{5, 2});
  EXPECT_EQ(promised(view_, 1, 7), (indices{2, 5}));
  EXPECT_EQ(promised(view_, 1, 8), std::nullopt) << "another demand";
  EXPECT_EQ(promised(view_, 2, 7), std::nullopt) << "another client";
  promise(view_, 1, 8, indices{3});
  EXPECT_EQ(promised(view_, 1, 8), (indices{3}));
  EXPECT_EQ(promised(view_, 1, 7), std::nullopt);
}

TEST_F(promised_chunks, are_the_clients_or_nobodys_whatever_it_says) {
  give_to(2, 1);
  give_to(3, 4);
  promise(view_, 1, 9, indices{0, 2, 3, 8, std::numeric_limits<std::uint32_t>::max()});
  EXPECT_EQ(promised(view_, 1, 9), (indices{0, 2}));
}

}  // namespace
}  // namespace sluice::memhandover
