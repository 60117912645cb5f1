#include "tests/nccl_shim/parts_of_job.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>

#include "tests/nccl_shim/fake_nccl.hpp"
#include "tests/nccl_shim/nccl_calls.hpp"

namespace sluice::nccl_shim::testing {

parts parts_of_job(int rank, int ranks, std::string const& file, CUstream where) {
  constexpr int of_ints = 2;
  std::vector<std::vector<int>> const all =
      ranks == 4 ? std::vector<std::vector<int>>{{0, 1}, {2, 3}, {0, 2}, {1, 3}}
                 : std::vector<std::vector<int>>{{0, 1}, {1, 2}};
  parts made;
  for (auto const& members : all) {
    auto const at = std::find(members.begin(), members.end(), rank);
    if (at == members.end()) {
      continue;
    }
    int const name = static_cast<int>(&members - all.data()) + 1;
    fake_nccl::unique_id id{};
    (file + ".part" + std::to_string(name)).copy(id.path.data(), id.path.size() - 1);
    ncclComm* communicator = nullptr;
    if (ncclCommInitRank(&communicator, 2, id, static_cast<int>(at - members.begin())) != 0) {
      throw std::runtime_error{"no communicator of two"};
    }
    made.communicators.push_back(communicator);
    made.with.push_back({name, members, [communicator, where](int& from, int& to) {
                           return ncclAllReduce(&from, &to, 1, of_ints, 0, communicator, where);
                         }});
  }
  return made;
}

}  // namespace sluice::nccl_shim::testing
