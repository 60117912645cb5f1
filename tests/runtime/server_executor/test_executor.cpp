// An executor of a test: a real session and a real host, over a pool of this process's own memory.

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>

#include "runtime/server/executor/end_report.hpp"
#include "runtime/server/executor/executor_session.hpp"
#include "runtime/server/hosting/absent_model.hpp"
#include "tests/runtime/server_executor/rogue_models.hpp"

/// A model that calls `exit` has what is static destroyed while other threads use it: ThreadSanitizer looks past that.
extern "C" [[gnu::visibility("default")]] char const* __tsan_default_suppressions();
extern "C" char const* __tsan_default_suppressions() {
  return "race:spdlog";
}

namespace sluice::server::testing {
namespace {

/// Kinds of models by place; null where nothing is served.
nlohmann::json wanted_by(executor_orders const& orders) {
  return orders.settings.value("models", nlohmann::json{"sum", "rogue", "other"});
}

served_model prepare(nlohmann::json const& kind, std::size_t place, executor_orders const& orders) {
  if (kind.is_null()) {
    return {};
  }
  served_model made;
  made.name = kind.get<std::string>();
  made.version = "1";
  bool const is_left_out =
      std::any_of(orders.left_out.begin(), orders.left_out.end(),
                  [place](auto const& each) { return each["place"] == place; });
  if (is_left_out) {
    made.model = std::make_unique<absent_model>(error{error_kind::aborted, "it ends its process"});
  } else if (made.name == "crash") {
    orders.board->begin({.what = activity::preparing, .model = place});
    std::abort();
  } else if (made.name == "sum") {
    made.model =
        std::make_unique<sum_model>(heap_pool::chunk, 5, std::make_shared<model_control>());
  } else {
    made.model = std::make_unique<rogue_model>(orders.is_first);
  }
  made.scheduling.goal.latency = scheduler::seconds{0.1};
  if (orders.settings.contains("rejects")) {
    made.scheduling.reject_on_miss = true;
    made.scheduling.goal.latency = 1.5 * time_taken;
  }
  made.scheduling.limits = {scheduler::seconds{1e6}, scheduler::seconds{1e6}};
  return made;
}

void change(model_host& host, nlohmann::json& wanted, executor_orders const& orders) {
  if (auto const sign = orders.settings.value("fails_to_change", std::string{}); !sign.empty()) {
    std::ofstream{sign};
    throw error{error_kind::internal, "there is no memory for what is new"};
  }
  auto const next = wanted_by(orders);
  for (std::size_t place = 0; place < next.size(); ++place) {
    auto const before = place < wanted.size() ? wanted[place] : nlohmann::json{};
    if (!before.is_null() && next[place].is_null()) {
      host.retire(place);
    } else if (before != next[place]) {
      host.put(place, prepare(next[place], place, orders));
    }
  }
  wanted = next;
}

nlohmann::json unservable_of(executor_orders const& orders) {
  auto found = orders.settings.value("unservable", nlohmann::json::array());
  found.insert(found.end(), orders.left_out.begin(), orders.left_out.end());
  return found;
}

/// Until the test has opened the pipe of that name, where its settings have one: the process is slow, as on a busy machine.
void await_pipe(executor_orders const& orders, char const* name) {
  if (auto const pipe = orders.settings.value(name, std::string{}); !pipe.empty()) {
    std::ofstream{pipe + ".waits"};
    ::close(::open(pipe.c_str(), O_RDONLY | O_CLOEXEC));
  }
}

/// Whether a thread of the session is in the host.
std::atomic<bool> is_in_the_host{false};

/// And not the host's own, which names itself first.
bool is_thread_of_session() {
  std::array<char, 16> name{};
  ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  return std::string_view{name.data()} != "sluice-executor";
}

}  // namespace
}  // namespace sluice::server::testing

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
      std::abort();
    }
    while (orders.policy == "hold") {
      ::pause();
    }
    report_end_on(orders.board);
    host_board::this_lane = host_board::preparing_lane;
    auto wanted = wanted_by(orders);
    std::vector<served_model> models;
    for (std::size_t place = 0; place < wanted.size(); ++place) {
      models.push_back(prepare(wanted[place], place, orders));
    }
    if (auto const size = orders.settings.value("batch", 0); size > 0) {
      models[1].batching = {
          .max_batch_size = size, .is_dynamic = true, .max_queue_delay = std::chrono::hours{1}};
    }
    host_options options;
    options.computing_threads = orders.settings.value("computing_threads", 0U);
    options.board = orders.board;
    options.callers_compute = orders.settings.contains("prepares_until");
    options.thread_start = [&orders] {
      if (is_thread_of_session()) {
        is_in_the_host = true;
        await_pipe(orders, "prepares_until");
        is_in_the_host = false;
      }
    };
    options.device_failed = [](sluice::error const& /*why*/) { ::_exit(exit_code_of_mischief); };
    model_host host{std::move(options), std::make_shared<heap_pool>(8), std::move(models)};
    bool is_free = true;
    if (host.warm_up([&session] { return session.end_wanted(); })) {
      is_free = session.serve(host, orders.settings.value("spare", nlohmann::json::object()),
                              unservable_of(orders), [&](executor_orders const& now) {
                                change(host, wanted, now);
                                return unservable_of(now);
                              });
    }
    await_pipe(orders, "ends_after");
    if (host.stop(std::chrono::milliseconds{0}) && is_free) {
      return EXIT_SUCCESS;
    }
    ::_exit(EXIT_FAILURE);
  } catch (sluice::error const& failure) {
    if (is_in_the_host) {
      std::abort();  // the host has gone
    }
    session.fail(failure);
    return EXIT_FAILURE;
  }
}
