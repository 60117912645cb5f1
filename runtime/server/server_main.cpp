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
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
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
#include "runtime/server/executor/remote_executor.hpp"
#include "runtime/server/http/access_log.hpp"
#include "runtime/server/http/endpoint.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "runtime/server/server_setup.hpp"
#include "runtime/server/status_socket.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

using std::chrono::ceil;
using std::chrono::milliseconds;

/// How long requests in flight may take after the first signal to end.
constexpr milliseconds grace{10'000};
/// And the executor afterwards, which has nothing left to do but to give its memory back.
constexpr milliseconds last_grace{2'000};

struct command_line {
  std::filesystem::path policy_file;
  std::string host;
  std::optional<std::uint16_t> port;
  std::string runtime_dir;
  std::filesystem::path executor;
  std::filesystem::path model_repository;
  security_files check;  ///< and nothing else, where there is one
  std::string check_access_log;

  [[nodiscard]] bool only_checks() const { return !check.empty() || !check_access_log.empty(); }
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency() / 2));
};

/// SIGTERM and SIGINT ask for an orderly end, SIGHUP for one that leaves the warm models to a successor. They are blocked
/// in every thread and taken by `wait` and `arrived`.
class end_signals {
 public:
  end_signals() {
    ::sigemptyset(&set_);
    ::sigaddset(&set_, SIGTERM);
    ::sigaddset(&set_, SIGINT);
    ::sigaddset(&set_, SIGHUP);
    ::pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    (void)std::signal(SIGPIPE, SIG_IGN);  // a client that has gone is an error of its socket
    (void)std::signal(SIGXFSZ, SIG_IGN);  // and a limit of files' sizes one of what is written
  }

  /// The one that has come.
  [[nodiscard]] int wait() const {
    int taken = 0;
    while (::sigwait(&set_, &taken) != 0) {
    }
    take_default(taken);
    return taken;
  }

  [[nodiscard]] bool arrived() const {
    timespec const now{};
    int const taken = ::sigtimedwait(&set_, nullptr, &now);
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
  if (!given.model_repository.empty()) {
    wanted.server.model_repository = given.model_repository;
  }
  if (wanted.server.model_repository.empty()) {
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
  auto const room = static_cast<std::size_t>(limit.rlim_cur - kept);
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

endpoint_options endpoint_options_of(policy::policy const& wanted,
                                     std::vector<chosen_model> const& chosen,
                                     model_service const& service) {
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
  options.model_config = [&chosen, &service](std::string const& model, std::string const& version) {
    (void)service.metadata(model, version);  // says which cannot be served, and why
    auto const found = std::find_if(chosen.rbegin(), chosen.rend(), [&](chosen_model const& each) {
      return each.entry.metadata.name == model &&
             (version.empty() || each.entry.version == version);
    });
    if (found == chosen.rend()) {
      throw error{error_kind::not_found,
                  fmt::format("there is no model '{}' of version '{}'", model, version)};
    }
    return found->entry.config;
  };
  return options;
}

remote_executor::options executor_options_of(policy::policy const& wanted,
                                             model_choice const& choice, command_line const& given,
                                             std::string const& address) {
  remote_executor::options options;
  options.program = given.executor;
  options.settings = {{"policy_file", given.policy_file.string()},
                      {"model_repository", wanted.server.model_repository.string()},
                      {"endpoint", address},
                      {"runtime_dir", given.runtime_dir},
                      {"threads", given.threads},
                      {"models", nlohmann::json::array()},
                      {"unservable", nlohmann::json::array()}};
  for (auto const& each : choice.unservable) {
    if (each.is_wanted) {
      options.settings["unservable"].push_back(
          fmt::format("model '{}': {}", each.name, each.reason.what()));
    }
  }
  for (auto const& each : choice.served) {
    auto const& name = each.entry.metadata.name;
    options.settings["models"].push_back({name, each.entry.version});
    options.models.push_back({name, each.entry.version, each.wanted.max_queue,
                              ceil<milliseconds>(wanted.server.request_timeout)});
  }
  options.one_by_one = wanted.server.parallel_models == 1;
  options.compute_limit = options.answer_limit = ceil<milliseconds>(wanted.server.request_timeout);
  options.spare = wanted.server.spare_executor;
  return options;
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
  preload_gate(wanted, given.runtime_dir);
  auto const choice = choose_models(wanted, read_repository({wanted.server.model_repository}));
  auto const& chosen = choice.served;
  end_signals const signals;

  model_service service{offered(chosen), choice.unservable};
  std::optional<remote_executor> executor;
  std::optional<pool_watch> pool;
  endpoint http{endpoint_options_of(wanted, chosen, service), service};
  auto options = executor_options_of(wanted, choice, given, http.address());
  options.policy = text;
  executor.emplace(std::move(options));
  if (!executor->wait_until_ready([&signals] { return signals.arrived(); })) {
    return 0;
  }
  pool.emplace([&] { return memhandover::query_status(given.runtime_dir, wanted.pool.device); },
               http.address());
  service.attach(*pool);
  auto const* const scheme = wanted.server.tls.certificate_file.empty() ? "http" : "https";
  service.attach(*executor, http.address(), scheme);
  status_socket const status{memhandover::status_socket_of(given.runtime_dir, wanted.pool.device),
                             [&service] { return service.status(); }};
  std::printf("listening on %s://%s\n", scheme, http.address().c_str());
  std::fflush(stdout);

  int const why = signals.wait();
  if (why == SIGHUP) {
    executor->keep_warm();
  }
  service.drain();
  http.stop(grace);
  if (why == SIGHUP) {
    executor->leave();
    return 0;
  }
  if (!executor->stop(last_grace)) {
    spdlog::warn("a computation did not end within its grace and is cut short");
    return telemetry::exit_code(error_kind::deadline_exceeded);
  }
  return 0;
}

}  // namespace
}  // namespace sluice::server

int main(int argc, char** argv) {
  using namespace sluice;
  memhandover::occupy_standard_streams();
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
  app.add_option("--check-access-log", given.check_access_log, "the same of the access log")
      ->excludes(policy);
  certificate->needs(key);
  key->needs(certificate);
  app.add_option("--host", given.host, "address to listen on, instead of the policy's");
  app.add_option("--port", given.port,
                 "port to listen on, instead of the policy's; 0: any free one");
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
