// An executor of a test: a real session and a real host, over a pool of this process's own memory.

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "runtime/server/executor/end_report.hpp"
#include "runtime/server/executor/executor_session.hpp"
#include "tests/runtime/server_executor/rogue_models.hpp"

/// A model that calls `exit` has what is static destroyed while other threads use it: ThreadSanitizer looks past that.
extern "C" [[gnu::visibility("default")]] char const* __tsan_default_suppressions();
extern "C" char const* __tsan_default_suppressions() {
  return "race:spdlog";
}

int main(int argc, char** argv) {
  using namespace sluice::server;
  using namespace sluice::server::testing;
  if (argc != 3 || std::strcmp(argv[1], "--socket") != 0) {
    return EXIT_FAILURE;
  }
  executor_session session{sluice::memhandover::unique_fd{std::atoi(argv[2])}};
  try {
    if (auto const wanted = session.preparation()) {
      if (wanted->contains("fail")) {
        throw sluice::error{sluice::error_kind::unsupported, (*wanted)["fail"].get<std::string>()};
      }
      while (wanted->contains("hang")) {
        ::pause();
      }
      session.prepared();
    }
    auto const& orders = session.orders();
    if (orders.policy == "refuse") {
      throw sluice::error{sluice::error_kind::not_found, "there is nothing to serve"};
    }
    if (orders.policy == "abort") {
      host_board::this_lane = 0;
      orders.board->begin({.what = activity::preparing, .model = 1});
      std::abort();
    }
    while (orders.policy == "hold") {
      ::pause();
    }
    std::vector<served_model> models;
    models.push_back(
        {"sum",
         "1",
         std::make_unique<sum_model>(heap_pool::chunk, 5, std::make_shared<model_control>()),
         {}});
    models.push_back({"rogue", "1", std::make_unique<rogue_model>(), {}});
    models.push_back({"other", "1", std::make_unique<rogue_model>(), {}});
    for (auto& each : models) {
      each.scheduling.goal.latency = sluice::scheduler::seconds{0.1};
      each.scheduling.limits = {sluice::scheduler::seconds{1e6}, sluice::scheduler::seconds{1e6}};
    }
    if (auto const size = orders.settings.value("batch", 0); size > 0) {
      models[1].batching = {
          .max_batch_size = size, .is_dynamic = true, .max_queue_delay = std::chrono::hours{1}};
    }
    host_options options;
    options.computing_threads = orders.settings.value("computing_threads", 0U);
    options.board = orders.board;
    report_end_on(orders.board);
    model_host host{std::move(options), std::make_shared<heap_pool>(8), std::move(models)};
    if (host.warm_up([&session] { return session.end_wanted(); })) {
      (void)session.serve(host, orders.settings.value("spare", nlohmann::json::object()),
                          orders.settings.value("unservable", nlohmann::json::array()));
    }
    return host.stop(std::chrono::milliseconds{0}) ? EXIT_SUCCESS : EXIT_FAILURE;
  } catch (sluice::error const& failure) {
    session.fail(failure);
    return EXIT_FAILURE;
  }
}
