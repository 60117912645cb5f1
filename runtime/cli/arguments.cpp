#include "runtime/cli/arguments.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>

#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "runtime/cli/commands.hpp"
#include "runtime/cli/park_commands.hpp"
#include "runtime/cli/simulate_command.hpp"
#include "runtime/launcher/launcher.hpp"
#include "runtime/policy/units.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::cli {
namespace {

constexpr auto runtime_dir_help =
    "Folder of the broker's socket [SLUICE_RUNTIME_DIR, else $XDG_RUNTIME_DIR/sluice, else "
    "/tmp/sluice-UID]";
int const usage_exit_code = telemetry::exit_code(error_kind::invalid_argument);

/// For CLI11: what `check` says of a text that it can read, else why it cannot; empty if it is right.
template <typename Check>
std::string complaint_of(Check const& check) {
  try {
    return check();
  } catch (error const& wrong) {
    return wrong.what();
  }
}

/// An amount with its unit.
std::string check_amount(std::string const& text) {
  return complaint_of([&text] {
    (void)policy::parse_bytes(text);
    return std::string{};
  });
}

/// The same of a length of time, of at least a millisecond.
std::string check_length(std::string const& text) {
  return complaint_of([&text] {
    auto const length = policy::parse_duration(text);
    return length < std::chrono::milliseconds{1} ? "must be 1ms or more" : std::string{};
  });
}

/// The same for the timeout of collectives; what is less than a second would be none.
std::string check_timeout(std::string const& text) {
  return complaint_of([&text] {
    auto const found = policy::parse_duration(text);
    return found >= std::chrono::seconds{1} && found <= std::chrono::hours{24}
               ? std::string{}
               : "is " + text + ", must be from 1s to 24h";
  });
}

/// The same for a part of the pool, or an amount of it.
std::string check_share(std::string const& text) {
  if (text.empty() || text.back() != '%') {
    auto const wrong = check_amount(text);
    return wrong.empty() ? wrong : wrong + "; or a percentage of the pool, such as 25%";
  }
  return complaint_of([&text] {
    return policy::parse_percentage(text) <= 1.0
               ? std::string{}
               : "is " + text + ", must be at most 100%, which is all of the pool";
  });
}

/// CLI11 does not know that a command follows the options.
class run_formatter : public CLI::Formatter {
 public:
  std::string make_usage(CLI::App const* /*app*/, std::string /*name*/) const override {
    return "Usage: sluice run [OPTIONS] -- COMMAND [ARGUMENTS...]\n";
  }
};

struct run_arguments {
  launcher::run_options options;
  std::string memory;
  std::string host_memory;
  std::string host_disk;
  std::string collective_timeout;
  std::string min_memory;
};

void describe_run(CLI::App& app, run_arguments& into) {
  app.formatter(std::make_shared<run_formatter>());
  app.add_option("--memory", into.memory, "Size of the pool if this makes it, for example 4GiB")
      ->check(check_amount);
  app.add_option("--host-memory", into.host_memory,
                 "Host memory for what jobs park, if this starts the broker")
      ->check(check_amount);
  auto* const disk =
      app.add_option("--host-disk", into.host_disk, "Disk for what that has no room for, likewise")
          ->check(check_amount);
  auto* const folder = app.add_option("--host-disk-path", into.options.host_copy_disk.folder,
                                      "Folder on that disk, in which the room is kept");
  disk->needs(folder);
  folder->needs(disk);
  app.add_option(
         "--park", into.options.park,
         "Whether what this job keeps may go to the host for a server that needs the memory")
      ->check(CLI::IsMember({"if_needed", "never"}));
  app.add_option("--priority", into.options.priority,
                 "Which jobs demands are met by first: those of the lowest [normal]")
      ->check(CLI::IsMember({"low", "normal", "high"}));
  app.add_option("--min-memory", into.min_memory,
                 "What of the pool no demand takes from this job, for example 4GiB or 25%")
      ->check(check_share);
  app.add_option("--collective-timeout", into.collective_timeout,
                 "What the command's ranks give each other in collectives, if not 10m")
      ->check(check_timeout);
  app.add_option("--backend", into.options.backend, "Where the pool's memory is")
      ->check(CLI::IsMember({"auto", "host", "cuda"}));
  app.add_option("--device", into.options.device,
                 "CUDA ordinal of the GPU; on the host a number that tells pools apart")
      ->check(CLI::Range(0, 63));
  app.add_option("--runtime-dir", into.options.runtime_dir, runtime_dir_help);
  app.add_option("--name", into.options.name, "Name of the job in `sluice status`");
  app.add_flag("--require-pool", into.options.require_pool,
               "Fail if there can be no pool, instead of running without Sluice");
}

struct server_overrides {
  std::string policy;
  std::string runtime_dir;
  std::optional<std::string> host;
  std::optional<int> port;
  std::optional<int> grpc_port;
  std::optional<std::string> model_repository;
  std::optional<int> threads;

