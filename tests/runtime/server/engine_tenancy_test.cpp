#include "runtime/server/engines/engine_tenancy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/error.hpp"

namespace sluice::server {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

json client(int slot, int pid, json changes = json::object()) {
  json made{{"slot", slot},
            {"kind", "engine"},
            {"pid", pid},
            {"pid_namespace", nullptr},
            {"state", "running"},
            {"bytes", 100},
            {"parking", {{"parked_bytes", 0}, {"parks", 2}, {"operator", nullptr}}}};
  made.update(changes, true);
  return made;
}

json pool(json clients) {
  return {{"pool",
           {{"id", "0x2a"},
            {"bytes", 4096},
            {"training_bytes", 1024},
            {"serving_bytes", 0},
            {"engine_bytes", 200},
            {"grantable_bytes", 512}}},
          {"clients", std::move(clients)}};
}

json held(bool done, int parked) {
  return {
      {"state", "parked"},
      {"bytes", 0},
      {"parking", {{"parked_bytes", parked}, {"operator", {{"done", done}, {"left_s", nullptr}}}}}};
}

/// What has been ordered, as "type slot".
struct broker {
  std::vector<std::string> orders;
  std::optional<error> failure{};

  [[nodiscard]] engine_tenancy tenancy() {
    engine_tenancy::access access;
    access.look = [] { return json{}; };
    access.order = [this](json const& order) {
      if (failure) throw error{*failure};
      orders.push_back(order.at("type").get<std::string>() + ' ' + order.at("slot").dump());
    };
    return engine_tenancy{access};
  }
};

TEST(engine_tenancy, members_are_the_engines_in_the_pool_that_descend_from_its_keeper) {
  auto const self = ::getpid(), parent = ::getppid();
  auto const status =
      pool({client(0, self), client(1, self, {{"kind", "training"}}),
            client(2, self, {{"state", "gone"}}), client(3, self, {{"pid_namespace", 4026531836}}),
            client(4, parent), client(5, self, {{"worked_us", 2500.0}})});
  auto const share = share_of(status, self);
  ASSERT_EQ(share.members.size(), 2U);
  EXPECT_EQ(share.members[0].slot, 0U);
  EXPECT_EQ(share.members[1].slot, 5U);
  EXPECT_EQ(share.members[1].pool_id, 42U);
  EXPECT_EQ(share.resident_bytes(), 200U);
  EXPECT_EQ(share.parks(), 4U);
  EXPECT_EQ(share.worked(), std::chrono::microseconds{2500}) << "the other says nothing of it";
  EXPECT_THAT(share.pool_text, HasSubstr("training holds 1 KiB"));
  EXPECT_TRUE(share_of(status, -1).members.empty());
}

TEST(engine_tenancy, of_several_pools_the_one_that_it_is_in_counts) {
  auto status = pool(json::array());
  auto const other = pool(json::array({client(7, ::getpid())}));
  status["pools"] = json::array({pool(json::array()), other});
  auto const share = share_of(status, ::getpid());
  ASSERT_EQ(share.members.size(), 1U);
  EXPECT_EQ(share.members[0].slot, 7U);
}

TEST(engine_tenancy, it_is_away_when_all_have_gone_and_back_when_all_have_come) {
  auto const pid = ::getpid();
  auto const look = [pid](json const& first, json const& second) {
    return share_of(pool({client(0, pid, first), client(1, pid, second)}), pid);
  };
  EXPECT_FALSE(look(held(true, 10), held(false, 5)).is_away());
  EXPECT_TRUE(look(held(true, 10), held(true, 10)).is_away());
  EXPECT_TRUE(look(held(true, 10), held(true, 10)).is_held());
  EXPECT_FALSE(look(json::object(), held(true, 0)).is_back());
  EXPECT_FALSE(look(json::object(), {{"parking", {{"parked_bytes", 1}}}}).is_back());
  EXPECT_TRUE(look(json::object(), json::object()).is_back());
  EXPECT_TRUE(look(json::object(), {{"state", "waiting"}}).waits());
}

TEST(engine_tenancy, who_is_held_is_not_ordered_to_go_again_and_who_is_not_is_not_woken) {
  auto const pid = ::getpid();
  json const taken{{"state", "parked"}, {"parking", {{"parked_bytes", 5}, {"wanted", false}}}};
  json const comes{{"state", "waiting"}, {"parking", {{"parked_bytes", 5}, {"wanted", true}}}};
  auto const share = share_of(pool({client(0, pid), client(1, pid, held(true, 10)),
                                    client(2, pid, taken), client(3, pid, comes)}),
                              pid);
  broker of;
  of.tenancy().park(share);
  EXPECT_THAT(std::exchange(of.orders, {}), ElementsAre("park 0", "park 2", "park 3"));
  of.tenancy().wake(share);
  EXPECT_THAT(of.orders, ElementsAre("wake 1", "wake 2"));
}

TEST(engine_tenancy, a_kv_cache_goes_before_what_computes_with_it) {
  auto const pid = ::getpid();
  json const cache{{"elastic", {{"used_bytes", 30}}}};
  auto const look = [&](json const& of_cache, json const& of_rest) {
    auto first = cache;
    first.update(of_cache, true);
    return share_of(pool({client(0, pid, of_rest), client(1, pid, first)}), pid);
  };
  broker of;
  of.tenancy().park(look(json::object(), json::object()));
  EXPECT_THAT(std::exchange(of.orders, {}), ElementsAre("park 1"));
  auto const going = look(held(false, 0), json::object());
  EXPECT_FALSE(going.awaits_order());
  of.tenancy().park(going);
  EXPECT_THAT(of.orders, ElementsAre());
  auto const gone = look(held(true, 10), json::object());
  EXPECT_TRUE(gone.awaits_order());
  EXPECT_FALSE(gone.is_away());
  of.tenancy().park(gone);
  EXPECT_THAT(std::exchange(of.orders, {}), ElementsAre("park 0"));
  auto const away = look(held(true, 10), held(true, 10));
  EXPECT_FALSE(away.awaits_order());
  EXPECT_TRUE(away.is_away());
  of.tenancy().wake(away);
  EXPECT_THAT(of.orders, ElementsAre("wake 0", "wake 1"));
}

TEST(engine_tenancy, what_a_kv_cache_holds_is_told_apart) {
  auto const pid = ::getpid();
  auto const share =
      share_of(pool({client(0, pid), client(1, pid, {{"elastic", {{"used_bytes", 30}}}})}), pid);
  ASSERT_TRUE(share.kv());
  EXPECT_EQ(share.kv()->bytes, 100U);
  EXPECT_EQ(share.kv()->used_bytes, 30U);
  EXPECT_EQ(share.resident_bytes(), 200U);
  EXPECT_FALSE(share_of(pool(json::array({client(0, pid, {{"elastic", nullptr}})})), pid).kv());
}

TEST(engine_tenancy,
     who_has_been_woken_already_is_no_failure_and_why_one_cannot_be_parked_is_told) {
  auto const pid = ::getpid();
  auto const share = share_of(pool({client(0, pid), client(1, pid, held(true, 10))}), pid);
  broker of;
  of.failure.emplace(error_kind::not_found, "it is not parked");
  EXPECT_NO_THROW(of.tenancy().wake(share));
  of.failure.emplace(error_kind::unsupported, "it cannot be parked");
  EXPECT_THROW(of.tenancy().wake(share), error);
  EXPECT_THROW(of.tenancy().park(share), error);
}

TEST(engine_tenancy, only_those_are_told_to_rest_or_to_answer_of_whom_the_pool_knows_otherwise) {
  auto const pid = ::getpid();
  auto const share = share_of(pool({client(0, pid, {{"in_use", true}}), client(1, pid)}), pid);
  EXPECT_FALSE(share.is_noted(true));
  EXPECT_FALSE(share.is_noted(false));
  broker of;
  of.tenancy().note(share, true);
  EXPECT_THAT(std::exchange(of.orders, {}), ElementsAre("use 1"));
  of.tenancy().note(share, false);
  EXPECT_THAT(of.orders, ElementsAre("use 0"));
  of.failure.emplace(error_kind::not_found, "it has ended");
  EXPECT_NO_THROW(of.tenancy().note(share, true));
}

TEST(engine_tenancy, several_are_looked_at_by_one_question) {
  auto const pid = ::getpid();
  int questions = 0;
  engine_tenancy::access access;
  access.look = [&] {
    ++questions;
    return pool({client(0, pid), client(1, pid)});
  };
  auto const seen = engine_tenancy{access}.look(std::vector<pid_t>{pid, -1, pid});
  EXPECT_EQ(questions, 1);
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[0].members.size(), 2U);
  EXPECT_TRUE(seen[1].members.empty());
}

