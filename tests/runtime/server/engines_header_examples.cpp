/// The examples in the headers of runtime/server/engines/, word for word: compiled, never run.
#include <functional>
#include <string>

#include "runtime/server/engines/engine_host.hpp"
#include "runtime/server/engines/engine_process.hpp"
#include "runtime/server/engines/engine_routes.hpp"
#include "runtime/server/engines/engine_tenancy.hpp"
#include "runtime/server/engines/readiness_probe.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-variable"

namespace sluice::server::header_examples {

using namespace std::chrono_literals;

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

void of_engine_routes() {
  engine_routes routes;
  routes.add("/v1/*", 0);
  routes.add("/v1/embeddings", 1);
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

void of_readiness_probe(boost::asio::any_io_executor const& io, engine_address const& address) {
  auto const look = look_whether_ready(io, address, "/health", [](std::string const& why_not) {});
}

}  // namespace sluice::server::header_examples

#pragma GCC diagnostic pop
