#include "runtime/launcher/launcher.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/job_wish.hpp"
#include "memhandover/broker/runtime_folder.hpp"
#include "runtime/launcher/supervisor.hpp"
#include "runtime/launcher/torch_settings.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::launcher {
namespace {

void check_file(std::filesystem::path const& file, char const* what) {
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) {
    throw error{error_kind::unsupported,
                fmt::format("{} is missing at {}; build or install Sluice completely", what,
                            file.string())};
  }
}

template <class Number>
std::optional<Number> number_of(environment const& env, char const* name) {
  auto const text = env.get(name);
  if (!text || text->empty()) {
    return std::nullopt;
  }
  auto const value = parse_number<Number>(*text);
  if (!value || *value < Number{}) {
    throw error{error_kind::invalid_argument,
                fmt::format("{} is {}, must be a whole number; correct or unset it", name,
                            telemetry::quoted(*text))};
  }
  return value;
}

struct presence {
  job_pool pool;
  memhandover::unique_fd connection;  ///< while open, the pool waits for clients
  install_layout installed;           ///< as the command's environment is to name it
};

/// Throws why the command cannot share.
presence join(run_options const& options, install_layout const& installed) {
  check_file(installed.runtime_library, "the runtime library");  // before a broker is started
  memhandover::broker_options broker;
  broker.runtime_dir = memhandover::prepare_runtime_dir(options.runtime_dir);
  broker.backend = options.backend;
  broker.device = options.device;
  broker.pool_bytes = options.pool_bytes.value_or(0);
  broker.host_copy_bytes = options.host_copy_bytes;
  broker.host_copy_disk = options.host_copy_disk;
  broker.sluice_binary = installed.program.string();
  auto pool = memhandover::open_pool(broker);
  presence result{{broker.runtime_dir, to_string(pool.backend)}, std::move(pool.connection), {}};
  result.installed = parts_for_sharing(installed, options, result.pool);
  return result;
}

void add_python_package(environment& env, install_layout const& installed) {
  if (!installed.python_folder.empty()) {
    env.prepend("PYTHONPATH", installed.python_folder.string());
  }
}

/// Where the pool is, and what the command is called there.
void name_pool(environment& env, install_layout const& installed, run_options const& options,
               job_pool const& pool) {
  env.set("SLUICE_RUNTIME_DIR", pool.runtime_dir);
  env.set("SLUICE_RUNTIME_LIBRARY", installed.runtime_library.string());
  env.set("SLUICE_BROKER", installed.program.string());
  if (!options.backend.empty()) {
    env.set("SLUICE_BACKEND", options.backend);
  }
  if (options.device) {
    env.set("SLUICE_DEVICE", std::to_string(*options.device));
  }
  if (!options.name.empty()) {
    env.set("SLUICE_NAME", options.name);
  }
  if (!options.park.empty()) {
    env.set("SLUICE_PARK", options.park);
  }
  if (!options.role.empty()) {  // only training has these
    env.unset("SLUICE_PRIORITY");
    env.unset("SLUICE_MIN_MEMORY");
    return;
  }
  if (!options.priority.empty()) {
    env.set("SLUICE_PRIORITY", options.priority);
  }
  if (!options.min_memory.empty()) {
    env.set("SLUICE_MIN_MEMORY", options.min_memory);
  }
}

/// What Python runs first, and what it is not to run where an outer `sluice run` has named it.
void add_startup(environment& env, install_layout const& installed, bool shares_on_host) {
  auto const folder = installed.startup_folder.string();
  env.remove("PYTHONPATH", folder);
  if (shares_on_host && !folder.empty() && folder.find(':') == std::string::npos) {
    env.prepend("PYTHONPATH", folder);
  }
}

}  // namespace

install_layout parts_for_sharing(install_layout const& installed, run_options const& options,
                                 job_pool const& pool) {
  check_file(installed.runtime_library, "the runtime library");
  if (pool.backend == "host") {
    return installed;
  }
  check_file(installed.gate_library, "the gate library");
  if (options.agree) {
    check_file(installed.nccl_library, "the library of collectives");
  }
  return preloadable(installed, pool.runtime_dir);
}

void refuse_memory_outside(environment const& env, job_pool const& pool) {
  if (auto const outside = memory_outside_pool(env); outside && pool.backend == "cuda") {
    throw error{error_kind::invalid_argument, *outside};
  }
}

