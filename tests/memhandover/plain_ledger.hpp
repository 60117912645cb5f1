/// A ledger as plain as can be, to compare the real one with: every rule of layout.hpp and
/// ledger_writer.hpp said once more, over vectors, in one process.
///
/// Thread-safety: none.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace sluice::memhandover::trials {

enum class holder { nobody, nobody_dirty, training, serving, engine };

struct plain_chunk {
  holder who = holder::nobody;
  std::uint32_t slot = 0;  ///< of a chunk that is somebody's
  bool needs_scrub = false;
  std::uint32_t epoch = 0;

  [[nodiscard]] bool is_free() const {
    return who == holder::nobody || who == holder::nobody_dirty;
  }
  /// Given on a request, and given up by mail.
  [[nodiscard]] bool is_tenants() const { return who == holder::training || who == holder::engine; }
  bool operator==(plain_chunk const&) const = default;
};

/// One chunk's change of owner; operations are sequences of them.
struct plain_change {
  std::uint32_t chunk = 0;
  plain_chunk now;
};

struct plain_mail {
  std::uint32_t chunk = 0;
  std::uint32_t epoch = 0;
};

struct plain_client {
  holder kind = holder::training;  ///< or an engine: whose the chunks become that it gets
  bool live = true;                ///< of one that has ended only mail is read
  std::vector<plain_mail> unread;
  std::uint32_t asked_number = 0;
  std::uint32_t asked_chunks = 0;
  bool asked_lasting = false;
  bool asked_first = false;  ///< before what the server keeps or waits for; of training alone
  std::uint32_t answered_number = 0;
  std::uint32_t demand_number = 0;
  std::vector<std::uint32_t> known_epoch;  ///< by chunk: of its last grant
  std::vector<bool> holds;                 ///< by chunk
};

class plain_ledger {
 public:
  static constexpr std::uint32_t clients = 4;  ///< slots 0 … 3; the server has the next
  static constexpr std::uint32_t server = clients;

  explicit plain_ledger(std::uint32_t chunk_count);

  // What the writer does: the changes in their order, none of them made yet. `apply` makes them.
  [[nodiscard]] std::vector<plain_change> pump() const;
  [[nodiscard]] std::vector<plain_change> take(std::uint32_t count) const;
  [[nodiscard]] std::vector<plain_change> give_back(std::vector<std::uint32_t> const& which) const;
  [[nodiscard]] std::vector<plain_change> reclaim(std::uint32_t slot) const;
  void apply(std::vector<plain_change> const& changes);

  // What a client does.
  [[nodiscard]] std::vector<std::uint32_t> collect(std::uint32_t slot, std::uint32_t most);
  void release(std::uint32_t slot, std::vector<std::uint32_t> const& which);

  [[nodiscard]] std::uint32_t free_chunks() const;
  [[nodiscard]] std::uint32_t held_by(std::uint32_t slot) const;
  [[nodiscard]] std::uint32_t owned_by(holder who) const;
  [[nodiscard]] std::uint32_t grantable() const;
  [[nodiscard]] std::vector<std::uint32_t> serving() const;

  std::vector<plain_chunk> chunks;
  std::array<plain_client, clients> client;
  std::uint32_t reserve = 0;
  std::uint32_t wanted = 0;
};

}  // namespace sluice::memhandover::trials
