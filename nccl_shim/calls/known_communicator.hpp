/// What is known of a communicator, and who is calling NCCL about it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "abi/nccl_abi.hpp"
#include "nccl_shim/agreement/rank_group.hpp"

namespace sluice::nccl_shim {

struct alignas(64) known_communicator : std::enable_shared_from_this<known_communicator> {
  std::unique_ptr<rank_group> ranks;  ///< nullptr: they do not agree
  std::atomic<int> error{success};
  std::atomic<bool> given_up{false};
  std::atomic<std::int64_t> death_seen_ns{0};  ///< when somebody who asked for errors first saw one
  /// When who asks for errors last looked at the other ranks.
  std::atomic<std::int64_t> looked_around_ns{0};
  std::atomic<std::uint32_t> being_called{0};  ///< by so many calls of NCCL's functions just now

  /// Why calls are not made.
  [[nodiscard]] int trouble() const noexcept {
    return given_up.load(std::memory_order_seq_cst) ? int{remote_error}
                                                    : error.load(std::memory_order_acquire);
  }
  /// Whether it is the first trouble.
  bool fail(int why) noexcept {
    int none = success;
    return error.compare_exchange_strong(none, why, std::memory_order_acq_rel);
  }
  /// Its ranks mean different calls by one number: says which.
  void fail_by_difference() noexcept;
  /// Whether it is long enough since somebody who asked for errors has looked at the other ranks. PyTorch asks
  /// for each collective that is under way, and who calls another one waits for it.
  [[nodiscard]] bool may_look_around() noexcept;
};

/// While it lives NCCL may be called about the communicator, unless there is trouble, and whoever aborts it waits.
class calling {
 public:
  explicit calling(known_communicator& on) noexcept : on_{&on} {
    on.being_called.fetch_add(1, std::memory_order_seq_cst);
  }
  calling(calling const&) = delete;
  calling& operator=(calling const&) = delete;
  calling(calling&& other) noexcept : on_{std::exchange(other.on_, nullptr)} {}
  calling& operator=(calling&&) = delete;
  ~calling() {
    if (on_ != nullptr) {
      on_->being_called.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
  /// Of after that.
  [[nodiscard]] int trouble() const noexcept { return on_->trouble(); }

 private:
  known_communicator* on_;
};

}  // namespace sluice::nccl_shim