environment sharing_environment(environment inherited, install_layout const& installed,
                                run_options const& options, job_pool const& pool) {
  auto env = std::move(inherited);
  env.set("SLUICE_RUN", "1");
  name_pool(env, installed, options, pool);
  if (options.pool_bytes) {
    env.set("SLUICE_POOL_BYTES", std::to_string(*options.pool_bytes));
  }
  if (options.host_copy_bytes > 0) {
    env.set("SLUICE_HOST_COPY_BYTES", std::to_string(options.host_copy_bytes));
  }
  if (options.host_copy_disk.bytes > 0) {
    env.set("SLUICE_HOST_COPY_DISK_BYTES", std::to_string(options.host_copy_disk.bytes));
    env.set("SLUICE_HOST_COPY_DISK_PATH", options.host_copy_disk.folder);
  }
  if (options.role.empty()) {
    env.unset("SLUICE_ROLE");
  } else {
    env.set("SLUICE_ROLE", options.role);
  }
  if (options.collective_timeout.count() > 0) {
    env.set("SLUICE_COLLECTIVE_TIMEOUT_S", std::to_string(options.collective_timeout.count()));
  }
  if (options.require_pool) {
    env.set("SLUICE_REQUIRE_POOL", "1");
  } else {
    env.unset("SLUICE_REQUIRE_POOL");
  }
  add_python_package(env, installed);
  add_startup(env, installed, pool.backend == "host");
  if (pool.backend != "host") {
    env.append("LD_PRELOAD", installed.gate_library.string());
    if (options.agree) {
      env.append("LD_PRELOAD", installed.nccl_library.string());
    }
  }
  return env;
}

environment cache_environment(environment inherited, install_layout const& installed,
                              run_options const& options, job_pool const& pool) {
  check_file(installed.runtime_library, "the runtime library");
  auto env = std::move(inherited);
  name_pool(env, installed, options, pool);
  env.set("SLUICE_VLLM_KV", "pool");
  if (env.get("SLUICE_RUN").value_or("") != "1") {
    add_python_package(env, installed);  // where the plugin is
  }
  return env;
}

environment plain_environment(environment inherited, install_layout const& installed) {
  auto env = std::move(inherited);
  env.unset("SLUICE_RUN");
  env.unset("SLUICE_RUNTIME_LIBRARY");
  env.unset("SLUICE_REQUIRE_POOL");
  add_python_package(env, installed);
  add_startup(env, installed, false);
  return env;
}

environment serving_environment(environment inherited, install_layout const& installed,
                                std::string const& runtime_dir, std::string const& backend) {
  auto env = std::move(inherited);
  if (backend != "host") {
    check_file(installed.gate_library, "the gate library");
    auto const folder = memhandover::prepare_runtime_dir(runtime_dir);
    env.append("LD_PRELOAD", preloadable(installed, folder).gate_library.string());
  }
  return env;
}

run_options complete(run_options options, environment const& inherited) {
  if (options.backend.empty()) {
    options.backend = inherited.get("SLUICE_BACKEND").value_or("");
    if (auto const& name = options.backend;
        !name.empty() && name != "auto" && name != "host" && name != "cuda") {
      throw error{
          error_kind::invalid_argument,
          fmt::format("SLUICE_BACKEND is {}, must be host, cuda or auto; correct or unset it",
                      telemetry::quoted(name))};
    }
  }
  if (!options.device) {
    options.device = number_of<int>(inherited, "SLUICE_DEVICE");
  }
  if (auto const how = inherited.get("SLUICE_COLLECTIVES").value_or(""); !how.empty()) {
    if (how != "agree" && how != "plain") {
      throw error{
          error_kind::invalid_argument,
          fmt::format("SLUICE_COLLECTIVES is {}, must be agree or plain; correct or unset it",
                      telemetry::quoted(how))};
    }
    options.agree = how == "agree";
  }
  if (options.priority.empty()) {
    options.priority = inherited.get("SLUICE_PRIORITY").value_or("");
  }
  if (options.min_memory.empty()) {
    options.min_memory = inherited.get("SLUICE_MIN_MEMORY").value_or("");
  }
  auto const wish = memhandover::job_wish_in(options.priority, options.min_memory);
  // Outside of the pool it would have no minimum.
  options.require_pool |= wish.least_bytes > 0 || wish.least_ppm > 0;
  if (!options.pool_bytes) {
    options.pool_bytes = number_of<std::uint64_t>(inherited, "SLUICE_POOL_BYTES");
  }
  return options;
}

int run(run_options const& options, std::vector<std::string> const& command,
        install_layout const& installed) {
  try {
    auto const inherited = environment::of_this_process();
    auto const wanted = complete(options, inherited);
    auto env = plain_environment(inherited, installed);
    presence shared;  // its connection is kept until the command has ended
    try {
      // Before this process becomes a subreaper: the broker is to outlive it.
      shared = join(wanted, installed);
      env = sharing_environment(inherited, shared.installed, wanted, shared.pool);
    } catch (std::exception const& why) {
      if (options.require_pool) {
        throw error{error_kind::unavailable, fmt::format("there is no pool: {}", why.what())};
      }
      spdlog::warn(
          "the command runs without Sluice, as plain PyTorch, because there is no pool reason={}",
          telemetry::quoted(why.what()));
    }
    refuse_memory_outside(inherited, shared.pool);
    return supervise(command, std::move(env));
  } catch (std::exception const& why) {
    spdlog::error("the command is not started reason={}", telemetry::quoted(why.what()));
    return telemetry::exit_launcher_failed;
  }
}

}  // namespace sluice::launcher