TEST(engine_tenancy, its_environment_has_it_join_as_an_engine_and_not_past_the_pool) {
  auto const file = std::filesystem::path{testing::TempDir()} / "library.so";
  (void)std::ofstream{file};
  engine_tenancy::access access;
  access.installed.runtime_library = file;
  access.pool = {"/run/sluice", "host"};
  access.device = 3;
  policy::model_policy chat;
  chat.name = "chat";
  chat.engine.emplace();
  auto const made = engine_tenancy{access}.environment_of(
      chat, launcher::environment{{"A=b", "SLUICE_NAME=outer"}});
  EXPECT_EQ(made.get("SLUICE_RUN"), "1");
  EXPECT_EQ(made.get("SLUICE_ROLE"), "engine");
  EXPECT_EQ(made.get("SLUICE_NAME"), "chat");
  EXPECT_EQ(made.get("SLUICE_DEVICE"), "3");
  EXPECT_EQ(made.get("SLUICE_RUNTIME_DIR"), "/run/sluice");
  EXPECT_EQ(made.get("SLUICE_PARK"), "if_needed");
  EXPECT_EQ(made.get("A"), "b");
  chat.warm.mode = policy::warm_mode::always;
  EXPECT_EQ(engine_tenancy{access}.environment_of(chat, {}).get("SLUICE_PARK"), "never");
  access.pool.backend = "cuda";
  try {
    (void)engine_tenancy{access}.environment_of(
        chat, launcher::environment{{"PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"}});
    ADD_FAILURE() << "it would take its memory past the pool";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::invalid_argument);
  }
}

