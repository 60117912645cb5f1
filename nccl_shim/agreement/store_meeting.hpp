/// The ranks of one communicator that have joined in the store of the job, on whatever host.
///
///   joined ──all have──► words, beats ──► left; the last removes the keys
///
/// Beside the keys of the words and the beats, "sluice/COMMUNICATOR/" holds
///
///   places     how many have begun to join; each makes the keys of the rank that has its place's number,
///              so that all are there when all have joined
///   joined     how many have
///   left       how many have left
///   host/RANK  the name of its host
///
/// Thread-safety: as the store.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "nccl_shim/agreement/store.hpp"

namespace sluice::nccl_shim {

class store_meeting {
 public:
  /// Nothing if the store is gone.
  [[nodiscard]] static std::unique_ptr<store_meeting> join(store& in, std::string const& key);
  store_meeting(store_meeting const&) = delete;
  store_meeting& operator=(store_meeting const&) = delete;
  ~store_meeting();

  /// How many have joined; nothing if the store is gone.
  [[nodiscard]] std::optional<unsigned> joined() const noexcept;
  /// All have, and this one is that rank.
  void publish_host(unsigned rank) noexcept;
  /// Where a rank runs, once it has told.
  [[nodiscard]] std::string host_of(unsigned rank) const;

  [[nodiscard]] store& in() const noexcept { return in_; }
  [[nodiscard]] std::string const& prefix() const noexcept { return prefix_; }

 private:
  store_meeting(store& in, std::string prefix) noexcept;

  store& in_;
  std::string prefix_;
};

}  // namespace sluice::nccl_shim
