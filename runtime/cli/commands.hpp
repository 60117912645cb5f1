/// What each subcommand does, once its arguments are known. Each returns the program's exit code;
/// failures are thrown as `sluice::error`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memhandover/broker/broker_launch.hpp"
#include "runtime/launcher/install_layout.hpp"

namespace sluice::cli {

struct serve_arguments {
  std::string policy;
  std::vector<std::string> overrides;  ///< as sluice-server takes them
  std::string runtime_dir;
};

/// Checks the policy, then becomes sluice-server. Returns only by throwing.
[[noreturn]] void serve(serve_arguments const& arguments,
                        launcher::install_layout const& installed);

/// Becomes the broker. Closes all descriptors above standard error but `ready_fd` first: the broker
/// outlives whoever started it, and must not keep pipes and files of theirs open.
int keep_pool(memhandover::broker_options const& options, int ready_fd);

/// What a command that shows pools is asked for.
struct show_arguments {
  std::string runtime_dir;
  std::optional<int> device;  ///< all pools if it is not given
  bool as_json = false;
};

int show_status(show_arguments const& arguments);

int show_pool(show_arguments const& arguments);

/// What lay at `address`, in hexadecimal, of the process `pid`, or of any of the pool if that is 0.
int show_address(show_arguments const& arguments, std::string const& address, std::uint32_t pid);

int list_pools(bool as_json);

/// Ends the processes that alone keep orphaned pools alive, or with `dry_run` only names them.
int clean_pools(bool dry_run);

/// 0 and a line that sums the policy up, or 1 and every mistake.
int check_policy(std::string const& file, launcher::install_layout const& installed);

int print_schema();

/// Has the server read its policy and its repository again; a line says what changed. 0, or 1 where a model cannot be served.
int reload_policy(std::string const& runtime_dir, std::optional<int> device);

}  // namespace sluice::cli
