/// The examples in the headers of runtime/server/engines/, word for word: compiled, never run.
#include <functional>
#include <string>
#include <utility>

#include "runtime/server/engines/described_models.hpp"
#include "runtime/server/engines/engine_host.hpp"
#include "runtime/server/engines/engine_process.hpp"
#include "runtime/server/engines/engine_question.hpp"
#include "runtime/server/engines/engine_routes.hpp"
#include "runtime/server/engines/engine_tenancy.hpp"
#include "runtime/server/engines/kept_connections.hpp"
#include "runtime/server/engines/readiness_probe.hpp"
#include "runtime/server/engines/served_models.hpp"
#include "runtime/server/engines/token_account.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-variable"

namespace sluice::server::header_examples {

using namespace std::chrono_literals;

void of_described_models(std::string const& body) {
  described_models models{{"encoder"}};
  models.questions();
  models.learn("/v2/models/encoder", body);
  models.metadata("encoder", "")->inputs;
}

void of_engine_host(engine_host::options const& options,
                    std::function<void(engine_admission)> const& admitted) {
  engine_host engines{options};
  engines.start();
  auto const ticket = engines.enter(0, admitted);
  engines.stop(10s);
}

void of_engine_process(engine_order const& order) {
  engine_process run{order};
  auto const said = run.hear();
  run.stop();
}

void of_engines_that_are_left(engine_process& run, std::filesystem::path const& folder) {
  run.leave({{"ready", true}});
  for (auto const& place : meeting_places(folder, 0)) {
    if (auto const left = engine_process::meet(place)) left->adopt();
  }
}

void of_engine_question(boost::asio::any_io_executor const& io, engine_address const& address) {
  auto const question =
      ask_engine(io, address, {"/v1/models", 1_MiB}, [](engine_answer const& answer) {});
}

void of_engine_routes() {
  engine_routes routes;
  routes.add("/v1/*", {engine_route::kind::model});
  routes.add("/v1/embeddings", {engine_route::kind::path, 1});
  routes.find("/v1/embeddings?x=1");
  routes.find("/v1/chat");
  routes.find("/v2");
}

void of_engine_tenancy(engine_tenancy::access const& access, pid_t keeper_pid) {
  engine_tenancy const pool{access};
  auto const share = pool.look(keeper_pid);
  pool.park(share);
  pool.look(keeper_pid).is_away();
  pool.wake(share);
}

void of_kept_connections(kept_connections::clock::time_point now) {
  kept_connections kept{64};
  auto found = kept.take(now);
  kept.keep(std::move(found), now);
  kept.drop();
}

void of_served_models(std::chrono::system_clock::time_point began, std::string const& body) {
  served_models models{{"chat", "org/model"}, began};
  models.learn(body);
  models.list();
}

void of_readiness_probe(boost::asio::any_io_executor const& io, engine_address const& address) {
  auto const look = look_whether_ready(io, address, "/health", [](std::string const& why_not) {});
}

void of_token_account(token_account::clock::time_point now) {
  token_account account{{.window = 5min, .ttft = 300ms, .tbt = 50ms}, now};
  account.add(now, {.first = 120ms, .gaps = {20ms, 21ms}});
  account.first().counts;
  account.first_in_time(now);
}

}  // namespace sluice::server::header_examples

#pragma GCC diagnostic pop