TEST(engine_tenancy, its_kv_cache_may_be_the_pools_with_its_other_memory_and_without) {
  auto const file = std::filesystem::path{testing::TempDir()} / "library.so";
  (void)std::ofstream{file};
  engine_tenancy::access access;
  access.installed.runtime_library = file;
  access.pool = {"/run/sluice", "host"};
  policy::model_policy chat;
  chat.name = "chat";
  chat.engine.emplace().kv = policy::engine_cache::pool;
  auto const both = engine_tenancy{access}.environment_of(chat, {});
  EXPECT_EQ(both.get("SLUICE_VLLM_KV"), "pool");
  EXPECT_EQ(both.get("SLUICE_ROLE"), "engine");
  chat.engine->memory = policy::engine_memory::own;
  auto const alone = engine_tenancy{access}.environment_of(chat, {});
  EXPECT_EQ(alone.get("SLUICE_VLLM_KV"), "pool");
  EXPECT_EQ(alone.get("SLUICE_NAME"), "chat");
  EXPECT_EQ(alone.get("SLUICE_RUNTIME_DIR"), "/run/sluice");
  EXPECT_EQ(alone.get("SLUICE_RUNTIME_LIBRARY"), file.string());
  EXPECT_FALSE(alone.get("SLUICE_RUN"));
  access.pool.backend = "cuda";
  try {
    (void)engine_tenancy{access}.environment_of(chat, {});
    ADD_FAILURE() << "only the host's pool can be had by the chunk";
  } catch (error const& why) {
    EXPECT_EQ(why.kind(), error_kind::unsupported);
    EXPECT_THAT(why.what(), HasSubstr("this pool's is cuda. Remove kv"));
  }
}

}  // namespace
}  // namespace sluice::server
