#include "memhandover/ledger/promised_chunks.hpp"

namespace sluice::memhandover {

void promise(ledger_view const& view, std::uint32_t slot, std::uint32_t demand,
             std::span<std::uint32_t const> chunks) noexcept {
  auto const promises = view.promises(slot);
  for (auto const chunk : chunks) {
    if (chunk < promises.size()) {
      promises[chunk].store(demand, std::memory_order_relaxed);
    }
  }
  view.mailbox(slot).demand_chosen.store(demand, std::memory_order_release);
}

std::optional<std::vector<std::uint32_t>> promised(ledger_view const& view, std::uint32_t slot,
                                                   std::uint32_t demand) {
  if (view.mailbox(slot).demand_chosen.load(std::memory_order_acquire) != demand) {
    return std::nullopt;
  }
  auto const promises = view.promises(slot);
  std::vector<std::uint32_t> chunks;
  for (std::uint32_t chunk = 0; chunk < promises.size(); ++chunk) {
    auto const state = view.chunk(chunk);
    if (promises[chunk].load(std::memory_order_relaxed) == demand &&
        (state.is_free() || state.client == slot)) {
      chunks.push_back(chunk);
    }
  }
  return chunks;
}

}  // namespace sluice::memhandover
