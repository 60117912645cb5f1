#include "runtime/cli/status_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace sluice::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json full() {
  return json::parse(R"({
    "pool": {"id": "00ff", "backend": "host", "device": 0, "chunk_bytes": 2097152, "chunks": 256,
             "bytes": 536870912, "free_bytes": 67108864, "dirty_bytes": 0,
             "training_bytes": 268435456, "serving_bytes": 134217728, "engine_bytes": 67108864,
             "run_ahead_us": 195.0,
             "writer": "server"},
    "clients": [
      {"slot": 0, "kind": "training", "pid": 41, "name": "digits", "state": "running",
       "bytes": 268435456, "arena_bytes": 201326592, "persistent_bytes": 67108864, "micro_batch": 32,
       "global_batch": 64, "samples": 6400, "commits": 200, "discards": 3, "discarded_us": 41500.0,
       "long_units": [{"name": "attend<float>", "us": 1250.0, "times": 96}]},
      {"slot": 1, "kind": "server", "pid": 42, "name": "", "state": "running", "bytes": 134217728,
       "endpoint": "127.0.0.1:8000"},
      {"slot": 2, "kind": "engine", "pid": 43, "name": "vllm", "state": "running", "bytes": 67108864,
       "kept_bytes": 0, "holdings": [{"holds": "weights", "bytes": 50331648}, {"holds": null, "bytes": 16777216}]}],
    "handovers": {"count": 4, "bytes_to_serving": 536870912, "bytes_to_training": 1610612736,
                  "bytes_to_engines": 67108864,
                  "latency_us": {"n": 4, "p50": 2500.0, "p90": 4000.0, "p99": 4100.0, "max": 4100.0},
                  "recent": []},
    "server": {"endpoint": "127.0.0.1:8000", "answers": true, "state": "ready"},
    "requests": {"total": 12, "failed": 1, "in_flight": 0},
    "pauses": {"count": 12, "held_s": 0.8125, "held_share": 0.031, "min_share": 0.05, "cut_short": 1,
               "withheld_s": 0.25, "cut_short_models": ["slow", "slower"]},
    "latency_ms": {"warm": {"n": 8, "p50": 4.25, "p99": 9.0}, "cold": {"n": 0, "p50": 0.0, "p99": 0.0}},
    "models": [
      {"name": "vad", "state": "warm", "bytes": 2097152, "activation_bytes": 1048576, "idle_timeout_s": 12.5,
       "required_attainment": 0.99, "predicted_attainment": 0.995, "observed_attainment": null,
       "requests": 12, "cold_starts": 2, "prewarms": 7, "arrival_rate_per_s": 0.25, "infeasible": false},
      {"name": "bert", "state": "cold", "bytes": 0, "idle_timeout_s": null,
       "predicted_attainment": 0.5, "infeasible": true, "reason": "load_too_slow",
       "would_do": {"rate_per_s": 2.5, "latency_ms": 120.4}}]})");
}

