#include "runtime/cli/address_text.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memhandover/base/error.hpp"

namespace sluice::cli {
namespace {

using nlohmann::json;

TEST(address_text, addresses_are_read_as_people_and_kernels_write_them) {
  for (auto const* text : {"0x7f12a4000000", "7f12a4000000", "0X7F12A4000000", "0x7f12_a4000000"}) {
    EXPECT_EQ(parse_address(text), 0x7f12a4000000U) << text;
  }
  for (auto const* text : {"", "0x", "12 34", "0x7g", "0x11112222333344445", "-1"}) {
    EXPECT_THROW((void)parse_address(text), error) << text;
  }
}

TEST(address_text, tells_of_an_arena_that_went_to_a_model) {
  json const instant{{"at", "2030-01-31T12:00:00.000000Z"}, {"ago_s", 1.5}};
  json mapped = instant;
  mapped["until_ago_s"] = 1.25;
  json ended = instant;
  ended["how"] = "revoked";
  json const stay{{"slot", 0},
                  {"pid", 4711},
                  {"lives", true},
                  {"kind", "training"},
                  {"holds", "arena"},
                  {"generation", 7},
                  {"chunk", 37},
                  {"offset", 4096},
                  {"mapped", mapped},
                  {"ended", ended},
                  {"went_to",
                   {{"slot", 1},
                    {"pid", 99},
                    {"lives", false},
                    {"kind", "server"},
                    {"holds", "bert"},
                    {"mapped", instant},
                    {"given", instant}}},
                  {"now", {{"owner", "serving"}, {"slot", 1}, {"holds", "bert"}}}};
  auto const text =
      address_text({{"address", "0x7f0000001000"}, {"stays", {stay}}, {"complete", true}});
  EXPECT_EQ(text,
            "address 0x7f0000001000\n"
            "in the step arena of generation 7 of pid 4711 (slot 0)\n"
            "  chunk     37, offset 4096 in it\n"
            "  mapped    2030-01-31T12:00:00.000000Z (1.500 s ago), or up to 0.250 s later\n"
            "  ended     revoked 2030-01-31T12:00:00.000000Z (1.500 s ago)\n"
            "  went to   given up 2030-01-31T12:00:00.000000Z (1.500 s ago); then model bert of "
            "pid 99 (slot 1, has ended) 2030-01-31T12:00:00.000000Z (1.500 s ago)\n"
            "  now       serving, slot 1, holds bert\n");
}

TEST(address_text, two_processes_with_the_same_address_are_told_apart) {
  auto stay_of = [](int pid) {
    return json{{"slot", 0},        {"pid", pid},      {"lives", true}, {"kind", "training"},
                {"holds", "arena"}, {"generation", 1}, {"chunk", 3},    {"offset", 0}};
  };
  constexpr auto* hint = "addresses are each process's own: --pid shows those of one alone\n";
  json story{{"address", "0x20"}, {"stays", {stay_of(7), stay_of(7)}}, {"complete", true}};
  EXPECT_THAT(address_text(story), testing::Not(testing::HasSubstr(hint)));
  story["stays"].push_back(stay_of(8));
  EXPECT_THAT(address_text(story), testing::EndsWith(hint));
}

TEST(address_text, what_an_engine_has_there_is_said_to_be_an_engines) {
  json const stay{{"slot", 2},          {"pid", 43},  {"lives", true}, {"kind", "engine"},
                  {"holds", "weights"}, {"chunk", 3}, {"offset", 0}};
  EXPECT_THAT(address_text({{"address", "0x20"}, {"stays", {stay}}, {"complete", true}}),
              testing::HasSubstr("in weights of an engine of pid 43 (slot 2)\n"));
}

TEST(address_text, says_what_is_known_of_addresses_that_never_had_memory) {
  json const reserved{{"slot", 0},        {"pid", 4711},     {"lives", true},  {"kind", "training"},
                      {"holds", "arena"}, {"generation", 2}, {"base", "0x10"}, {"bytes", 1024}};
  EXPECT_THAT(address_text({{"address", "0x20"},
                            {"stays", json::array()},
                            {"reserved", {reserved}},
                            {"complete", true}}),
              testing::HasSubstr("no memory is known to have been mapped there"));
  auto const nothing = address_text({{"stays", json::array()}, {"complete", false}});
  EXPECT_THAT(nothing, testing::HasSubstr("no process of this pool"));
  EXPECT_THAT(nothing, testing::HasSubstr("oldest entries"));
  EXPECT_NO_THROW((void)address_text(json{{"stays", {json{}, 3, "x"}}}));
}

TEST(address_text, several_pools_are_told_apart) {
  auto known_to = [](char const* backend, int device) {
    return json{{"pool", {{"backend", backend}, {"device", device}}},
                {"stays", json::array()},
                {"complete", true}};
  };
  auto story = known_to("host", 0);
  story["address"] = "0x20";
  story["pools"] = {known_to("host", 0), known_to("cuda", 1)};
  EXPECT_EQ(address_text(story),
            "address 0x20\n"
            "\npool of host\n"
            "no process of this pool is known to have had memory of the pool there\n"
            "\npool of cuda device 1\n"
            "no process of this pool is known to have had memory of the pool there\n");
}

}  // namespace
}  // namespace sluice::cli
