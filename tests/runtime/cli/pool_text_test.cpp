#include "runtime/cli/pool_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sluice::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json whole_pool() {
  return json::parse(R"({
    "pool": {"id": "00ff", "backend": "host", "device": 0, "chunk_bytes": 2097152, "chunks": 70,
             "bytes": 146800640, "writer": "server"},
    "clients": [{"slot": 0, "kind": "training", "pid": 41, "name": "digits"},
                {"slot": 1, "kind": "server", "pid": 42, "name": "server"},
                {"slot": 2, "kind": "engine", "pid": 43, "name": "vllm"}],
    "runs": [{"first": 0, "count": 3, "owner": "serving", "slot": 1, "holds": "bert"},
             {"first": 3, "count": 2, "owner": "free"},
             {"first": 5, "count": 1, "owner": "dirty"},
             {"first": 6, "count": 60, "owner": "training", "slot": 0, "holds": "arena"},
             {"first": 66, "count": 1, "owner": "free"},
             {"first": 67, "count": 1, "owner": "training", "slot": 0, "holds": null},
             {"first": 68, "count": 1, "owner": "engine", "slot": 2, "holds": "weights"},
             {"first": 69, "count": 1, "owner": "training", "slot": 0, "holds": "arena"}],
    "handovers": {"recent": [{"seq": 7, "bytes": 6291456, "notify_us": 40.0, "gate_us": 1.5, "drain_us": 0.0,
                              "revoke_us": 250.0, "ledger_us": 50.0, "map_us": 0.5, "total_us": 342.0}]}})");
}

TEST(pool_text, every_chunk_has_a_letter_and_every_holder_a_row) {
  EXPECT_EQ(pool_text(whole_pool()),
            R"(pool 00ff: 140 MiB in 70 chunks of 2 MiB, backend host, written by the server
chunks, 64 a line: T training, S serving, E engine, - dirty, . free
       0  SSS..-TTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTTT
      64  TT.TET
holders
  slot  kind      pid  name    holds    chunks  bytes
  0     training  41   digits  -        1       2 MiB
  0     training  41   digits  arena    61      122 MiB
  1     server    42   server  bert     3       6 MiB
  2     engine    43   vllm    weights  1       2 MiB
free: 4 chunks, the longest run of neighbours 3, fragmentation 25.0%
latest handovers
  handover  bytes  notify    gate      drain     revoke    ledger    map       total
  7         6 MiB  0.040 ms  0.002 ms  0.000 ms  0.250 ms  0.050 ms  0.001 ms  0.342 ms
)");
}

TEST(pool_text, says_which_job_has_a_priority) {
  auto pool = whole_pool();
  EXPECT_THAT(pool_text(pool), testing::Not(HasSubstr("priorities")));
  pool["clients"][0]["priority"] = "high";
  pool["clients"][0]["min_bytes"] = 4194304;
  EXPECT_THAT(pool_text(pool), HasSubstr("high      4 MiB"));
}

TEST(pool_text, jobs_that_have_been_parked_stand_before_handovers) {
  auto pool = whole_pool();
  EXPECT_THAT(pool_text(pool), testing::Not(HasSubstr("parked")));
  pool["clients"][0]["parking"] = {{"parks", 2},          {"parked_bytes", 2097152},
                                   {"window_ms", 1000.0}, {"resident_ms", 600.0},
                                   {"owed_in_ms", 20.0},  {"missed_us", 0.0}};
  auto const text = pool_text(pool);
  EXPECT_THAT(text, HasSubstr("60.0%"));
  EXPECT_THAT(text, HasSubstr("20.000 ms"));
  EXPECT_LT(text.find("\nparked\n"), text.find("\nlatest handovers\n"));
}

TEST(pool_text, pools_stand_one_below_the_other) {
  auto const one = whole_pool();
  auto several = one;
  several["pools"] = {one, one};
  EXPECT_EQ(pool_text(several), pool_text(one) + "\n" + pool_text(one));
}

TEST(pool_text, a_pool_that_is_all_taken_is_not_fragmented) {
  EXPECT_EQ(
      free_summary(json::parse(R"([{"first": 0, "count": 9, "owner": "training", "slot": 0}])")),
      json::parse(R"({"chunks": 0, "longest_run": 0, "fragmentation": 0.0})"));
}

TEST(pool_text, whatever_is_missing_or_odd_is_shown_all_the_same) {
  EXPECT_THAT(pool_text(json{}), HasSubstr("holders: none"));
  EXPECT_THAT(pool_text(json::parse(R"({"runs": 3, "clients": 7, "handovers": []})")),
              HasSubstr("handovers: none"));
  auto pool = whole_pool();
  pool["runs"][3]["count"] = 4'000'000'000'000ULL;
  pool["clients"] = nullptr;
  EXPECT_LT(pool_text(pool).size(), 4000U);
}

TEST(pool_list, tells_state_and_processes) {
  using memhandover::pool_holder;
  memhandover::found_pool used;
  used.id = 255;
  used.shape = {memhandover::backend_kind::host, 0, 2 << 20, 70};
  used.runtime_dir = "/r";
  used.holders = {{7, 1, "sluice", pool_holder::role::broker},
                  {8, 1, "python", pool_holder::role::client},
                  {9, 1, "python", pool_holder::role::other}};
  auto left = used;
  left.runtime_dir.clear();
  left.holders = {{9, 1, "python", pool_holder::role::other},
                  {10, 1, "python", pool_holder::role::other}};
  left.shape.backend = memhandover::backend_kind::cuda;
  left.shape.device = 1;
  memhandover::found_pool foreign;
  foreign.problem = "its layout is version 9";
  foreign.holders = {{11, 1, "x", pool_holder::role::other}};
  EXPECT_EQ(pool_list_text(pool_list({used, left, foreign})), R"(pools
  pool              state       backend        bytes    broker  runtime folder  clients     others
  00000000000000ff  in use      host           140 MiB  7       /r              8 (python)  9 (python)
  00000000000000ff  orphaned    cuda device 1  140 MiB  -       -               -           9 (python), 10 (python)
  -                 unreadable  -              -        -       -               -           11 (x)
  its layout is version 9
)");
  EXPECT_EQ(pool_list_text(pool_list({})), "pools: none\n");
}

}  // namespace
}  // namespace sluice::cli
