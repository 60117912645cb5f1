/// The words of a cut whose ranks are on several hosts, in a store that all reach over the network.
///
/// Under "sluice/COMMUNICATOR/" lie
///
///   word       all that several ranks write: {word, differ, lost, stamp}; changed as a whole, by
///              compare-and-set, and no two changes have the same stamp
///   part/RANK  {arrival, what is meant by its number}; written by its rank alone
///   calls/RANK {number, what is meant by it and those before}; likewise, before the part
///
/// The store makes the calls of one connection in their order, and all one by one: so what a rank has
/// written before it looks is seen by all who look later. How far a rank has launched is asked by itself
/// alone, and is not there.
///
/// A store that is gone is a loss: the word is then this rank's own, and says so.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_shim/agreement/cut_words.hpp"
#include "nccl_shim/agreement/store.hpp"

namespace sluice::nccl_shim {

/// As they lie in the store, in the order of bytes of x86-64.
struct stored_word {
  std::uint64_t word = 0;
  std::uint64_t differ = 0;
  std::uint64_t lost = 0;
  std::uint64_t stamp = 0;
};
struct stored_part {
  std::uint64_t arrived = 0;
  numbered_call what;
};
struct stored_calls {
  std::uint64_t newest = 0;
  std::array<numbered_call, remembered_calls> calls;
};

class words_in_store final : public cut_words {
 public:
  /// `prefix` of the keys, which have been made.
  words_in_store(store& in, std::string const& prefix, unsigned rank, unsigned ranks);

  /// Makes the word, and the part of one rank, where they are not yet.
  static void make(store& in, std::string const& prefix, unsigned rank);
  static void remove(store& in, std::string const& prefix, unsigned ranks);

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
  [[nodiscard]] std::uint32_t turn() noexcept override { return 0; }
  void notify() noexcept override {}
  void wait(std::uint32_t seen, std::chrono::nanoseconds waited,
            std::chrono::nanoseconds at_most) noexcept override;
  [[nodiscard]] std::chrono::nanoseconds between_looks(
      std::chrono::nanoseconds waited) const noexcept override;

 private:
  using parts = std::array<stored_part, max_ranks>;
  /// False if the store is gone.
  [[nodiscard]] bool read_parts(parts& into) noexcept;
  [[nodiscard]] bool swap(stored_word made) noexcept;
  void note_loss_of_store() noexcept;

  store& in_;
  std::string word_key_;
  std::string calls_prefix_;
  std::vector<std::string> part_keys_;
  unsigned rank_;
  unsigned ranks_;
  std::atomic<std::uint64_t> launched_{0};
  std::mutex asking_;  // what follows is guarded by it, and is in the order of the store
  stored_word last_;   // as it was when this rank saw it last
  stored_part own_;
  stored_calls own_calls_;
  std::uint64_t stamps_ = 0;
};

}  // namespace sluice::nccl_shim
