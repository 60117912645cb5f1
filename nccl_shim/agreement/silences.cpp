#include "nccl_shim/agreement/silences.hpp"

#include <string_view>

namespace sluice::nccl_shim {

std::vector<unsigned> silences::look(std::span<beat const> counts, std::int64_t now) {
  std::vector<unsigned> found;
  for (unsigned which = 0; which < of_.size(); ++which) {
    rank& one = of_[which];
    if (counts[which] != one.seen) {
      one = {counts[which], now, 0};
    } else if (++one.looks >= looks && now - one.since > patience_.count() &&
               std::string_view{one.seen.data()} != has_left) {
      found.push_back(which);
    }
  }
  return found;
}

}  // namespace sluice::nccl_shim
