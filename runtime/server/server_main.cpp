// sluice-server: serves the models of a policy out of a pool. `sluice serve` starts it. What computes for it is a process of
// its own, sluice-executor, so that this one needs neither torch nor a device, and no model can end it.

#include <fmt/format.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "memhandover/base/descriptor_limit.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/broker/runtime_folder.hpp"
#include "runtime/launcher/environment.hpp"
#include "runtime/launcher/install_layout.hpp"
#include "runtime/launcher/launcher.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/server/engines/engine_host.hpp"
#include "runtime/server/engines/engine_keeper.hpp"
#include "runtime/server/engines/engine_process.hpp"
#include "runtime/server/executor/child_process.hpp"
#include "runtime/server/executor/remote_executor.hpp"
#include "runtime/server/grpc/grpc_endpoint.hpp"
#include "runtime/server/http/access_log.hpp"
#include "runtime/server/http/endpoint.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "runtime/server/inference/background_thread.hpp"
#include "runtime/server/repository_control.hpp"
#include "runtime/server/server_setup.hpp"
#include "runtime/server/status_socket.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using error_handler = nlohmann::json::error_handler_t;
using std::chrono::ceil;
using std::chrono::milliseconds;

/// How long the broker may take to say what there is.
constexpr milliseconds pool_patience{5'000};
/// How long requests in flight may take after the first signal to end.
constexpr milliseconds grace{10'000};
/// And engines afterwards, and what the executor still computes.
constexpr milliseconds last_grace{2'000};
/// How long requests that pass to engines may take where these outlive this server.
constexpr milliseconds relay_grace{600'000};
/// How long the server before this one may take to hear that it is to go.
constexpr milliseconds leave_patience{5'000};
constexpr milliseconds look_every{10};

struct command_line {
  std::filesystem::path policy_file;
  std::string host;
  std::optional<std::uint16_t> port;
  std::optional<std::uint16_t> grpc_port;
  std::string runtime_dir;
  std::filesystem::path executor;
  std::filesystem::path model_repository;
  security_files check;  ///< and nothing else, where there is one
  std::string check_access_log;
  bool check_grpc = false;

  [[nodiscard]] bool only_checks() const {
    return check_grpc || !check.empty() || !check_access_log.empty();
  }
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency() / 2));
};

/// SIGTERM and SIGINT ask for an orderly end, SIGUSR2 for one that leaves warm models and engines to a successor, SIGHUP for the policy to be
/// read again. They are blocked in every thread and taken by `wait` and `arrived`.
class end_signals {
 public:
  end_signals() {
    ::sigemptyset(&set_);
    ::sigaddset(&set_, SIGTERM);
    ::sigaddset(&set_, SIGINT);
    ::sigaddset(&set_, SIGUSR2);
    ::sigaddset(&set_, SIGHUP);
    ::pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    (void)std::signal(SIGPIPE, SIG_IGN);  // a client that has gone is an error of its socket
    (void)std::signal(SIGXFSZ, SIG_IGN);  // and a limit of files' sizes one of what is written
  }

  /// The one that has come and asks for an end; whatever else comes by then has `reload` called.
  [[nodiscard]] int wait(std::function<void()> const& reload) const {
    for (;;) {
      int taken = 0;
      if (::sigwait(&set_, &taken) != 0) {
        continue;
      }
      if (taken != SIGHUP) {
        take_default(taken);
        return taken;
      }
      reload();
    }
  }

  /// One that `arrived` or `wait` takes next.
  [[nodiscard]] bool has_come() const {
    sigset_t pending;
    ::sigemptyset(&pending);
    ::sigpending(&pending);
    return ::sigismember(&pending, SIGTERM) == 1 || ::sigismember(&pending, SIGINT) == 1 ||
           ::sigismember(&pending, SIGUSR2) == 1;
  }

  [[nodiscard]] bool arrived() const {
    timespec const now{};
    int const taken = ::sigtimedwait(&set_, nullptr, &now);
    if (taken == SIGHUP) {
      spdlog::info("the policy is not read again, since the server is starting");
      return false;
    }
    if (taken > 0) {
      take_default(taken);
    }
    return taken > 0;
  }

 private:
  /// From now on another signal ends the process at once.
  void take_default(int taken) const {
    spdlog::info("ending on request signal={} grace_ms={}", taken, grace.count());
    ::pthread_sigmask(SIG_UNBLOCK, &set_, nullptr);
  }

  sigset_t set_{};
};

policy::policy read_policy(std::string const& text, command_line const& given) {
  auto wanted = policy::parse(text, given.policy_file);
  if (!given.host.empty()) {
    wanted.server.host = given.host;
  }
  wanted.server.port = given.port.value_or(wanted.server.port);
  if (given.grpc_port) {
    wanted.server.grpc_port = given.grpc_port;
  }
  if (wanted.server.grpc_port) {
    grpc_endpoint::require();
  }
  if (!given.model_repository.empty()) {
    wanted.server.model_repository = given.model_repository;
  }
  bool const has_models = engines_of(wanted).size() < wanted.models.size();
  if (has_models && wanted.server.model_repository.empty()) {
    throw error{error_kind::invalid_argument,
                fmt::format("{} has no server.model_repository; add it, or give --model-repository",
                            given.policy_file.string())};
  }
  return wanted;
}

/// As many as the policy says, but not so many that no files could be opened for an executor, and for large tensors.
std::size_t connections_of(policy::policy const& wanted) {
  constexpr rlim_t of_its_own = 32, most_for_tensors = 256;
  rlimit limit{};
  std::size_t const asked = wanted.server.max_connections;
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return asked;
  }
  auto const kept = of_its_own + std::min(most_for_tensors, limit.rlim_cur / 4);
  if (limit.rlim_cur <= kept) {
    throw error{
        error_kind::unsupported,
        fmt::format("this process may open {} files, too few for connections; raise the limit "
                    "(ulimit -n) to {} or more",
                    limit.rlim_cur, 2 * of_its_own)};
  }
  // A request of an engine takes a file of its own for the connection there.
  rlim_t const files_of_each = engines_of(wanted).empty() ? 1 : 2;
  auto const room = static_cast<std::size_t>((limit.rlim_cur - kept) / files_of_each);
  if (room < asked) {
    spdlog::warn(
        "fewer connections than the policy says connections={} max_connections={} open_files={}",
        room, asked, limit.rlim_cur);
  }
  return std::min(room, asked);
}

std::shared_ptr<endpoint_security> security_of(policy::policy const& wanted) {
  auto const& server = wanted.server;
  security_files const files{server.token_file, server.tls.certificate_file, server.tls.key_file};
  return files.empty() ? nullptr : std::make_shared<endpoint_security>(files);
}

endpoint_options endpoint_options_of(policy::policy const& wanted) {
  endpoint_options options;
  options.host = wanted.server.host;
  options.port = wanted.server.port;
  options.max_body_bytes = wanted.server.max_body;
  options.max_waiting_body_bytes = wanted.server.max_waiting_bodies;
  options.threads = options.body_threads = wanted.server.threads;
  options.max_connections = connections_of(wanted);
  options.security = security_of(wanted);
  if (auto const& file = wanted.server.access_log; !file.empty()) {
    options.accesses = std::make_shared<access_log>(file.string());
  }
  return options;
}

/// Nothing: the policy has none, and no server before this one has left any. `inherited` is what they get of this process's environment.
std::unique_ptr<engine_host> open_engines(policy::policy const& wanted, command_line const& given,
                                          launcher::environment const& inherited) {
  engine_host::options options;
  options.engines = engines_of(wanted);
  options.runtime_folder = memhandover::prepare_runtime_dir(given.runtime_dir);
  options.device = wanted.pool.device;
  if (options.engines.empty() && meeting_places(options.runtime_folder, options.device).empty()) {
    return nullptr;
  }
  options.request_timeout = wanted.server.request_timeout;
  options.keeper = launcher::this_installation().server;
  options.folder = std::filesystem::absolute(given.policy_file).parent_path();
  options.environment = inherited.entries();
  return std::make_unique<engine_host>(std::move(options));
}

/// The way of engines to the pool that the executor has opened, as the broker describes it.
engine_tenancy::access tenancy_of(policy::policy const& wanted, command_line const& given,
                                  nlohmann::json const& pool) {
  engine_tenancy::access access;
  access.look = [folder = given.runtime_dir, device = wanted.pool.device] {
    return memhandover::query_status(folder, device);
  };
  access.order = [folder = given.runtime_dir](nlohmann::json const& order) {
    memhandover::give_order(folder, order);
  };
  access.installed = launcher::this_installation();
  auto const& facts = pool.at("pool");
  access.pool = {memhandover::prepare_runtime_dir(given.runtime_dir), facts.value("backend", "")};
  access.device = facts.value("device", 0);
  return access;
}

/// Nothing: there is none yet, or no broker.
std::optional<nlohmann::json> pool_of(policy::policy const& wanted, command_line const& given) {
  try {
    return memhandover::query_status(given.runtime_dir, wanted.pool.device);
  } catch (error const&) {
    return std::nullopt;
  }
}

bool has_server(nlohmann::json const& pool) {
  auto const clients = pool.value("clients", nlohmann::json::array());
  return std::any_of(clients.begin(), clients.end(), [](auto const& each) {
    return each.value("kind", "") == "server" && each.value("state", "") != "gone";
  });
}

/// The pool once this server's executor is in it, which may just be replaced, or the broker. Nothing: it is not until then.
std::optional<nlohmann::json> seen_within(std::chrono::milliseconds patience, pool_watch& pool,
                                          end_signals const& signals) {
  auto const until = std::chrono::steady_clock::now() + patience;
  auto seen = pool.look(patience);
  while (!seen && !signals.has_come() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(look_every);
    seen = pool.look(patience);
  }
  return seen;
}

/// Engines of the server before this one serve from now on, where it has left them: false if they cannot be tenants of the pool yet.
bool take_over(engine_host& engines, policy::policy const& wanted, command_line const& given,
               end_signals const& signals) {
  if (engines.meet() == 0) {
    return false;
  }
  auto const seen = pool_of(wanted, given);
  if (seen) {
    engines.attach(tenancy_of(wanted, given, *seen));
  }
  engines.adopt();
  // It has its place in the pool until it has answered what it computes itself; one that does not go is named by the executor.
  auto const begin = std::chrono::steady_clock::now();
  for (auto pool = seen; pool && has_server(*pool) && !signals.has_come();
       pool = pool_of(wanted, given)) {
    auto const waited = std::chrono::steady_clock::now() - begin;
    if (waited > grace + last_grace || (waited > leave_patience && engines.adopted() == 0)) {
      break;
    }
    std::this_thread::sleep_for(look_every);
  }
  return seen.has_value();
}

/// Engines stay, and so do requests that pass to them; all else is answered, and the pool left.
void leave_all(endpoint& http, grpc_endpoint* rpc, engine_host& engines,
               remote_executor& executor) {
  auto const until = std::chrono::steady_clock::now() + grace;
  http.drain();
  {
    std::jthread const beside{[rpc] {
      if (rpc != nullptr) rpc->stop(grace);
    }};
    while (http.connections() > engines.in_flight() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(look_every);
    }
  }
  executor.leave();
  engines.release();
  http.stop(engines.in_flight() > 0 ? relay_grace : milliseconds{0});
  engines.stop(milliseconds{0});
}

/// Nothing: the policy wants none.
std::unique_ptr<grpc_endpoint> open_grpc(policy::policy const& wanted, endpoint_options const& http,
                                         model_service& service) {
  auto const& server = wanted.server;
  if (!server.grpc_port) {
    return nullptr;
  }
  grpc_options options;
  options.host = http.host;
  options.port = *server.grpc_port;
  options.threads = http.threads;
  options.max_message_bytes = http.max_body_bytes;
  options.max_waiting_bytes = http.max_waiting_body_bytes;
  options.max_connections = options.max_calls = http.max_connections;
  options.security = http.security;
  options.certificate_file = server.tls.certificate_file;
  options.key_file = server.tls.key_file;
  options.accesses = http.accesses;
  auto result = std::make_unique<grpc_endpoint>(std::move(options), service);
  service.set_grpc_endpoint(result->address());
  return result;
}

repository_control::start start_of(policy::policy const& wanted, command_line const& given,
                                   std::string const& address) {
  return {.policy_file = given.policy_file,
          .parse = [given](std::string const& text) { return read_policy(text, given); },
          .settings = {{"policy_file", given.policy_file.string()},
                       {"model_repository", wanted.server.model_repository.string()},
                       {"endpoint", address},
                       {"runtime_dir", given.runtime_dir},
                       {"experience",
                        memhandover::server_experience_of(given.runtime_dir, wanted.pool.device)},
                       {"threads", given.threads}}};
}

remote_executor::options executor_options_of(policy::policy const& wanted,
                                             command_line const& given,
                                             remote_executor::orders first) {
  remote_executor::options options;
  options.program = given.executor;
  options.first = std::move(first);
  options.one_by_one = wanted.server.parallel_models == 1;
  options.compute_limit = options.answer_limit = ceil<milliseconds>(wanted.server.request_timeout);
  options.spare = wanted.server.spare_executor;
  return options;
}

/// For a signal, whose sender hears nothing.
void reload_and_log(repository_control& control) {
  try {
    spdlog::info("the policy has been read again {}",
                 telemetry::quoted(control.reload().dump(-1, ' ', false, error_handler::replace)));
  } catch (std::exception const& failure) {
    spdlog::error("the policy has been read again, and nothing changed reason={}",
                  telemetry::quoted(failure.what()));
  }
}

/// From now on what this process starts to compute has the gate before the driver.
void preload_gate(policy::policy const& wanted, std::string const& runtime_dir) {
  auto const env =
      launcher::serving_environment(launcher::environment::of_this_process(),
                                    launcher::this_installation(), runtime_dir, backend_of(wanted));
  if (auto const preloaded = env.get("LD_PRELOAD")) {
    (void)::setenv("LD_PRELOAD", preloaded->c_str(), 1);
  }
}

int serve(command_line const& given) {
  auto const text = policy::read_text(given.policy_file);
  auto const wanted = read_policy(text, given);
  auto const inherited = launcher::environment::of_this_process();
  preload_gate(wanted, given.runtime_dir);
  auto const choice = choose_models(wanted, contents_of(wanted));
  log_what_is_left(choice);
  end_signals const signals;

  model_service service{offered(choice.served), choice.unservable};
  std::optional<remote_executor> executor;
  std::optional<repository_control> control;
  std::optional<pool_watch> pool;
  auto const engines = open_engines(wanted, given, inherited);
  if (engines) {
    service.set_engines(*engines);
  }
  auto http_options = endpoint_options_of(wanted);
  http_options.engines = engines.get();
  endpoint http{http_options, service};
  auto const rpc = open_grpc(wanted, http_options, service);
  bool const is_attached = engines && take_over(*engines, wanted, given, signals);
  control.emplace(start_of(wanted, given, http.address()), text, wanted, choice);
  auto options = executor_options_of(wanted, given, control->orders());
  options.reader = &http;
  executor.emplace(std::move(options));
  if (!executor->wait_until_ready([&signals] { return signals.arrived(); })) {
    executor.reset();  // before the endpoint, which it reads with
    return 0;
  }
  pool.emplace([&] { return memhandover::query_status(given.runtime_dir, wanted.pool.device); },
               http.address());
  service.attach(*pool);
  auto const* const scheme = wanted.server.tls.certificate_file.empty() ? "http" : "https";
  service.attach(*executor, http.address(), scheme);
  if (engines) {
    if (is_attached) {
      // as the server before this one was
    } else if (auto const seen = seen_within(pool_patience, *pool, signals)) {
      engines->attach(tenancy_of(wanted, given, *seen));
    } else {
      spdlog::warn("engines have memory of their own, since the broker does not answer");
    }
    engines->set_announcer([&executor] { executor->announce_engine(); });
    engines->start();
  }
  control->attach(*executor, service);
  if (wanted.server.model_control == policy::control_mode::explicit_requests) {
    service.attach(*control);
  }
  status_socket const socket{memhandover::status_socket_of(given.runtime_dir, wanted.pool.device),
                             {{"status", [&service] { return service.status(); }},
                              {"reload", [&control] { return control->reload(); }}}};
  std::printf("listening on %s://%s\n", scheme, http.address().c_str());
  if (rpc) {
    std::printf("listening on grpc%s://%s\n", std::strcmp(scheme, "https") == 0 ? "s" : "",
                rpc->address().c_str());
  }
  std::fflush(stdout);

  background_thread reloads;  // a signal that asks for the end is heard meanwhile
  int const why = signals.wait([&] { reloads.post([&control] { reload_and_log(*control); }); });
  executor->end_changes();
  bool const leaves = why == SIGUSR2;
  if (leaves) {
    executor->keep_warm();
  }
  service.drain();
  if (leaves && engines) {
    engines->leave();
    leave_all(http, rpc.get(), *engines, *executor);
    return 0;
  }
  if (engines) {
    engines->drain();
  }
  {
    std::jthread const beside{[&rpc] {
      if (rpc) rpc->stop(grace);
    }};
    http.stop(grace);
  }
  if (engines) {
    engines->stop(last_grace);
  }
  if (leaves) {
    executor->leave();
    return 0;
  }
  if (!executor->stop(last_grace)) {
    spdlog::warn("what the executor still did is cut short");
    return telemetry::exit_code(error_kind::deadline_exceeded);
  }
  return 0;
}

}  // namespace
}  // namespace sluice::server

