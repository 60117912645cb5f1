#include <gtest/gtest.h>

#include <future>
#include <string>
#include <utility>
#include <variant>

#include "runtime/server/engines/engine_host.hpp"
#include "runtime/server/engines/engine_process.hpp"

namespace sluice::server {
namespace {

using namespace std::chrono_literals;

TEST(engine_life, pauses_double_with_each_failure_in_a_row_up_to_a_bound) {
  EXPECT_EQ(restart_delay(0), 100ms);
  EXPECT_EQ(restart_delay(1), 100ms);
  EXPECT_EQ(restart_delay(2), 200ms);
  EXPECT_EQ(restart_delay(5), 1600ms);
  EXPECT_EQ(restart_delay(9), 25'600ms);
  EXPECT_EQ(restart_delay(10), 30s);
  EXPECT_EQ(restart_delay(4'000'000'000U), 30s);
}

TEST(engine_life, the_address_stands_wherever_it_is_named) {
  engine_address const port{{}, 8123}, socket{"/run/x.sock", 0};
  EXPECT_EQ(with_address("--listen={port}", port), "--listen=8123");
  EXPECT_EQ(with_address("{port}{port} {other}", port), "81238123 {other}");
  EXPECT_EQ(with_address("unix:{socket}", socket), "unix:/run/x.sock");
  EXPECT_EQ(with_address("", port), "");
}

TEST(engine_life, a_free_port_can_be_listened_on) {
  EXPECT_NE(free_port(), 0);
}

TEST(engine_life, a_log_that_cannot_be_written_is_named) {
  engine_order order;
  order.name = "chat";
  order.command = {"true"};
  order.log = "/no/such/folder/engine.log";
  try {
    engine_process const run{order};
    ADD_FAILURE() << "it has been started";
  } catch (error const& failure) {
    EXPECT_NE(std::string{failure.what()}.find("/no/such/folder/engine.log"), std::string::npos);
  }
}

TEST(engine_life, without_engines_nothing_is_found_and_all_is_ready) {
  engine_host host{{}};
  host.start();
  EXPECT_EQ(host.find("/v1/chat"), std::nullopt);
  EXPECT_TRUE(host.faults().empty());
  EXPECT_TRUE(host.names().empty());
  host.stop(1s);
  host.stop(1s);
}

TEST(engine_life, an_engine_whose_keeper_there_is_not_refuses_with_the_reason) {
  policy::model_policy chat;
  chat.name = "chat";
  chat.slo.latency = 1s;
  chat.engine.emplace();
  chat.engine->command = {"true"};
  chat.engine->routes = {"/v1/*"};
  engine_host::options options;
  options.engines = {chat};
  options.request_timeout = 1min;
  options.keeper = "/no/such/keeper";
  options.runtime_folder = testing::TempDir();
  engine_host host{options};
  host.start();
  auto const which = host.find("/v1/x");
  ASSERT_EQ(which, engine_route{});
  std::promise<engine_admission> admitted;
  (void)host.enter(which->engine,
                   [&](engine_admission how) { admitted.set_value(std::move(how)); });
  auto const how = admitted.get_future().get();
  auto const* const failure = std::get_if<error>(&how);
  ASSERT_NE(failure, nullptr);
  EXPECT_EQ(failure->kind(), error_kind::unavailable);
  EXPECT_NE(std::string{failure->what()}.find("/no/such/keeper cannot be started"),
            std::string::npos)
      << failure->what();
  EXPECT_EQ(host.status().at(0).at("state"), "failed");
  EXPECT_EQ(host.faults().size(), 1U);
  host.drain();
  std::promise<engine_admission> late;
  EXPECT_EQ(
      host.enter(which->engine, [&](engine_admission given) { late.set_value(std::move(given)); }),
      0U);
  auto const refused = late.get_future().get();
  EXPECT_STREQ(std::get<error>(refused).what(), "the server is shutting down");
}

}  // namespace
}  // namespace sluice::server
