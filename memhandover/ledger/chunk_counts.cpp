#include "memhandover/ledger/chunk_counts.hpp"

namespace sluice::memhandover {

void chunk_counts::add(chunk_state const& state) noexcept {
  switch (state.who) {
    case owner::free:
      ++free;
      return;
    case owner::dirty:
      ++dirty;
      return;
    case owner::training:
      ++training;
      break;
    case owner::serving:
      ++serving;
      left += state.client == left_slot ? 1 : 0;
      break;
    case owner::engine:
      ++engine;
      break;
  }
  if (is_owned(state.who) && state.client < max_clients) {
    ++by_client.at(state.client);
  }
}

chunk_counts count_chunks(ledger_view const& view) noexcept {
  return count_chunks(view, [](std::uint32_t /*chunk*/, chunk_state const& /*state*/) {});
}

}  // namespace sluice::memhandover
