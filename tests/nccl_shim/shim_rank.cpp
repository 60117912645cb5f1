/// One rank of a job. shim_test.cpp runs some of them, with gate and shim preloaded.
///
///   sluice_shim_rank SCENARIO RANK RANKS FILE     prints what it sees, exits with 0 if it ends
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>

#include "tests/nccl_shim/fake_nccl.hpp"
#include "tests/nccl_shim/rank_of_job.hpp"

namespace {

using sluice::nccl_shim::testing::rank_of_job;

std::map<std::string, std::function<void(rank_of_job&)>> scenarios() {
  return {{"pauses", &rank_of_job::pauses},
          {"far ahead", &rank_of_job::far_ahead},
          {"exchanges", &rank_of_job::exchanges},
          {"deaths", &rank_of_job::deaths},
          {"together", &rank_of_job::together},
          {"group", &rank_of_job::group},
          {"split in group", &rank_of_job::split_in_group},
          {"split", &rank_of_job::split},
          {"differ", [](rank_of_job& of) { of.call_that_fails(of.rank == 0 ? 8 : 9); }},
          {"fail", [](rank_of_job& of) { of.call_that_fails(sluice::fake_nccl::failing_count); }},
          {"abort", &rank_of_job::abort_beside_a_device_that_hangs},
          {"aborts", &rank_of_job::go_on_after_aborts},
          {"send before split", &rank_of_job::send_before_a_split},
          {"receive", &rank_of_job::receive_from_the_dead},
          {"death", &rank_of_job::reduce_with_the_dead},
          {"expendable", &rank_of_job::call_inside_of_a_micro_batch},
          {"registration", &rank_of_job::registration}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    return 2;
  }
  try {
    auto const known = scenarios();
    auto const scenario = known.find(argv[1]);
    if (scenario == known.end()) {
      throw std::runtime_error{std::string{"no scenario "} + argv[1]};
    }
    static rank_of_job self;  // detached threads look at it until the process ends
    self.rank = std::atoi(argv[2]);
    self.ranks = std::atoi(argv[3]);
    self.file = argv[4];
    self.set_up();
    scenario->second(self);
  } catch (std::exception const& failure) {
    std::printf("%s\n", failure.what());
    return 1;
  }
  std::fflush(nullptr);
  ::_exit(0);  // streams' threads of the fake driver may run on
}
