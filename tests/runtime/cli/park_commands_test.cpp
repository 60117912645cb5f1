#include "runtime/cli/park_commands.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "memhandover/base/error.hpp"

namespace sluice::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json client(int pid, char const* name, char const* kind = "training",
            char const* state = "running") {
  return {{"slot", pid % 10}, {"pid", pid}, {"name", name}, {"kind", kind}, {"state", state}};
}

json pool_of(char const* id, json clients) {
  return {{"pool", {{"id", id}}}, {"clients", std::move(clients)}};
}

/// Two pools, as query_status has them.
json two_pools() {
  auto const first =
      pool_of("00000000000000ff", {client(41, "digits"), client(42, "server", "server"),
                                   client(43, "twin"), client(40, "old", "training", "gone")});
  auto both = first;
  both["pools"] = {first, pool_of("0000000000000100", {client(44, "twin"), client(45, "41")})};
  return both;
}

std::string refusal(std::string const& job, error_kind kind) {
  try {
    (void)find_job(two_pools(), job);
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), kind);
    return why.what();
  }
  return "it was found";
}

found_job one(json const& status, char const* job) {
  auto const found = find_job(status, job);
  EXPECT_EQ(found.size(), 1U);
  return found.front();
}

TEST(find_job, finds_a_job_by_pid_or_name_in_whichever_pool) {
  EXPECT_EQ(one(two_pools(), "digits").client["pid"], 41);
  EXPECT_EQ(one(two_pools(), "44").client["pid"], 44);
  EXPECT_EQ(one(two_pools(), "44").pool_id, 0x100U);
  EXPECT_EQ(one(two_pools(), "41").client["name"], "digits") << "the pid comes first";
  EXPECT_EQ(one(pool_of("1", json::array({client(7, "x")})), "7").pool_id, 1U);
}

TEST(find_job, finds_all_places_of_a_process_with_its_kv_cache_first) {
  auto cache = client(51, "chat", "engine");
  cache["slot"] = 7;
  cache["elastic"] = {{"used_bytes", 0}};
  auto const pool = pool_of("1", json::array({client(51, "chat", "engine"), cache}));
  for (auto const* const called : {"51", "chat"}) {
    auto const found = find_job(pool, called);
    ASSERT_EQ(found.size(), 2U);
    EXPECT_EQ(found[0].client["slot"], 7);
    EXPECT_EQ(found[1].client["slot"], 1);
  }
}

TEST(find_job, names_those_that_there_are) {
  auto const said = refusal("digit", error_kind::not_found);
  EXPECT_THAT(said, HasSubstr("digits (pid 41), twin (pid 43), twin (pid 44), 41 (pid 45)"));
  EXPECT_THAT(refusal("old", error_kind::not_found), testing::Not(HasSubstr("old (pid 40)")));
  EXPECT_THROW((void)find_job(pool_of("1", json::array()), "x"), error);
}

TEST(find_job, wants_a_pid_where_a_name_means_several) {
  EXPECT_THAT(refusal("twin", error_kind::invalid_argument), HasSubstr("pids 43, 44"));
}

TEST(find_job, says_that_a_server_is_no_job) {
  EXPECT_THAT(refusal("42", error_kind::unsupported),
              HasSubstr("server (pid 42) is of the kind server"));
}

}  // namespace
}  // namespace sluice::cli