  [[nodiscard]] serve_arguments arguments() const {
    serve_arguments result{policy, {}, runtime_dir};
    auto add = [&result](char const* name, std::string const& value) {
      result.overrides.emplace_back(name);
      result.overrides.push_back(value);
    };
    if (host) {
      add("--host", *host);
    }
    if (port) {
      add("--port", std::to_string(*port));
    }
    if (grpc_port) {
      add("--grpc-port", std::to_string(*grpc_port));
    }
    if (model_repository) {
      add("--model-repository", *model_repository);
    }
    if (threads) {
      add("--threads", std::to_string(*threads));
    }
    if (!runtime_dir.empty()) {
      add("--runtime-dir", runtime_dir);
    }
    return result;
  }
};

void describe_serve(CLI::App& app, server_overrides& into) {
  app.option_defaults()->take_last();  // so that a wrapper's defaults can be overridden behind them
  app.add_option("--policy", into.policy, "Policy file, see docs/policy.md")->required();
  app.add_option("--host", into.host, "Overrides server.host");
  app.add_option("--port", into.port, "Overrides server.port; 0 takes any free one")
      ->check(CLI::Range(0, 65535));
  app.add_option("--grpc-port", into.grpc_port, "Overrides server.grpc_port; 0 takes any free one")
      ->check(CLI::Range(0, 65535));
  app.add_option("--model-repository", into.model_repository, "Overrides server.model_repository");
  app.add_option("--threads", into.threads, "Threads that one operator may use")
      ->check(CLI::Range(1, 1024));
  app.add_option("--runtime-dir", into.runtime_dir, runtime_dir_help);
}

/// With a unit, or as who starts a broker passes it on: in bytes.
template <typename Bytes>
void add_amount(CLI::App& app, char const* name, Bytes& into, char const* what) {
  app.add_option(name, into, what)->transform([](std::string const& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos
               ? text
               : std::to_string(policy::parse_bytes(text));
  });
}

struct broker_arguments {
  memhandover::broker_options options;
  int ready_fd = -1;
};

void describe_broker(CLI::App& app, broker_arguments& into) {
  app.group("");  // hidden: `run` and `serve` start it
  app.add_option("--runtime-dir", into.options.runtime_dir, runtime_dir_help);
  app.add_option("--backend", into.options.backend, "host, cuda or auto");
  app.add_option("--device", into.options.device,
                 "CUDA ordinal, or number of the first pool on the host");
  auto& copies_on_disk = into.options.host_copy_disk;
  add_amount(app, "--memory", into.options.pool_bytes, "Size of a pool, for example 4GiB");
  add_amount(app, "--chunk", into.options.chunk_bytes, "Size of a chunk");
  add_amount(app, "--host-memory", into.options.host_copy_bytes, "Host memory for what jobs park");
  add_amount(app, "--host-disk", copies_on_disk.bytes, "Disk for what that has no room for");
  app.add_option("--host-disk-path", copies_on_disk.folder, "Folder on that disk");
  app.add_option("--ready-fd", into.ready_fd, "Descriptor that is told when the broker listens");
}

void describe_show(CLI::App& app, show_arguments& into) {
  app.add_flag("--json", into.as_json, "As JSON");
  app.add_option("--device", into.device, "Only the pool of this device")->check(CLI::Range(0, 63));
  app.add_option("--runtime-dir", into.runtime_dir, runtime_dir_help);
}

void describe_park(CLI::App& app, park_arguments& into) {
  app.add_option("job", into.job, "Pid or name of a training job, as `sluice status` shows it")
      ->required();
  app.add_option("--device", into.device, "Only in the pool of this device")
      ->check(CLI::Range(0, 63));
  app.add_option("--runtime-dir", into.runtime_dir, runtime_dir_help);
}

/// A share.
std::string check_percentage(std::string const& text) {
  return complaint_of([&text] {
    (void)policy::parse_percentage(text);
    return std::string{};
  });
}

/// A length of time that may be 0.
std::string check_time(std::string const& text) {
  return complaint_of([&text] {
    (void)policy::parse_duration(text);
    return std::string{};
  });
}

void describe_simulate(CLI::App& app, simulate_arguments& into) {
  app.add_option("--trace", into.trace,
                 "A file (Azure LLM or Functions, Mooncake, CSV), or a process such as "
                 "poisson:rate=2, see docs/simulator.md")
      ->required();
  app.add_option(
         "--policy", into.policies,
         "ours, partial, always, cold, fixed:60s, sirius, wild, clairvoyant; may be given again")
      ->default_val(std::vector<std::string>{"ours", "partial", "always", "cold", "fixed:1s",
                                             "fixed:10s", "fixed:1m", "fixed:10m", "sirius", "wild",
                                             "clairvoyant"});
  app.add_option("--gpus", into.gpus, "How many devices")->check(CLI::Range(1, 4096));
  app.add_option("--models", into.models, "How many models, where the trace names none")
      ->check(CLI::Range(1, 1000000));
  app.add_option("--zipf", into.zipf, "Exponent by which a file's requests go to them")
      ->check(CLI::Range(0.0, 100.0));
  app.add_option("--parallel", into.parallel, "How many requests a device computes at once")
      ->check(CLI::Range(1, 1024));
  app.add_option("--instances", into.instances, "How many of them of one model")
      ->check(CLI::Range(1, 1024));
  app.add_option("--slowdown", into.slowdown,
                 "How many times as long each takes of 1, 2, … at once, for example 1,1.3")
      ->delimiter(',');
  app.add_option("--latency", into.latency, "In which a request is to be answered")
      ->check(check_time);
  app.add_option("--percentile", into.percentile, "Of requests, as in a policy's slo")
      ->check(check_percentage);
  app.add_option("--attainment", into.attainment, "Of windows, as in a policy's slo")
      ->check(check_percentage);
  app.add_option("--window", into.window, "As in a policy's slo")->check(check_time);
  app.add_option("--size", into.sizes,
                 "Of a model's weights, for example 2GiB; or of each, as in 2GiB,8GiB")
      ->delimiter(',')
      ->check(check_amount);
  app.add_option("--memory", into.memories,
                 "Of a device, for its models; a quarter of it may be reserve; or of each")
      ->delimiter(',')
      ->check(check_amount);
  auto* const place = app.add_option(
      "--place", into.place,
      "Which models are on which devices: attainment, work, round-robin, first-fit; printed");
  app.add_option("--place-timeout", into.place_timeout,
                 "Idle timeout that attainment reckons with; else models stay")
      ->check(check_time)
      ->needs(place);
  app.add_option("--place-csv", into.place_csv, "File for which model is where")->needs(place);
  app.add_option("--service", into.service, "Mean time of a request, where the trace has none")
      ->check(check_time);
  app.add_option("--service-scv", into.service_scv,
                 "Squared coefficient of variation of that; 1 is exponential, 0 a constant")
      ->check(CLI::Range(0.0, 1e4));
  app.add_option("--per-context-token", into.per_context_token, "Time of a token of a prompt")
      ->check(check_time);
  app.add_option("--per-generated-token", into.per_generated_token, "Time of a token of an answer")
      ->check(check_time);
  app.add_option("--length", into.length, "Of a trace that a process makes")->check(check_time);
  app.add_option("--skip", into.skip, "What of the beginning does not count")->check(check_time);
  app.add_option("--speed", into.speed, "Plays a file so many times as fast")
      ->check(CLI::PositiveNumber);
  app.add_option("--records", into.records, "Folder of benchmark records")
      ->default_val("benchmarks/results");
  app.add_option("--machine", into.machine, "Whose records tell what loads take, such as h200");
  app.add_option("--handover", into.handover, "What memory takes to change hands, instead")
      ->check(check_time);
  app.add_option("--load", into.load, "What the rest of a load takes, instead")->check(check_time);
  app.add_option("--csv", into.csv, "File for the figures of each policy and model");
  app.add_option("--seed", into.seed, "Of all that is random");
  auto* const reject =
      app.add_flag("--reject", into.refuse, "As a policy's on_miss_predicted: reject");
  app.add_option("--retries", into.retries,
                 "How often a client that is refused sends the same again")
      ->check(CLI::Range(0, 100))
      ->needs(reject)
      ->capture_default_str();
}

/// `words` up to a first `--`, and what follows it. CLI11 would treat a later `--` of the command
/// as its own.
struct split_words {
  std::vector<std::string> options;
  std::optional<std::vector<std::string>> command;
};

split_words split(std::vector<std::string> const& words) {
  auto const mark = std::find(words.begin(), words.end(), "--");
  split_words result{{words.begin(), mark}, std::nullopt};
  if (mark != words.end()) {
    result.command.emplace(mark + 1, words.end());
  }
  return result;
}

int run(run_arguments& arguments, std::optional<std::vector<std::string>> const& command) {
  if (!command || command->empty() || command->front().empty()) {
    std::fputs(
        "sluice run: the command is missing; write it after `--`, for example\n"
        "  sluice run --memory 4GiB -- python train.py\n",
        stderr);
    return telemetry::exit_launcher_failed;
  }
  if (!arguments.memory.empty()) {
    arguments.options.pool_bytes = policy::parse_bytes(arguments.memory);
  }
  if (!arguments.host_memory.empty()) {
    arguments.options.host_copy_bytes = policy::parse_bytes(arguments.host_memory);
  }
  if (!arguments.host_disk.empty()) {
    auto& disk = arguments.options.host_copy_disk;
    disk.bytes = policy::parse_bytes(arguments.host_disk);
    disk.folder = std::filesystem::absolute(disk.folder).lexically_normal().string();
  }
  if (!arguments.collective_timeout.empty()) {
    arguments.options.collective_timeout = std::chrono::duration_cast<std::chrono::seconds>(
        policy::parse_duration(arguments.collective_timeout));
  }
  if (auto const& least = arguments.min_memory; !least.empty()) {
    arguments.options.min_memory = least.back() == '%'
                                       ? policy::write_percentage(policy::parse_percentage(least))
                                       : std::to_string(policy::parse_bytes(least));
  }
  telemetry::set_up_logging("sluice-run", "warn");
  return launcher::run(arguments.options, *command, launcher::this_installation());
}

int dispatch(std::vector<std::string> const& words) {
  bool const running = !words.empty() && words.front() == "run";
  auto const [options, command] = running ? split(words) : split_words{words, std::nullopt};

  CLI::App app{"Sluice lets a training job and an inference server share a GPU.", "sluice"};
  app.set_version_flag("--version", "sluice " SLUICE_VERSION);
  app.require_subcommand(1);

  run_arguments run_with;
  server_overrides serve_with;
  simulate_arguments simulate_what;
  broker_arguments broker_with;
  show_arguments show_what;
  bool as_json = false;
  std::string policy_file;
  describe_run(*app.add_subcommand("run", "Run a training command in the shared pool"), run_with);
  describe_serve(*app.add_subcommand("serve", "Serve models out of the shared pool"), serve_with);
  auto* simulates = app.add_subcommand(
      "simulate", "Show what policies of keeping models would do with a trace of requests");
  describe_simulate(*simulates, simulate_what);
  describe_broker(*app.add_subcommand("broker", "Keep a pool"), broker_with);
  auto* status =
      app.add_subcommand("status", "Show who holds how much, and what has been handed over");
  describe_show(*status, show_what);
  park_arguments park_what;
  std::string park_length;
  auto* parks = app.add_subcommand(
      "park", "Have a job's memory go to host copies, and stay there until the job is woken");
  describe_park(*parks, park_what);
  parks->add_option("--for", park_length, "For so long at most, for example 10m")
      ->check(check_length);
  auto* wakes = app.add_subcommand("wake", "Let a job come back that `sluice park` has parked");
  describe_park(*wakes, park_what);
  auto* pool_commands = app.add_subcommand("pool", "Look into pools, and clean up after dead ones");
  pool_commands->require_subcommand(1);
  auto* show = pool_commands->add_subcommand("show", "Show who holds which chunk, and what for");
  describe_show(*show, show_what);
  std::string address;
  auto* const at = show->add_option(
      "--address", address, "Show instead what lay at this address of a process, in hexadecimal");
  std::uint32_t pid = 0;
  show->add_option("--pid", pid, "Only of this process, which may have ended")->needs(at);
  auto* list = pool_commands->add_subcommand("list", "List the pools of this machine");
  list->add_flag("--json", as_json, "As JSON");
  auto* clean = pool_commands->add_subcommand(
      "clean", "End what alone keeps orphaned pools alive: strays of jobs that have died");
  bool dry_run = false;
  clean->add_flag("--dry-run", dry_run, "Only say what would be ended");
  auto* policy_commands = app.add_subcommand(
      "policy", "Check a policy file, have a server read its own again, or show the schema");
  policy_commands->require_subcommand(1);
  auto* check = policy_commands->add_subcommand("check", "Tell every mistake in a policy file");
  check->add_option("file", policy_file, "The policy file")->required();
  auto* schema = policy_commands->add_subcommand("schema", "Print the JSON Schema of policy files");
  auto* reload = policy_commands->add_subcommand(
      "reload", "Have the server read its policy and its model repository again");
  reload->add_option("--device", show_what.device, "Of the pool of this device")
      ->check(CLI::Range(0, 63));
  reload->add_option("--runtime-dir", show_what.runtime_dir, runtime_dir_help);

  try {
    std::vector<std::string> reversed{options.rbegin(), options.rend()};  // as CLI11 wants them
    app.parse(std::move(reversed));
  } catch (CLI::ParseError const& wrong) {
    if (wrong.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {
      return app.exit(wrong);  // --help and --version
    }
    std::fprintf(stderr, "sluice: %s\nsluice: see `sluice%s --help`\n", wrong.what(),
                 running ? " run" : "");
    return running ? telemetry::exit_launcher_failed : usage_exit_code;
  }

  if (app.got_subcommand("run")) {
    return run(run_with, command);
  }
  if (app.got_subcommand("serve")) {
    serve(serve_with.arguments(), launcher::this_installation());
  }
  if (app.got_subcommand("broker")) {
    telemetry::set_up_logging("sluice-broker", "info");
    return keep_pool(broker_with.options, broker_with.ready_fd);
  }
  if (app.got_subcommand("status")) {
    return show_status(show_what);
  }
  if (simulates->parsed()) {
    return run_simulations(simulate_what);
  }
  if (parks->parsed()) {
    if (!park_length.empty()) {
      park_what.length = std::chrono::duration_cast<std::chrono::milliseconds>(
          policy::parse_duration(park_length));
    }
    return park(park_what);
  }
  if (wakes->parsed()) {
    return wake(park_what);
  }
  if (show->parsed()) {
    return address.empty() ? show_pool(show_what) : show_address(show_what, address, pid);
  }
  if (list->parsed()) {
    return list_pools(as_json);
  }
  if (clean->parsed()) {
    return clean_pools(dry_run);
  }
  if (reload->parsed()) {
    return reload_policy(show_what.runtime_dir, show_what.device);
  }
  return schema->parsed() ? print_schema()
                          : check_policy(policy_file, launcher::this_installation());
}

}  // namespace

int run_command_line(std::vector<std::string> const& words) noexcept {
  try {
    return dispatch(words);
  } catch (error const& why) {
    std::fprintf(stderr, "sluice: %s\n", why.what());
    return telemetry::exit_code(why.kind());
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice: %s\n", why.what());
    return telemetry::exit_code(error_kind::internal);
  }
}

}  // namespace sluice::cli
