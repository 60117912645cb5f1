#include "memhandover/client/work_report.hpp"

#include <sys/eventfd.h>

#include <algorithm>

#include "memhandover/ledger/client_entries.hpp"

namespace sluice::memhandover {
namespace {

/// Lowest bit of `client_report::drained_ns`.
constexpr std::int64_t waited_bit = 1;

std::int64_t end_from(std::int64_t now_ns) noexcept {
  return now_ns + std::chrono::nanoseconds{work_report::lasts}.count();
}

}  // namespace

void work_report::begins() noexcept {
  auto const now = monotonic_ns();
  says_.works_since_ns.store(now, std::memory_order_relaxed);
  says_.works_until_ns.store(end_from(now), std::memory_order_release);
  (void)::eventfd_write(doorbell_, 1);
}

void work_report::drained(bool waited) noexcept {
  auto const now = monotonic_ns();
  auto const since = says_.works_since_ns.load(std::memory_order_relaxed);
  says_.worked_ns.fetch_add(static_cast<std::uint64_t>(std::max<std::int64_t>(now - since, 0)),
                            std::memory_order_relaxed);
  says_.drained_ns.store((now & ~waited_bit) | (waited ? waited_bit : 0),
                         std::memory_order_relaxed);
  says_.works_until_ns.store(0, std::memory_order_release);
  (void)::eventfd_write(doorbell_, 1);
}

void work_report::renew() noexcept {
  auto until = says_.works_until_ns.load(std::memory_order_relaxed);
  auto const end = end_from(monotonic_ns());
  while (until != 0 && until < end &&
         !says_.works_until_ns.compare_exchange_weak(until, end, std::memory_order_release)) {
  }
}

work_seen work_of_engines(ledger_view const& view, std::int64_t now_ns) noexcept {
  work_seen seen;
  std::int64_t last = 0;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const& entry = view.clients()[slot];
    if (!has_status(entry, client_status::live) ||
        entry.kind.load() != static_cast<std::uint32_t>(client_kind::engine)) {
      continue;
    }
    auto const& says = view.mailbox(slot);
    auto const until =
        std::min(says.works_until_ns.load(std::memory_order_acquire), end_from(now_ns));
    if (until > now_ns) {
      seen.until_ns = std::max(seen.works ? seen.until_ns : 0, until);
      seen.works = true;
    }
    if (auto const drained = says.drained_ns.load(std::memory_order_relaxed); drained > last) {
      last = drained;
      seen.waited = (drained & waited_bit) != 0;
    }
  }
  return seen;
}

}  // namespace sluice::memhandover
