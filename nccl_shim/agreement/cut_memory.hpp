/// The words of a cut whose ranks are on one host, in memory that they share.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "nccl_shim/agreement/cut_words.hpp"

namespace sluice::nccl_shim {

/// In shared memory, zero at first. Each rank writes its own part.
///
/// While nobody needs to be asked, others read no more of a part than the call of one number. So what its rank writes with each
/// call stays in that rank's cache, and one line of another's has to come over.
struct cut_memory {
  struct alignas(64) call {
    std::atomic<std::uint64_t> at{0};  ///< as in `arrived`; 0 while the rest is being written
    std::array<std::atomic<std::uint64_t>, 4> what{};
  };
  struct alignas(64) rank_part {
    std::atomic<std::uint64_t> arrived{0};   ///< {epoch: 16, number: 48}
    std::atomic<std::uint64_t> launched{0};  ///< the last number
    /// The last calls, a number's at its remainder: ranks that nobody holds up may be apart.
    std::array<call, remembered_calls> calls{};
  };
  alignas(64) std::atomic<std::uint64_t> word{0};
  std::atomic<std::uint64_t> differ{0};  ///< {1 + number: 48, rank: 8, rank: 8} whose calls differ
  std::atomic<std::uint32_t> lost{0};    ///< 1 + a rank that has died
  alignas(64) std::atomic<std::uint32_t> turn{0};  ///< grows with what somebody may wait for
  std::atomic<std::uint32_t> sleepers{0};
  std::array<rank_part, max_ranks> ranks;

  [[nodiscard]] call& slot_of(unsigned rank, std::uint64_t number) noexcept {
    return ranks[rank % max_ranks].calls[number % remembered_calls];
  }
  /// As `cut_words` says of them, for that rank.
  [[nodiscard]] numbered_call call_of(unsigned rank, std::uint64_t number) noexcept {
    auto const& what = slot_of(rank, number).what;
    return {what[0].load(std::memory_order_acquire), what[1].load(std::memory_order_acquire),
            what[2].load(std::memory_order_acquire), what[3].load(std::memory_order_acquire)};
  }
  void arrive(unsigned rank, std::uint64_t at, numbered_call const& what) noexcept {
    auto& slot = slot_of(rank, at & number_mask);
    slot.at.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    slot.what[0].store(what.operation, std::memory_order_relaxed);
    slot.what[1].store(what.type, std::memory_order_relaxed);
    slot.what[2].store(what.count, std::memory_order_relaxed);
    slot.what[3].store(what.root, std::memory_order_relaxed);
    slot.at.store(at, std::memory_order_release);
    ranks[rank].arrived.store(at, std::memory_order_release);
    // Of two that arrive, one sees the other's.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  [[nodiscard]] bool differs(unsigned rank, unsigned neighbour, std::uint64_t number) noexcept {
    auto const& at = slot_of(neighbour, number).at;
    std::uint64_t const before = at.load(std::memory_order_seq_cst);
    if ((before & number_mask) != number) {
      return false;  // it has not come to that yet, or does not remember
    }
    bool const different = call_of(neighbour, number) != call_of(rank, number);
    return different && at.load(std::memory_order_acquire) == before;
  }
  void launched(unsigned rank, std::uint64_t number) noexcept;
  void notify() noexcept;
  /// Whether no rank needs to be asked, nor is in trouble.
  [[nodiscard]] bool needs_nothing(cut_word now) const noexcept {
    return now.needed == 0 && lost.load(std::memory_order_seq_cst) == 0 &&
           differ.load(std::memory_order_seq_cst) == 0;
  }
};

/// One rank's way to it.
class words_in_memory final : public cut_words {
 public:
  words_in_memory(cut_memory& shared, unsigned rank, unsigned ranks) noexcept
      : shared_{shared}, rank_{rank}, ranks_{ranks} {}

  [[nodiscard]] cut_memory* memory() noexcept override { return &shared_; }
  [[nodiscard]] view look() noexcept override;
  [[nodiscard]] bool exchange(std::uint64_t& seen, std::uint64_t made) noexcept override;
  void arrive(std::uint64_t at, numbered_call const& what) noexcept override;
  void arrivals(std::span<std::uint64_t> of_ranks) noexcept override;
  [[nodiscard]] numbered_call call_of(unsigned rank, std::uint64_t number) noexcept override;
  [[nodiscard]] glance look_at_all(std::uint64_t at) noexcept override;
  [[nodiscard]] bool differs(unsigned neighbour, std::uint64_t number) noexcept override;
  void launched(std::uint64_t number) noexcept override;
  [[nodiscard]] std::uint64_t launched() noexcept override;
  void lose(unsigned rank) noexcept override;
  void differ(std::uint64_t differ) noexcept override;
  [[nodiscard]] std::uint32_t turn() noexcept override;
  void notify() noexcept override;
  void wait(std::uint32_t seen, std::chrono::nanoseconds waited,
            std::chrono::nanoseconds at_most) noexcept override;
  [[nodiscard]] std::chrono::nanoseconds between_looks(
      std::chrono::nanoseconds waited) const noexcept override;

 private:
  cut_memory& shared_;
  unsigned rank_;
  unsigned ranks_;
};

}  // namespace sluice::nccl_shim
