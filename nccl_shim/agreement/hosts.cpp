#include "nccl_shim/agreement/hosts.hpp"

#include <dlfcn.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "nccl_shim/agreement/torch_part.hpp"

namespace sluice::nccl_shim {
namespace {

constexpr std::chrono::seconds usual_patience{10};
constexpr int longest_patience_s = 3600;

/// A whole number in that range, and nothing else.
std::optional<int> number_in(std::string const& text, int least, int most) {
  int found = 0;
  auto const [end, failed] = std::from_chars(text.data(), text.data() + text.size(), found);
  bool const whole = failed == std::errc{} && end == text.data() + text.size();
  return whole && found >= least && found <= most ? std::optional{found} : std::nullopt;
}

/// Below the library that this is in.
std::string store_library() {
  Dl_info here{};
  static char const anything = 0;
  if (::dladdr(&anything, &here) == 0 || here.dli_fname == nullptr) {
    return "libsluice_store.so";
  }
  std::string const own = here.dli_fname;
  auto const slash = own.rfind('/');
  return torch_part(slash == std::string::npos ? "." : own.substr(0, slash), loaded_torch_minor()) +
         "/libsluice_store.so";
}

}  // namespace

job_hosts hosts_of_job(environment const& variable) {
  constexpr int many = 1 << 20;
  auto const ranks = number_in(variable("WORLD_SIZE"), 1, many);
  auto const here = number_in(variable("LOCAL_WORLD_SIZE"), 1, many);
  if (!ranks || !here || *ranks <= *here) {
    return {};
  }
  job_hosts found{.several = true, .store_at = std::nullopt, .problem = {}};
  std::string const host = variable("MASTER_ADDR");
  std::string const port = variable("MASTER_PORT");
  std::string const patience = variable("SLUICE_LOST_AFTER");
  auto const port_number = number_in(port, 1, 65535);
  auto const seconds = number_in(patience, 1, longest_patience_s);
  if (host.empty()) {
    found.problem = "MASTER_ADDR must be the host of the job's store, as torchrun sets it";
  } else if (!port_number) {
    found.problem =
        "MASTER_PORT must be the port of the job's store, as torchrun sets it, not '" + port + '\'';
  } else if (!patience.empty() && !seconds) {
    found.problem =
        "SLUICE_LOST_AFTER must be a number of seconds from 1 to 3600, not '" + patience + '\'';
  } else {
    found.store_at = {host, static_cast<std::uint16_t>(*port_number),
                      seconds ? std::chrono::seconds{*seconds} : usual_patience};
  }
  return found;
}

store* store_of_job() {
  // It stays until the end: threads ask it until then. What torch needs for that goes before they do.
  static store* one = nullptr;
  static std::once_flag once;
  std::call_once(once, [] {
    auto const hosts = hosts_of_job([](char const* name) -> std::string {
      char const* const value = std::getenv(name);
      return value != nullptr ? value : "";
    });
    if (hosts.several && !hosts.store_at) {
      std::fprintf(stderr, "sluice: ranks on several hosts do not agree where they pause: %s\n",
                   hosts.problem.c_str());
    }
    one = hosts.store_at ? store::open(store_library(), *hosts.store_at).release() : nullptr;
    if (one != nullptr) {
      std::atexit([] { one->retire(); });
    }
  });
  return one;
}

}  // namespace sluice::nccl_shim
