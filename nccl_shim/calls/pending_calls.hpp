/// What waits in the gate's queue until the ranks of a communicator have agreed to it.
///
///   handed over ──ask──► asked ──granted──► made
///                  ▲       │  └──dropped──► its micro-batch runs again
///                  └───────┘ the gate closes: withdrawn
///
/// Thread-safety: a question is one thread's at a time, the gate sees to that.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "abi/gate_api.h"
#include "abi/nccl_abi.hpp"
#include "nccl_shim/agreement/board.hpp"
#include "nccl_shim/agreement/rank_group.hpp"
#include "nccl_shim/calls/collective.hpp"

namespace sluice::nccl_shim {

/// What is known of a communicator.
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

/// At a micro-batch: the communicator that it ends with, and the epoch of that in which it made its first call.
struct attempt {
  std::shared_ptr<known_communicator> domain;
  std::uint16_t epoch;
};

/// What one communicator has of an exchange: of sends, receives, and collectives that are not all of one communicator.
/// A collective is like a send to, and a receive from, all other ranks.
struct exchange_part {
  std::shared_ptr<known_communicator> of;
  std::vector<transfers> with;  ///< none where its ranks do not agree
};
/// Of each communicator once; `of` are those of the calls, one by one.
[[nodiscard]] std::vector<exchange_part> parts_of(
    std::span<collective const> calls, std::span<std::shared_ptr<known_communicator> const> of);
/// Adds to what there is of each communicator.
void add(std::vector<exchange_part>& all, std::span<exchange_part const> more);

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

/// The gate's table; nullptr if there is no gate, or this process is not to share.
[[nodiscard]] sluice_gate_api const* gate() noexcept;

/// Whether other ranks' devices wait for a call of this process, of any communicator, that it has not made yet.
[[nodiscard]] bool lags_behind_others();

/// Whether a thread waits for what was left to the gate, to make a communicator, say: the other ranks may be there already.
[[nodiscard]] bool is_flushing() noexcept;

/// Where this process says whom it waits for; nullptr if it cannot. From the first communicator on.
[[nodiscard]] board* the_board() noexcept;

/// While it lives, what the calling thread calls is NCCL's own.
class inside_nccl {
 public:
  inside_nccl() noexcept;
  inside_nccl(inside_nccl const&) = delete;
  inside_nccl& operator=(inside_nccl const&) = delete;
  ~inside_nccl();
  [[nodiscard]] static bool here() noexcept;
};

/// Makes a call, or a group of some, of all ranks of that communicator, which agree by `agreement`, if nothing lies before
/// it and nobody has to be asked; nothing: it is to be handed over.
[[nodiscard]] std::optional<int> make_at_once(std::span<collective const> calls,
                                              known_communicator& of, cut& agreement);

/// Hands a call, or a group of some, over to the gate; `place`: as part of a micro-batch.
[[nodiscard]] int hand_over(std::span<collective const> calls,
                            std::shared_ptr<known_communicator> of, std::optional<attempt> place);

/// The same for what has no number, of any communicators whose ranks agree.
[[nodiscard]] int hand_over_exchange(std::span<collective const> calls,
                                     std::vector<exchange_part> parts);
/// The same for what is captured: the graph's launches are asked about, not this.
[[nodiscard]] int hand_over_captured(std::span<collective const> calls,
                                     std::shared_ptr<known_communicator> of);
/// The launch of a graph, as the gate is to make it instead.
[[nodiscard]] sluice_agreed_call as_agreed(numbered_call const& graph,
                                           std::shared_ptr<known_communicator> of,
                                           std::optional<attempt> place,
                                           sluice_graph_launch const& launch);
/// The same where that has no number.
[[nodiscard]] sluice_agreed_call as_exchange(numbered_call const& graph,
                                             std::vector<exchange_part> parts,
                                             sluice_graph_launch const& launch);

/// Asks the other ranks to keep that micro-batch; calls `keep` when they have agreed. False if they have
/// dropped it.
[[nodiscard]] bool hand_over_end(attempt const& at, void (*keep)(void* of), void* keep_of);

}  // namespace sluice::nccl_shim
