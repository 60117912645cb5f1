/// A server's side of the manifest: what it publishes, and what it takes over from its predecessor.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "memhandover/client/serving_pool.hpp"
#include "memhandover/client/warm_memory.hpp"
#include "memhandover/ledger/ledger_writer.hpp"
#include "memhandover/ledger/manifest.hpp"

namespace sluice::memhandover::detail {

class server_manifest final : public warm_memory {
 public:
  /// The parts of the pool's server that this works on; all outlive it.
  struct parts {
    ledger_view const& view;
    device_memory& memory;
    std::byte* whole;  ///< where chunk i lies at offset i × chunk_bytes
    std::uint32_t slot;
    std::mutex& mutex;  ///< guards `writer` and this object
    std::optional<ledger_writer>& writer;
    std::function<std::shared_ptr<void>()> hold;  ///< keeps the server alive
    /// Hears of chunks that have been claimed, where they lie, and their key; called without `mutex`.
    std::function<void(std::vector<std::uint32_t> const&, std::byte const*, std::string_view)>
        claimed;
  };

  server_manifest(int fd, parts of);

  void publish(std::string_view key, std::byte const* data, std::uint64_t bytes,
               std::span<std::byte const> blob) override;
  void publish_chunks(std::string_view key, std::span<std::uint32_t const> chunks,
                      std::span<std::byte const> blob) override;
  void withdraw(std::string_view key) override;
  void set_in_use(std::string_view key, bool used) override;
  [[nodiscard]] std::vector<inheritance> inherited() const override;
  [[nodiscard]] placement claim(std::string_view key) override;
  [[nodiscard]] std::optional<claimed_chunks> claim_chunks(std::string_view key) override;
  void hold_left() override;
  void release(std::string_view key) override;
  void release_rest() override;

  // --- for the server; with the mutex held

  /// A placement whose chunks are mapped a second time at `data`, until `forget_stitched`.
  void note_stitched(std::byte const* data, std::vector<std::uint32_t> chunks);
  void forget_stitched(std::byte const* data);
  /// What was published of chunks that go back to the pool.
  void withdraw_all_in(std::span<std::uint32_t const> chunks);
  /// Lets go of everything that is left once its time is over. Returns when that is, CLOCK_MONOTONIC
  /// nanoseconds; nothing if nothing is left.
  [[nodiscard]] std::optional<std::int64_t> end_grace();
  /// The server ends in order.
  void end();

 private:
  struct publication {
    std::vector<std::uint32_t> chunks;
    manifest_place place{};
  };

  /// The chunk, and since when it is this server's; nothing if it is not.
  [[nodiscard]] std::optional<chunk_epoch> held_here(std::uint32_t chunk) const;
  [[nodiscard]] std::vector<manifest_entry> left_entries() const;
  [[nodiscard]] std::optional<manifest_entry> left_under(std::string_view key) const;
  void publish(manifest_entry const& entry);
  std::size_t prune();
  void give_claimed_back(std::vector<std::uint32_t> const& chunks);
  void forget_left(manifest_entry const& entry);

  parts of_;
  manifest manifest_;
  /// Published by this server.
  std::map<std::string, publication, std::less<>> own_;
  std::map<std::byte const*, std::vector<std::uint32_t>> stitched_;
  std::vector<std::uint32_t> claims_;  ///< by chunk: claimed placements that it is part of
};

}  // namespace sluice::memhandover::detail