int main(int argc, char** argv) {
  using namespace sluice;
  memhandover::occupy_standard_streams();
  if (argc == 3 && std::string_view{argv[1]} == "--keep-engine") {
    return server::keep_engine(memhandover::unique_fd{server::child_process::passed_descriptor});
  }
  memhandover::raise_descriptor_limit();  // a connection needs one
  server::command_line given;
  CLI::App app{"Serves models out of a memory pool that training shares."};
  app.option_defaults()->take_last();
  auto* const policy = app.add_option("--policy", given.policy_file, "policy file");
  app.add_option("--check-token-file", given.check.tokens, "only tell what is wrong with that file")
      ->excludes(policy);
  auto* const certificate = app.add_option("--check-certificate-file", given.check.certificate,
                                           "the same of a certificate and its key")
                                ->excludes(policy);
  auto* const key = app.add_option("--check-key-file", given.check.key, "which is in that file");
  app.add_flag("--check-grpc", given.check_grpc, "only tell whether there can be gRPC")
      ->excludes(policy);
  app.add_option("--check-access-log", given.check_access_log, "the same of the access log")
      ->excludes(policy);
  certificate->needs(key);
  key->needs(certificate);
  app.add_option("--host", given.host, "address to listen on, instead of the policy's");
  app.add_option("--port", given.port,
                 "port to listen on, instead of the policy's; 0: any free one");
  app.add_option("--grpc-port", given.grpc_port,
                 "port to listen on for gRPC, instead of the policy's; 0: any free one");
  app.add_option("--runtime-dir", given.runtime_dir,
                 "folder of the broker's socket (default: $SLUICE_RUNTIME_DIR)");
  app.add_option("--model-repository", given.model_repository,
                 "folder of models, instead of the policy's");
  app.add_option("--executor", given.executor,
                 "program that computes (default: the one for the torch that SLUICE_TORCH names)");
  app.add_option("--threads", given.threads, "threads that one operator may use")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
    if (given.policy_file.empty() && !given.only_checks()) throw CLI::RequiredError{"--policy"};
  } catch (CLI::ParseError const& wrong) {
    int const code = app.exit(wrong);
    return code == 0 ? 0 : telemetry::exit_code(error_kind::invalid_argument);
  }
  try {
    telemetry::set_up_logging("sluice-server", "info");
    if (given.only_checks()) {
      if (given.check_grpc) server::grpc_endpoint::require();
      if (!given.check_access_log.empty()) server::check_access_log(given.check_access_log);
      if (!given.check.empty()) (void)server::endpoint_security{given.check};
      return 0;
    }
    if (given.executor.empty()) {
      given.executor = launcher::executor_of(launcher::this_installation());
    }
    return server::serve(given);
  } catch (policy::policy_error const& wrong) {
    std::fprintf(stderr, "%s\n", wrong.what());
    return telemetry::exit_code(wrong.kind());
  } catch (error const& failure) {
    std::fprintf(stderr, "sluice-server: %s\n", failure.what());
    return telemetry::exit_code(failure.kind());
  } catch (std::exception const& failure) {
    std::fprintf(stderr, "sluice-server: %s\n", failure.what());
    return telemetry::exit_code(error_kind::internal);
  }
}
