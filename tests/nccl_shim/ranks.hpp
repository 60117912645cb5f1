/// Ranks of a job, each a process of sluice_shim_rank with gate and shim preloaded, over the fake driver and
/// the fake NCCL.
#pragma once

#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace sluice::nccl_shim::testing {

using variables = std::map<std::string, std::string>;

struct ended {
  int status = -1;
  std::string output;  ///< with what it says on standard error
};

inline std::ostream& operator<<(std::ostream& to, ended const& one) {
  return to << "status " << one.status << ", output: " << one.output;
}

/// How one of them is started.
struct rank_setup {
  std::string scenario;
  int rank = 0;
  int ranks = 2;
  std::filesystem::path runtime_folder;
  std::filesystem::path meeting_file;  ///< of the fake NCCL, the same for all ranks
  std::string preloaded;
  std::string command_in_front;
  variables more;  ///< come before the usual ones
};

/// Gate and shim of this build.
[[nodiscard]] std::string usual_libraries();

/// Those that have been started.
class running_ranks {
 public:
  void start(rank_setup const& of);
  /// Waits until one has ended; each once.
  [[nodiscard]] ended wait(std::size_t which);
  [[nodiscard]] std::vector<ended> wait_for_all();

 private:
  std::vector<std::unique_ptr<FILE, int (*)(FILE*)>> pipes_;
};

}  // namespace sluice::nccl_shim::testing
