#include "nccl_shim/calls/domain.hpp"

#include <mutex>
#include <utility>

namespace sluice::nccl_shim {
namespace {

struct domain {
  std::mutex lock;
  bool allowed = false;  // guarded by lock, as all that follows
  communicator which = nullptr;
  std::shared_ptr<known_communicator> known;
  std::uint64_t micro_batch = 0;  // the last that called something …
  std::uint16_t epoch = 0;        // … and in which one it began to

  void become(communicator another, std::shared_ptr<known_communicator> of) noexcept {
    which = another;
    known = std::move(of);
    micro_batch = 0;
  }
  /// One that is given up ends no more micro-batches than the one in which it was: those after it have another.
  void leave_one_that_is_given_up(std::uint64_t at) noexcept {
    if (known != nullptr && micro_batch != at && known->given_up.load(std::memory_order_seq_cst)) {
      become(nullptr, nullptr);
    }
  }
  [[nodiscard]] attempt attempt_at(std::uint64_t at) {
    if (std::exchange(micro_batch, at) != at) {
      epoch = known->ranks->agreement().epoch();
    }
    return {known, epoch};
  }
};

kind_of_launch refused(char const* why) {
  return refused_group{invalid_usage, why};
}

domain& the_one() {
  static domain& one = *std::make_unique<domain>().release();  // threads call until the end
  return one;
}

}  // namespace

void allow_inside_micro_batches(bool allow) noexcept {
  domain& here = the_one();
  std::lock_guard const guard{here.lock};
  here.allowed = allow;
}

bool make_domain(communicator which, std::shared_ptr<known_communicator> const& known) {
  if (known->ranks == nullptr) {
    return false;
  }
  domain& here = the_one();
  std::lock_guard const guard{here.lock};
  here.become(which, known);
  return true;
}

std::shared_ptr<known_communicator> the_domain() {
  domain& here = the_one();
  std::lock_guard const guard{here.lock};
  return here.known;
}

void forget_domain(communicator which) noexcept {
  domain& here = the_one();
  std::lock_guard const guard{here.lock};
  if (here.which == which) {
    here.become(nullptr, nullptr);
  }
}

kind_of_launch inside_micro_batch(std::uint64_t micro_batch, bool is_one, communicator which,
                                  std::shared_ptr<known_communicator> const& known) {
  domain& here = the_one();
  std::lock_guard const guard{here.lock};
  if (!here.allowed) {
    return refused(
        "other ranks would wait for it if the micro-batch is discarded; call it between "
        "micro-batches");
  }
  if (known->ranks == nullptr) {
    return refused("its communicator's ranks do not agree on their collectives");
  }
  if (!is_one) {
    return refused("only what all ranks of one communicator take part in can be run again");
  }
  here.leave_one_that_is_given_up(micro_batch);
  if (here.known == nullptr) {
    here.become(which, known);
  }
  if (here.known != known && !known->ranks->is_part_of(*here.known->ranks)) {
    return refused(
        "its communicator has ranks that are not in the one that micro-batches end with; name "
        "one that has all by sluice_end_with");
  }
  return numbered_group{known, here.attempt_at(micro_batch)};
}

std::optional<attempt> end_of_micro_batch(std::uint64_t micro_batch) {
  domain& here = the_one();
  std::lock_guard const guard{here.lock};
  here.leave_one_that_is_given_up(micro_batch);
  return here.known != nullptr ? std::optional{here.attempt_at(micro_batch)} : std::nullopt;
}

}  // namespace sluice::nccl_shim
