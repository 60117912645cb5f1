// sluice-executor: computes for a server, in memory of its pool. A server starts it, and speaks with it over the socket that
// it is given.

#include <fmt/format.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <latch>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/descriptor_limit.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/server/executor/end_report.hpp"
#include "runtime/server/executor/executor_session.hpp"
#include "runtime/server/experience/experience_file.hpp"
#include "runtime/server/hosting/launch_listener.hpp"
#include "runtime/server/inference/caught_error.hpp"
#include "runtime/server/server_setup.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"
#include "runtime/torch/model/activations.hpp"
#include "runtime/torch/model/rehearsal.hpp"
#include "runtime/torch/model_list.hpp"
#include "runtime/torch/spare.hpp"

namespace sluice::server {
namespace {

using std::chrono::ceil;
using std::chrono::milliseconds;

/// Between two times that what has been learnt is written down.
constexpr int ticks_of_experience = 10;

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
  auto learnt = std::async(std::launch::async, [&] {  // beside what takes longer
    return std::make_shared<experience_file>(
        given.experience, ticks_of_experience * ceil<milliseconds>(wanted.scheduler.tick));
  });
  auto const pool = join_pool(wanted, given);
  torch_device const device{
      pool->shape().backend == memhandover::backend_kind::cuda ? pool->shape().device : -1};
  start_torch(device);
  auto const activations = serve_activations(pool, device);
  host_board::this_lane = host_board::preparing_lane;
  model_list list{pool->shape(), device, orders.board};
  auto models = list.prepare(orders, session);
  if (models.size() < given.models.size()) {  // the end is wanted
    return true;
  }
  auto options = host_options_of(wanted);
  options.board = orders.board;
  options.learnt = learnt.get();
  bool const on_host = pool->shape().backend == memhandover::backend_kind::host;
  if (wanted.server.parallel_models > 1) {
    options.computing_threads = wanted.server.parallel_models;
  }
  options.give_back_activations = [activations] { activations->give_back(); };
  // Who has found it need not be who did it: all that compute are suspects.
  options.device_failed = [](error const& why) {
    spdlog::critical("the GPU can compute nothing more for this process, which ends reason={}",
                     telemetry::quoted(why.what()));
    std::fflush(nullptr);
    ::_exit(telemetry::exit_code(error_kind::aborted));
  };
  options.callers_compute = on_host;
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
  bool const is_free = session.serve(host, preparation_for(device, given.threads),
                                     list.unservable(), [&](executor_orders const& now) {
                                       list.change(host, now);
                                       return list.unservable();
                                     });
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
  ::sigaddset(&signals, SIGUSR2);
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
