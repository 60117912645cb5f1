/// What a client says that its chunks hold, such as "arena" or a model's name, for `sluice pool
/// show`.
///
/// Thread-safety: none; the owner serialises calls.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "memhandover/ledger/ledger.hpp"

namespace sluice::memhandover {

class chunk_notes {
 public:
  /// The notes of the client in `slot`, which this process is; those of the slot's last owner go.
  /// `view` must outlive this object.
  chunk_notes(ledger_view const& view, std::uint32_t slot);

  /// From now on `chunks` hold `what`; texts are cut to 47 bytes, between characters. Of more than
  /// 255 different texts the later ones are not told. Chunks that do not exist are left alone.
  void say(std::span<std::uint32_t const> chunks, std::string_view what);

 private:
  ledger_view const& view_;
  std::uint32_t slot_;
  std::uint16_t texts_ = 0;
};

/// What `chunk` holds, as the client in `slot` says; empty if it has said nothing.
[[nodiscard]] std::string chunk_note(ledger_view const& view, std::uint32_t slot,
                                     std::uint32_t chunk);

}  // namespace sluice::memhandover
