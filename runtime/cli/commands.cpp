#include "runtime/cli/commands.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/broker/broker_queries.hpp"
#include "memhandover/broker/pool_creation.hpp"
#include "memhandover/broker/pool_search.hpp"
#include "memhandover/device/disk_room.hpp"
#include "memhandover/device/host_room.hpp"
#include "runtime/cli/address_text.hpp"
#include "runtime/cli/detail/print.hpp"
#include "runtime/cli/pool_and_server.hpp"
#include "runtime/cli/pool_text.hpp"
#include "runtime/cli/status_text.hpp"
#include "runtime/launcher/environment.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/policy/units.hpp"
#include "runtime/server/repository/model_repository.hpp"

namespace sluice::cli {
namespace {

using detail::print;

/// Names come from other processes, so that their bytes need not be UTF-8.
std::string json_text(nlohmann::json const& value) {
  return value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string summary(policy::policy const& wanted) {
  std::string memory = "auto";
  if (auto const& given = wanted.pool.memory) {
    memory = given->bytes != 0 ? policy::write_bytes(given->bytes)
                               : policy::write_percentage(given->share);
  }
  std::string models;
  for (auto const& model : wanted.models) {
    models += (models.empty() ? "" : ", ") + model.name;
  }
  return fmt::format("{}: valid; models: {}; pool: {} on backend {}; listens on {}:{}\n",
                     wanted.file.string(), models, memory, policy::to_string(wanted.pool.backend),
                     wanted.server.host, wanted.server.port);
}

/// Why models of the policy could not be served, one after the other. A repository that is not on this machine is passed
/// over, and what is in the models' files only an executor finds.
std::vector<std::string> repository_faults(policy::policy const& wanted) {
  auto const& root = wanted.server.model_repository;
  std::error_code failure;
  if (root.empty() || !std::filesystem::exists(root, failure)) {
    return {};
  }
  spdlog::set_level(spdlog::level::off);  // what is passed over there is the server's to log
  std::vector<std::string> faults;
  try {
    auto const there = server::read_repository({root});
    for (auto const& model : wanted.models) {
      if (model.engine) {
        continue;
      }
      auto const fault = std::find_if(there.unservable.begin(), there.unservable.end(),
                                      [&](auto const& each) { return each.name == model.name; });
      auto const is_there =
          std::any_of(there.models.begin(), there.models.end(),
                      [&](auto const& each) { return each.metadata.name == model.name; });
      if (fault != there.unservable.end()) {
        faults.push_back(
            fmt::format("model '{}' cannot be served: {}", model.name, fault->reason.what()));
      } else if (!is_there) {
        faults.push_back(
            fmt::format("model '{}' is not in the model repository {}", model.name, root.string()));
      }
    }
  } catch (error const& wrong) {
    faults.emplace_back(wrong.what());
  }
  return faults;
}

/// The same of those on disk, of which a broker that is there may have its part already.
std::vector<std::string> disk_faults(policy::policy const& wanted, std::uint64_t slot) {
  auto const& copies = wanted.host_copies;
  if (copies.disk == 0) {
    return {};
  }
  if (copies.disk < slot) {
    return {fmt::format("host_copies.disk is {}, less than one chunk of {}",
                        policy::write_bytes(copies.disk), policy::write_bytes(slot))};
  }
  if (auto const why = memhandover::shortage_of_disk(
          {copies.disk_path, copies.disk}, memhandover::read_disk_room(copies.disk_path))) {
    std::fprintf(stderr, "%s: warning: host_copies.disk: %s\n", wanted.file.c_str(), why->c_str());
  }
  return {};
}

/// Why the broker on this machine would not make the policy's host copies. What is too little at present is a warning.
std::vector<std::string> host_copies_faults(policy::policy const& wanted) {
  auto const budget = wanted.host_copies.memory;
  if (budget == 0) {
    return {};
  }
  auto const room = memhandover::read_host_room();
  bool const on_host = wanted.pool.backend == policy::pool_backend::host;
  auto const slot = wanted.pool.chunk.value_or(wanted.pool.backend == policy::pool_backend::cuda
                                                   ? memhandover::default_cuda_chunk_bytes
                                                   : memhandover::default_host_chunk_bytes);
  auto const of_pool = on_host && wanted.pool.memory ? wanted.pool.memory->bytes : 0;
  if (budget < slot) {
    return {fmt::format("host_copies.memory is {}, less than one chunk of {}",
                        policy::write_bytes(budget), policy::write_bytes(slot))};
  }
  if (auto const why = memhandover::refusal_of_host_copies(budget, slot, of_pool, room)) {
    return {"host_copies.memory: " + *why};
  }
  if (auto const why = memhandover::shortage_of_host_copies(budget, room)) {
    std::fprintf(stderr, "%s: warning: host_copies.memory: %s\n", wanted.file.c_str(),
                 why->c_str());
  }
  return disk_faults(wanted, slot);
}

/// The server's program tells what is wrong with the files that its endpoint would read, and knows what they must be.
bool check_files(policy::policy const& wanted, launcher::install_layout const& installed) {
  std::vector<std::string> words{installed.server.string()};
  if (auto const& file = wanted.server.token_file; !file.empty()) {
    words.insert(words.end(), {"--check-token-file", file.string()});
  }
  if (auto const& tls = wanted.server.tls; !tls.certificate_file.empty()) {
    words.insert(words.end(), {"--check-certificate-file", tls.certificate_file.string(),
                               "--check-key-file", tls.key_file.string()});
  }
  if (wanted.server.grpc_port) {
    words.emplace_back("--check-grpc");
  }
  if (auto const& file = wanted.server.access_log; !file.empty()) {
    words.insert(words.end(), {"--check-access-log", file.string()});
  }
  if (words.size() == 1) {
    return true;
  }
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (auto& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  pid_t child = 0;
  int ended = 0;
  if (int const failed =
          ::posix_spawn(&child, argv.front(), nullptr, nullptr, argv.data(), environ);
      failed != 0) {
    throw error{error_kind::unsupported,
                fmt::format("{} cannot be started: {}", words.front(), std::strerror(failed))};
  }
  while (::waitpid(child, &ended, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(ended) && WEXITSTATUS(ended) == 0;
}

}  // namespace

void serve(serve_arguments const& arguments, launcher::install_layout const& installed) {
  (void)policy::load(arguments.policy);
  std::vector<std::string> words{installed.server.string(), "--executor",
                                 launcher::executor_of(installed).string(), "--policy",
                                 arguments.policy};
  words.insert(words.end(), arguments.overrides.begin(), arguments.overrides.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (auto& word : words) {
    argv.push_back(word.data());
  }
  argv.push_back(nullptr);
  auto env = launcher::environment::of_this_process();
  env.set("SLUICE_BROKER", installed.program.string());
  if (!arguments.runtime_dir.empty()) {
    env.set("SLUICE_RUNTIME_DIR", arguments.runtime_dir);
  }
  ::execve(argv.front(), argv.data(), env.pointers().data());
  throw error{
      error_kind::unsupported,
      fmt::format("{} cannot be started: {}", installed.server.string(), std::strerror(errno))};
}

int keep_pool(memhandover::broker_options const& options, int ready_fd) {
  constexpr unsigned first = STDERR_FILENO + 1;
  constexpr unsigned last = std::numeric_limits<unsigned>::max();
  if (ready_fd < static_cast<int>(first)) {
    ::close_range(first, last, 0);
  } else {
    auto const kept = static_cast<unsigned>(ready_fd);
    if (kept > first) {
      ::close_range(first, kept - 1, 0);
    }
    ::close_range(kept + 1, last, 0);
  }
  return memhandover::broker_main(options, ready_fd);
}

int show_status(show_arguments const& arguments) {
  auto const status = pool_and_server(arguments.runtime_dir, arguments.device);
  print(arguments.as_json ? json_text(status) : status_text(status));
  return 0;
}

int show_pool(show_arguments const& arguments) {
  auto pools = memhandover::query_chunks(arguments.runtime_dir, arguments.device);
  if (!arguments.as_json) {
    print(pool_text(pools));
    return 0;
  }
  pools["free"] = free_summary(pools["runs"]);
  if (auto const several = pools.find("pools"); several != pools.end()) {
    for (auto& pool : *several) {
      pool["free"] = free_summary(pool["runs"]);
    }
  }
  print(json_text(pools));
  return 0;
}

int show_address(show_arguments const& arguments, std::string const& address, std::uint32_t pid) {
  auto const story = memhandover::query_address(arguments.runtime_dir, parse_address(address),
                                                arguments.device, pid);
  print(arguments.as_json ? json_text(story) : address_text(story));
  return 0;
}

int list_pools(bool as_json) {
  auto const list = pool_list(memhandover::find_pools());
  print(as_json ? json_text(list) : pool_list_text(list));
  return 0;
}

int clean_pools(bool dry_run) {
  std::string said;
  for (auto const& pool : memhandover::find_pools()) {
    if (!pool.orphaned()) {
      continue;
    }
    auto const ended = dry_run ? static_cast<int>(pool.holders.size()) : end_orphan(pool);
    said +=
        fmt::format("pool {:016x}: {} {} that kept {}\n", pool.id, dry_run ? "would end" : "ended",
                    ended == 1 ? "1 process" : fmt::format("{} processes", ended),
                    format_bytes(pool.shape.bytes()));
  }
  print(said.empty() ? "there is no orphaned pool\n" : said);
  return 0;
}

int check_policy(std::string const& file, launcher::install_layout const& installed) {
  try {
    auto const wanted = policy::load(file);
    bool const are_usable = check_files(wanted, installed);
    auto faults = repository_faults(wanted);
    auto const of_copies = host_copies_faults(wanted);
    faults.insert(faults.end(), of_copies.begin(), of_copies.end());
    for (auto const& each : faults) {
      std::fprintf(stderr, "%s: %s\n", wanted.file.c_str(), each.c_str());
    }
    if (!faults.empty() || !are_usable) {
      return 1;
    }
    print(summary(wanted));
    return 0;
  } catch (policy::policy_error const& wrong) {
    std::fprintf(stderr, "%s\n", wrong.what());
    return 1;
  }
}

int reload_policy(std::string const& runtime_dir, std::optional<int> device) {
  auto const came = ask_server(runtime_dir, device, "reload");
  std::vector<std::string> parts;
  for (auto const* const what : {"added", "removed", "changed"}) {
    if (auto const names = came.value(what, std::vector<std::string>{}); !names.empty()) {
      parts.push_back(fmt::format("{} {}", what, fmt::join(names, ", ")));
    }
  }
  print(fmt::format("{}\n", parts.empty() ? "no model has come or gone"
                                          : fmt::format("{}", fmt::join(parts, "; "))));
  auto const faults = came.value("unservable", nlohmann::json::array());
  for (auto const& each : faults) {
    std::fprintf(stderr, "model '%s' cannot be served: %s\n",
                 each["name"].get_ref<std::string const&>().c_str(),
                 each["reason"].get_ref<std::string const&>().c_str());
  }
  return faults.empty() ? 0 : 1;
}

int print_schema() {
  print(policy::schema().dump(2) + "\n");
  return 0;
}

}  // namespace sluice::cli
