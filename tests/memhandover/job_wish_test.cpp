#include "memhandover/broker/job_wish.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/detail/admission.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/pool_status.hpp"

namespace sluice::memhandover {
namespace {

using namespace sluice::literals;
using testing::AllOf;
using testing::HasSubstr;

constexpr pool_shape hundred_chunks{backend_kind::host, -1, 2_MiB, 100};

/// What is said of it.
template <typename Work>
std::string said_by(Work&& work) {
  try {
    work();
  } catch (error const& why) {
    return why.what();
  }
  return {};
}

TEST(job_wish, is_as_usual_where_the_environment_says_nothing) {
  EXPECT_EQ(job_wish_in("", ""), job_wish{});
  EXPECT_EQ(job_wish_in("normal", "0"), job_wish{});
  EXPECT_EQ(job_wish{}.chunks_of(hundred_chunks), 0U);
}

TEST(job_wish, is_read_in_bytes_and_in_parts_of_the_pool_and_means_whole_chunks) {
  EXPECT_EQ(job_wish_in("low", "").rank, priority::low);
  EXPECT_EQ(job_wish_in("high", "").rank, priority::high);
  EXPECT_EQ(job_wish_in("", std::to_string(4_MiB)).chunks_of(hundred_chunks), 2U);
  EXPECT_EQ(job_wish_in("", std::to_string(4_MiB + 1)).chunks_of(hundred_chunks), 3U);
  EXPECT_EQ(job_wish_in("", "25%").chunks_of(hundred_chunks), 25U);
  EXPECT_EQ(job_wish_in("", "12.1%").chunks_of(hundred_chunks), 13U);
  EXPECT_EQ(job_wish_in("", "100%").chunks_of(hundred_chunks), 100U);
  EXPECT_EQ(job_wish_in("", "0%"), job_wish{});
  EXPECT_EQ(job_wish_in("", "18446744073709551615").chunks_of(hundred_chunks), 1ULL << 43U);
}

TEST(job_wish, that_is_wrong_is_refused_with_the_variable_and_what_it_may_be) {
  for (auto const* const wrong : {"urgent", "LOW", " low", "3"}) {
    EXPECT_THAT(said_by([&] { (void)job_wish_in(wrong, ""); }),
                AllOf(HasSubstr("SLUICE_PRIORITY"), HasSubstr("low, normal or high")));
  }
  for (auto const* const wrong : {"4GiB", "much", "-1", "101%", "-1%", "%", "nan%", "1e99%", "5 %",
                                  "18446744073709551616", "0x10"}) {
    EXPECT_THAT(said_by([&] { (void)job_wish_in("", wrong); }),
                AllOf(HasSubstr("SLUICE_MIN_MEMORY"), HasSubstr("number of bytes"),
                      HasSubstr("0% to 100%")))
        << wrong;
  }
}

TEST(job_wish, is_the_same_when_it_has_been_sent) {
  for (auto const& wish :
       {job_wish{}, job_wish{priority::low, 0, 0}, job_wish{priority::high, 5_MiB, 0},
        job_wish{priority::normal, 0, 250'000}}) {
    nlohmann::json join = nlohmann::json::object();
    add_wish(join, wish);
    EXPECT_EQ(wish_in(join), wish);
  }
  EXPECT_THAT(said_by([] { (void)wish_in({{"priority", "urgent"}}); }), HasSubstr("urgent"));
  EXPECT_THAT(said_by([] { (void)wish_in({{"priority", 7}}); }), HasSubstr("priority"));
  EXPECT_THAT(said_by([] { (void)wish_in({{"least_ppm", 1'000'001}}); }), HasSubstr("1000001"));
  EXPECT_THAT(said_by([] { (void)wish_in({{"least_bytes", "much"}}); }), HasSubstr("least_bytes"));
}

class admission : public testing::Test {
 protected:
  job_standing ask(job_wish const& wish, client_kind kind = client_kind::training) {
    return detail::admit(view_, traits_of(kind), wish);
  }
  void seat(std::uint32_t slot, std::string const& name, job_standing standing) {
    write_client(view_, slot, {client_kind::training, this_process(), 0, name, "", standing});
  }

  pool_files files_ = create_ledger(hundred_chunks);
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
};

TEST_F(admission, is_refused_by_name_where_minimums_would_be_more_than_the_pool) {
  EXPECT_EQ(ask({priority::high, 0, 1'000'000}), (job_standing{priority::high, 100}));
  seat(0, "first", {priority::low, 60});
  seat(1, "second", {priority::normal, 0});
  EXPECT_EQ(ask({priority::normal, 80_MiB, 0}), (job_standing{priority::normal, 40}));
  EXPECT_EQ(ask({priority::low, 0, 0}), (job_standing{priority::low, 0}));
  EXPECT_THAT(said_by([&] {
                (void)ask({priority::normal, 82_MiB, 0});
              }),
              AllOf(HasSubstr("82 MiB cannot be promised"), HasSubstr("120 MiB to first (pid"),
                    HasSubstr("80 MiB are left"), HasSubstr("--min-memory"),
                    testing::Not(HasSubstr("second"))));
  view_.clients()[0].status.store(static_cast<std::uint32_t>(client_status::gone));
  EXPECT_EQ(ask({priority::normal, 0, 1'000'000}).least_chunks, 100U) << "the dead need nothing";
}

TEST_F(admission, knows_priorities_and_minimums_of_training_alone) {
  EXPECT_EQ(ask({}, client_kind::engine), job_standing{});
  EXPECT_EQ(ask({}, client_kind::server), job_standing{});
  for (auto const kind : {client_kind::engine, client_kind::server}) {
    EXPECT_THAT(said_by([&] {
                  (void)ask({priority::high, 0, 0}, kind);
                }),
                HasSubstr("only training jobs"));
  }
}

TEST_F(admission, is_shown_and_does_not_pass_to_a_slots_next_owner) {
  seat(0, "first", {priority::high, 10});
  auto const told = [&] { return describe_pool(view_)["clients"][0]; };
  EXPECT_EQ(told()["priority"], "high");
  EXPECT_EQ(told()["min_bytes"], 20_MiB);
  seat(0, "next", {});
  EXPECT_EQ(told()["priority"], "normal");
  EXPECT_EQ(told()["min_bytes"], 0);
}

TEST_F(admission, a_damaged_entry_is_of_a_usual_priority_and_promises_no_more_than_the_pool) {
  seat(0, "first", {priority::high, 10});
  auto& entry = view_.clients()[0];
  entry.rank.store(17);
  entry.least_chunks.store(~0U);
  EXPECT_EQ(standing_of(entry, 100), (job_standing{priority::normal, 100}));
  EXPECT_EQ(describe_pool(view_)["clients"][0]["priority"], "normal");
  EXPECT_THAT(said_by([&] { (void)ask({priority::normal, 1, 0}); }), HasSubstr("0 B are left"));
}

}  // namespace
}  // namespace sluice::memhandover
