#include "tests/nccl_shim/ranks.hpp"

#include <sys/wait.h>

#include <array>
#include <utility>

#include "tests/runtime/gate/built_files.hpp"

namespace sluice::nccl_shim::testing {
namespace {

std::string command(rank_setup const& of) {
  variables all{{"SLUICE_REAL_LIBCUDA", gate::fake_driver_path()},
                {"SLUICE_RUN", "1"},
                {"SLUICE_RUNTIME_DIR", of.runtime_folder.string()},
                {"SLUICE_RUNTIME_LIBRARY", gate::test_runtime_path()},
                {"LD_LIBRARY_PATH", gate::built("lib/fake_nccl")},
                // The sanitizers' run-time libraries have to come first, which a preloaded library
                // prevents; it does no harm here.
                {"ASAN_OPTIONS", "verify_asan_link_order=0:detect_leaks=0"}};
  for (auto const& [name, value] : of.more) {
    all[name] = value;
  }
  std::string text = of.command_in_front + " env";
  for (auto const& [name, value] : all) {
    text += " " + name + "='" + value + "'";
  }
  return text + " LD_PRELOAD='" + of.preloaded + "' " + gate::built("bin/sluice_shim_rank") + " " +
         of.scenario + " " + std::to_string(of.rank) + " " + std::to_string(of.ranks) + " " +
         of.meeting_file.string() + " 2>&1";
}

}  // namespace

std::string usual_libraries() {
  return gate::gate_path() + ":" + gate::built("lib/libsluice_nccl.so");
}

void running_ranks::start(rank_setup const& of) {
  pipes_.emplace_back(::popen(command(of).c_str(), "r"), &::pclose);
}

ended running_ranks::wait(std::size_t which) {
  auto& pipe = pipes_.at(which);
  ended one;
  std::array<char, 4096> buffer{};
  while (std::fgets(buffer.data(), static_cast<int>(buffer.size()), pipe.get()) != nullptr) {
    one.output += buffer.data();
  }
  one.status = WEXITSTATUS(::pclose(pipe.release()));
  return one;
}

std::vector<ended> running_ranks::wait_for_all() {
  std::vector<ended> result;
  for (std::size_t which = 0; which < pipes_.size(); ++which) {
    result.push_back(wait(which));
  }
  return result;
}

}  // namespace sluice::nccl_shim::testing
