// sluice-executor: computes for a server, in memory of its pool. A server starts it, and speaks with it over the socket that
// it is given.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <latch>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/descriptor_limit.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/server/executor/end_report.hpp"
#include "runtime/server/executor/executor_session.hpp"
#include "runtime/server/hosting/absent_model.hpp"
#include "runtime/server/hosting/launch_listener.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/server/server_setup.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"
#include "runtime/torch/model/activations.hpp"
#include "runtime/torch/model/rehearsal.hpp"
#include "runtime/torch/model/torch_model.hpp"
#include "runtime/torch/spare.hpp"

namespace sluice::server {
namespace {

using std::chrono::milliseconds;

/// What a server has settled for all executors that it will have.
struct settings {
  std::filesystem::path policy_file, model_repository;
  std::string endpoint, runtime_dir;
  int threads = 1;
  std::vector<std::pair<std::string, std::string>> models;  ///< names and versions
  std::vector<std::string> unservable;  ///< of what else the policy names: each with its reason
};

settings settings_in(nlohmann::json const& from) {
  try {
    return {from.at("policy_file").get<std::string>(),
            from.at("model_repository").get<std::string>(),
            from.at("endpoint"),
            from.at("runtime_dir"),
            from.at("threads"),
            from.at("models"),
            from.at("unservable")};
  } catch (nlohmann::json::exception const& wrong) {
    throw error{error_kind::invalid_argument,
                fmt::format("the server's settings are not understood: {}", wrong.what())};
  }
}

/// A model that the server offers, and why not if it cannot be served.
struct offered_entry {
  chosen_model is;
  std::optional<error> fault{};
};

/// The models that the server offers, in its order.
std::vector<offered_entry> models_of(settings const& given, policy::policy const& wanted) {
  auto const there = read_repository({given.model_repository});
  std::vector<offered_entry> found;
  for (auto const& [name, version] : given.models) {
    auto const entry =
        std::find_if(there.models.begin(), there.models.end(), [&](model_entry const& one) {
          return one.metadata.name == name && one.version == version;
        });
    auto const fault = std::find_if(there.unservable.begin(), there.unservable.end(),
                                    [&](unservable_model const& one) { return one.name == name; });
    auto const model =
        std::find_if(wanted.models.begin(), wanted.models.end(),
                     [&](policy::model_policy const& one) { return one.name == name; });
    if (model == wanted.models.end()) {
      throw error{error_kind::not_found,
                  fmt::format("the server's policy does not name model '{}'", name)};
    }
    if (entry != there.models.end()) {
      found.push_back({{*entry, *model}});
      continue;
    }
    model_entry lost;
    lost.metadata.name = name;
    lost.version = version;
    auto const gone =
        error{error_kind::not_found,
              fmt::format("version {} has gone from the repository {}; put it back, or restart the "
                          "server to serve what is there",
                          version, given.model_repository.string())};
    found.push_back(
        {{std::move(lost), *model}, fault == there.unservable.end() ? gone : fault->reason});
  }
  return found;
}

/// The broker's program lies in PREFIX/bin, this one in PREFIX/lib/_torch/<version>; unless the
/// environment names another.
std::string broker_program() {
  std::error_code failed;
  auto const here = std::filesystem::read_symlink("/proc/self/exe", failed);
  auto const prefix = here.parent_path().parent_path().parent_path().parent_path();
  auto const broker = prefix / "bin" / "sluice";
  bool const named = std::getenv("SLUICE_BROKER") != nullptr;
  return !named && !failed && std::filesystem::exists(broker, failed) ? broker.string() : "";
}

std::shared_ptr<memhandover::serving_pool> join_pool(policy::policy const& wanted,
                                                     settings const& given) {
  auto options = pool_options_of(wanted);
  options.endpoint = given.endpoint;
  options.runtime_dir = given.runtime_dir;
  options.sluice_binary = broker_program();
  auto pool = memhandover::serving_pool::join(options);
  if (auto* const warm = pool->warm()) {
    warm->hold_left();  // starting takes as long as it takes
  }
  spdlog::info("joined the pool bytes={} chunk_bytes={} backend={}", pool->shape().bytes(),
               pool->shape().chunk_bytes,
               pool->shape().backend == memhandover::backend_kind::cuda ? "cuda" : "host");
  return pool;
}

std::unique_ptr<hosted_model> prepare(model_entry const& entry,
                                      memhandover::pool_shape const& shape, torch_device device) {
  auto const& metadata = entry.metadata;
  auto model =
      prepare_torch_model({metadata.name, entry.file, metadata.inputs, metadata.outputs, device});
  if (model->bytes() > shape.bytes()) {
    throw error{
        error_kind::out_of_memory,
        fmt::format("model '{}': it has {} of weights but the whole pool has {}; make "
                    "pool.memory larger",
                    metadata.name, format_bytes(model->bytes()), format_bytes(shape.bytes()))};
  }
  return model;
}

/// The failure without the words that name the model, which whoever shows it says.
error reason_for(std::string const& model, error const& failure) {
  auto const prefix = fmt::format("model '{}': ", model);
  std::string_view const text{failure.what()};
  return {failure.kind(), std::string{text.substr(text.starts_with(prefix) ? prefix.size() : 0)},
          failure.retry_after()};
}

struct prepared_models {
  std::vector<served_model> models;  ///< empty: the end is wanted
  nlohmann::json unservable = nlohmann::json::array();
};

/// One that cannot be served stands in no other's way. Throws if all cannot, with these and all others' reasons.
prepared_models prepare(std::vector<offered_entry> const& offered, settings const& given,
                        policy::policy const& wanted, memhandover::pool_shape const& shape,
                        torch_device device, host_board& board, bool is_first,
                        executor_session const& session) {
  prepared_models made;
  std::vector<std::string> texts;
  error_kind first = error_kind::internal;
  host_board::this_lane = 0;  // the host's executor does not live yet
  for (auto const& each : offered) {
    if (session.end_wanted()) {
      return {};
    }
    auto const place = made.models.size();
    auto const& name = each.is.entry.metadata.name;
    auto fault = each.fault;
    std::unique_ptr<hosted_model> model;
    if (!fault) {
      board.begin({.what = activity::preparing, .model = place});
      try {
        model = prepare(each.is.entry, shape, device);
      } catch (...) {
        fault = reason_for(name, caught_error());
      }
      board.end();
    }
    if (fault) {
      first = texts.empty() ? fault->kind() : first;
      texts.push_back(fmt::format("model '{}': {}", name, fault->what()));
      made.unservable.push_back(
          {{"place", place}, {"kind", static_cast<int>(fault->kind())}, {"error", fault->what()}});
      model = std::make_unique<absent_model>(*fault);
    }
    made.models.push_back(served(each.is, std::move(model), wanted, shape.backend));
    made.models.back().always_warm = made.models.back().always_warm && !fault;
    if (fault || !is_first) {
      made.models.back().warmup.clear();
    }
  }
  host_board::this_lane = host_board::no_lane;
  if (texts.size() == made.models.size()) {
    texts.insert(texts.end(), given.unservable.begin(), given.unservable.end());
    throw error{first, fmt::format("{}", fmt::join(texts, "; "))};
  }
  return made;
}

/// What a thread that computes begins with. One that cannot rehearse may still compute what models want.
void rehearse_as_thread(int threads, torch_device device) noexcept {
  try {
    set_torch_threads(threads);
    rehearse(device);
  } catch (std::exception const& failure) {
    spdlog::warn("first requests take longer reason={}", telemetry::quoted(failure.what()));
  }
}

/// False if a computation was still running at the end.
bool execute(executor_session& session) {
  if (auto const wanted = session.preparation()) {
    prepare_spare(*wanted);
    session.prepared();
  }
  auto const& orders = session.orders();
  auto const given = settings_in(orders.settings);
  auto const wanted = policy::parse(orders.policy, given.policy_file);
  auto const offered = models_of(given, wanted);
  auto const pool = join_pool(wanted, given);
  torch_device const device{
      pool->shape().backend == memhandover::backend_kind::cuda ? pool->shape().device : -1};
  start_torch(device);
  auto const activations = serve_activations(pool, device);
  auto [models, unservable] = prepare(offered, given, wanted, pool->shape(), device, *orders.board,
                                      orders.is_first, session);
  if (models.empty()) {
    return true;
  }
  auto options = host_options_of(wanted);
  options.board = orders.board;
  bool const on_host = pool->shape().backend == memhandover::backend_kind::host;
  if (wanted.server.parallel_models > 1) {
    options.computing_threads = wanted.server.parallel_models;
  }
  options.give_back_activations = [activations] { activations->give_back(); };
  options.device_failed = [&board = *orders.board](error const& why) {
    spdlog::critical("the GPU can compute nothing more for this process, which ends reason={}",
                     telemetry::quoted(why.what()));
    board.blame_this_thread();
    std::fflush(nullptr);
    ::_exit(telemetry::exit_code(error_kind::aborted));
  };
  report_end_on(orders.board);
  std::optional<launch_listener> listener;
  if (!on_host && options.pause == pause_mode::on_launch) {
    auto lease =
        std::make_shared<compute_lease>(pool, options.min_share, compute_lease::change_on_gpu);
    if (listener.emplace(lease).listens()) {
      options.lease = std::move(lease);
    }
  }
  std::latch rehearsed{static_cast<std::ptrdiff_t>(options.computing_threads) + 1};
  std::atomic<std::ptrdiff_t> to_rehearse =
      static_cast<std::ptrdiff_t>(options.computing_threads) + 1;
  options.thread_start = [&rehearsed, &to_rehearse, threads = given.threads, device] {
    use_own_stream(device);
    rehearse_as_thread(threads, device);
    if (to_rehearse-- > 0) {  // one of the host's own
      rehearsed.count_down();
    }
  };
  model_host host{std::move(options), pool, std::move(models)};
  rehearsed.wait();  // so that the first request is none that waits for it
  if (!host.warm_up([&session] { return session.end_wanted(); })) {
    return true;
  }
  bool const is_free = session.serve(host, preparation_for(device, given.threads), unservable);
  if (host.stop(milliseconds{0}) && is_free) {
    return true;
  }
  // Its memory goes back to the pool with the process; waiting for it would have no bound.
  std::fflush(nullptr);
  ::_exit(telemetry::exit_code(error_kind::deadline_exceeded));
}

/// Its server says when it is to end; what a terminal sends to both is the server's.
void leave_signals_to_the_server() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::sigaddset(&signals, SIGHUP);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  (void)::signal(SIGXFSZ, SIG_IGN);  // a limit of files' sizes is an error of what is written
}

}  // namespace
}  // namespace sluice::server

int main(int argc, char** argv) {
  using namespace sluice;
  memhandover::occupy_standard_streams();
  memhandover::raise_descriptor_limit();
  server::leave_signals_to_the_server();
  int socket = -1;
  CLI::App app{"Computes for sluice-server, which starts it."};
  app.add_option("--socket", socket, "descriptor of a socket to the server")->required();
  try {
    app.parse(argc, argv);
  } catch (CLI::ParseError const& wrong) {
    int const code = app.exit(wrong);
    return code == 0 ? 0 : telemetry::exit_code(error_kind::invalid_argument);
  }
  telemetry::set_up_logging("sluice-executor", "info");
  server::executor_session session{memhandover::unique_fd{socket}};
  try {
    server::execute(session);
    return 0;
  } catch (error const& failure) {
    session.fail(failure);
    return telemetry::exit_code(failure.kind());
  } catch (std::exception const& failure) {
    session.fail({error_kind::internal, failure.what()});
    return telemetry::exit_code(error_kind::internal);
  }
}
