/// What the gate asks of the ranks' agreement: the table that it is given as the library is loaded.
#include <algorithm>
#include <cstdint>

#include "abi/gate_api.h"
#include "nccl_shim/calls/communicators.hpp"
#include "nccl_shim/calls/domain.hpp"
#include "nccl_shim/calls/graphs.hpp"
#include "nccl_shim/calls/pending_calls.hpp"
#include "nccl_shim/calls/submit.hpp"
#include "nccl_shim/calls/surroundings.hpp"

namespace sluice::nccl_shim {
namespace {

void set_may_pause(int may) {
  may_pause(may != 0);
}

int resolve(std::int64_t deadline_ns) {
  auto const all = agreeing();
  return std::all_of(all.begin(), all.end(),
                     [deadline_ns](auto const& known) {
                       return known->ranks->resolve(deadline_ns) == outcome::granted;
                     })
             ? 1
             : 0;
}

void allow_inside(int allow) {
  allow_inside_micro_batches(allow != 0);
  works_together(allow != 0);
}

int end_with(void* communicator) {
  auto const which = static_cast<nccl_shim::communicator>(communicator);
  auto const known = find(which);
  return known != nullptr && make_domain(which, known) ? 1 : 0;
}

int keep_micro_batch(void (*keep)(void* of), void* of) {
  auto const at = end_of_micro_batch(gate()->micro_batch());
  if (!at) {
    keep(of);
    return 1;
  }
  return hand_over_end(*at, keep, of) ? 1 : 0;
}

void run_micro_batch_again() {
  if (auto const known = the_domain(); known != nullptr) {
    known->ranks->agreement().begin_epoch();
  }
}

constexpr sluice_agreement offered{.size = sizeof(sluice_agreement),
                                   .may_pause = set_may_pause,
                                   .resolve = resolve,
                                   .allow_inside = allow_inside,
                                   .end_with = end_with,
                                   .keep = keep_micro_batch,
                                   .run_again = run_micro_batch_again,
                                   .join = join_graphs,
                                   .release = release_graph,
                                   .agree_on_launch = agree_on_launch,
                                   .others_may_wait = [] { return others_may_wait() ? 1 : 0; }};

/// As the library is loaded.
[[gnu::constructor]] void offer_agreement() {
  if (gate() != nullptr) {
    gate()->set_agreement(&offered);
  }
}

}  // namespace
}  // namespace sluice::nccl_shim