TEST(status_text, a_job_that_has_been_parked_has_a_line_of_its_own) {
  auto status = full();
  EXPECT_THAT(status_text(status), testing::Not(HasSubstr("parked")));
  status["clients"][0]["parking"] = {
      {"parked_bytes", 4194304}, {"dirty_bytes", 2097152}, {"clean_bytes", 2097152},
      {"zero_bytes", 0},         {"disk_bytes", 1048576},  {"parks", 7},
      {"away_us", 1500.0},       {"window_ms", 60000.0},   {"away_ms", 15000.0},
      {"resident_ms", 45000.0},  {"waits_ms", 2500.0},     {"owed_in_ms", nullptr},
      {"missed_us", 7500.0}};
  EXPECT_THAT(status_text(status), HasSubstr(R"(parked
  slot  parked  dirty  clean  zero  on disk  times  away      resident  waits        owed in  missed    by an operator
  0     4 MiB   2 MiB  2 MiB  0 B   1 MiB    7      1.500 ms  75.0%     2500.000 ms  -        7.500 ms  -
)"));
  status["clients"][0]["parking"]["parks"] = 0;
  EXPECT_THAT(status_text(status), testing::Not(HasSubstr("parked")));
  auto& by_operator = status["clients"][0]["parking"]["operator"];
  by_operator = {{"done", true}, {"left_s", 59.7}};
  EXPECT_THAT(status_text(status), HasSubstr("7.500 ms  for another 60 s\n"));
  by_operator = {{"done", false}, {"left_s", nullptr}};
  EXPECT_THAT(status_text(status), HasSubstr("7.500 ms  until it is woken, is going\n"));
}

TEST(status_text, jobs_have_lines_of_their_priorities_where_one_is_not_as_usual) {
  auto status = full();
  status["clients"][0]["priority"] = "normal";
  status["clients"][0]["min_bytes"] = 0;
  EXPECT_THAT(status_text(status), testing::Not(HasSubstr("priorities")));
  status["clients"][0]["min_bytes"] = 134217728;
  EXPECT_THAT(status_text(status), HasSubstr(R"(priorities
  slot  name    priority  minimum  bytes
  0     digits  normal    128 MiB  256 MiB
)"));
  status["clients"][0]["min_bytes"] = 0;
  status["clients"][0]["priority"] = "low";
  EXPECT_THAT(status_text(status), HasSubstr("0     digits  low       0 B"));
}

TEST(status_text, what_cannot_be_parked_is_told_with_its_reason_where_there_is_host_memory) {
  auto status = full();
  status["clients"][0]["parking"]["unparkable"] = {
      {{"reason", "communicators of NCCL"}, {"bytes", 4194304}}};
  EXPECT_THAT(status_text(status), testing::Not(HasSubstr("cannot be parked")));
  status["pool"]["host_copies"] = {{"bytes", 8388608}};
  EXPECT_THAT(status_text(status), HasSubstr(R"(cannot be parked
  slot  bytes  reason
  0     4 MiB  communicators of NCCL
)"));
}

TEST(status_text, everything_stands_in_aligned_tables) {
  EXPECT_EQ(status_text(full()),
            R"(pool 00ff: 512 MiB in 256 chunks of 2 MiB, backend host, written by the server
  owner     bytes    share
  free      64 MiB   12.5%
  dirty     0 B      0.0%
  training  256 MiB  50.0%
  serving   128 MiB  25.0%
  engine    64 MiB   12.5%
clients
  slot  kind      pid  name    state    bytes    arena    persistent  micro-batch  global batch  samples  commits  discards  discarded
  0     training  41   digits  running  256 MiB  192 MiB  64 MiB      32           64            6400     200      3         41.500 ms
  1     server    42   -       running  128 MiB  -        -           -            -             -        -        -         -
  2     engine    43   vllm    running  64 MiB   -        -           -            -             -        -        -         -
engines
  slot  holds    bytes
  2     weights  48 MiB
  2     -        16 MiB
units longer than run-ahead
  slot  takes     launched  unit
  0     1.250 ms  96        attend<float>
handovers
  count  to serving  to training  to engines  p50       p90       p99       max
  4      512 MiB     1.5 GiB      64 MiB      2.500 ms  4.000 ms  4.100 ms  4.100 ms
server: http://127.0.0.1:8000, ready
  requests  failed  in flight  warm p50  warm p99  cold p50  cold p99
  12        1       0          4.2 ms    9.0 ms    -         -
compute pauses
  count  held    of the last second  min share  cut short  withheld  run-ahead
  12     0.81 s  3.1%                5.0%       1          0.25 s    195 us
  cut short while computing: slow, slower
models
  name  state  bytes  activations  idle timeout  required  predicted  observed  requests  cold starts  prewarms  arrivals/s
  vad   warm   2 MiB  1 MiB        12.5 s        99.0%     99.5%      -         12        2            7         0.25
  bert  cold   0 B    -            never         -         50.0%      -         -         -            -         -
  bert is predicted to miss its promise with any idle timeout: load_too_slow; at most 2.5 requests/s would do; a latency of 121 ms would do
)");
}

TEST(status_text, a_gpu_is_named_with_its_device) {
  auto status = full();
  status["pool"]["backend"] = "cuda";
  status["pool"]["device"] = 3;
  EXPECT_THAT(status_text(status), HasSubstr("backend cuda device 3, written"));
}

TEST(status_text, what_a_dead_server_has_left_and_a_shortage_are_told) {
  auto status = full();
  EXPECT_THAT(status_text(status), testing::Not(HasSubstr("warning")));
  status["pool"]["left_bytes"] = 67108864;
  status["pool"]["warning"] = "1 GiB is promised";
  EXPECT_THAT(status_text(status), HasSubstr("  left by a dead server  64 MiB   12.5%\n"));
  EXPECT_THAT(status_text(status), HasSubstr("\n  warning: 1 GiB is promised\n"));
}

TEST(status_text, host_copies_are_told_where_there_are_some) {
  auto status = full();
  EXPECT_THAT(status_text(status), testing::Not(HasSubstr("host copies")));
  status["pool"]["host_copies"] = {
      {"bytes", 67108864}, {"free_bytes", 33554432}, {"populated_bytes", 67108864}};
  EXPECT_THAT(status_text(status),
              HasSubstr("\nhost copies: 64 MiB, 32 MiB free, 64 MiB of it present\n"));
  status["pool"]["host_copies"]["disk"] = {{"bytes", 134217728}, {"free_bytes", 67108864}};
  EXPECT_THAT(status_text(status), HasSubstr("of it present; on disk 128 MiB, 64 MiB free\n"));
  status["pool"]["host_copies"]["disk"] = nullptr;
  status["pool"]["host_copies"]["warning"] = "the host is full";
  EXPECT_THAT(status_text(status), HasSubstr("of it present; the host is full\n"));
  status["pool"]["host_copies"]["bytes"] = 0;
  EXPECT_THAT(status_text(status), HasSubstr("\nhost copies: none; the host is full\n"));
}

TEST(status_text, pools_stand_one_below_the_other) {
  auto first = full();
  auto second = full();
  second["pool"]["device"] = 1;
  auto several = first;
  several["pools"] = {first, second};
  EXPECT_EQ(status_text(several), status_text(first) + "\n" + status_text(second));
  EXPECT_THAT(status_text(second), HasSubstr("backend host device 1, written"));
}

TEST(status_text, an_endpoint_with_tls_is_told_as_such) {
  auto status = full();
  status["server"]["scheme"] = "https";
  EXPECT_THAT(status_text(status), HasSubstr("server: https://127.0.0.1:8000, ready\n"));
  status["server"]["scheme"] = 3;
  EXPECT_THAT(status_text(status), HasSubstr("server: http://127.0.0.1:8000, ready\n"));
}

TEST(status_text, an_endpoint_of_grpc_stands_beside_the_other) {
  auto status = full();
  status["server"]["grpc_endpoint"] = "127.0.0.1:8001";
  EXPECT_THAT(status_text(status),
              HasSubstr("server: http://127.0.0.1:8000, gRPC on 127.0.0.1:8001, ready\n"));
  for (json const& none : {json(""), json(3), json(nullptr)}) {
    status["server"]["grpc_endpoint"] = none;
    EXPECT_THAT(status_text(status), HasSubstr("server: http://127.0.0.1:8000, ready\n"));
  }
}

TEST(status_text, a_server_that_does_not_answer_is_told_with_the_reason) {
  auto status = full();
  status["server"] = {{"endpoint", "127.0.0.1:8000"}, {"answers", false}, {"error", "refused"}};
  EXPECT_THAT(status_text(status), HasSubstr("server: 127.0.0.1:8000 does not answer: refused\n"));
}

TEST(status_text, without_clients_and_server_it_says_so) {
  auto status = full();
  status["clients"] = json::array();
  status["server"] = nullptr;
  status.erase("models");
  auto const text = status_text(status);
  EXPECT_THAT(text, HasSubstr("clients: none\n"));
  EXPECT_THAT(text, HasSubstr("server: none\n"));
  EXPECT_THAT(text, testing::Not(HasSubstr("models")));
}

// Another version of the broker or server may say less, or say it otherwise.
TEST(status_text, whatever_is_missing_or_odd_is_shown_as_it_can_be) {
  EXPECT_THAT(status_text(json::object()),
              HasSubstr("pool -: - in - chunks of -, backend -, written by the -"));
  for (auto const* odd :
       {"null", "[]", "3", R"({"pool": 3, "clients": {}, "models": 7, "handovers": []})",
        R"({"pool": {"bytes": "much", "free_bytes": -1}, "clients": [3, null, {"holdings": [3]}],
                              "models": [[], {"name": 4, "bytes": []}], "server": {"answers": 1}})"}) {
    EXPECT_NO_THROW((void)status_text(json::parse(odd))) << odd;
  }
}

}  // namespace
}  // namespace sluice::cli
