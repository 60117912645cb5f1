#include "plain_ledger.hpp"

#include <algorithm>
#include <numeric>

namespace sluice::memhandover::trials {
namespace {

plain_change change(plain_chunk const& before, std::uint32_t chunk, holder who,
                    std::uint32_t slot) {
  plain_chunk now{who, slot, false, before.epoch + 1};
  now.needs_scrub = now.is_tenants() && before.who == holder::nobody_dirty;
  return {chunk, now};
}

}  // namespace

plain_ledger::plain_ledger(std::uint32_t chunk_count) : chunks(chunk_count) {
  for (auto& one : client) {
    one.known_epoch.resize(chunk_count);
    one.holds.resize(chunk_count);
  }
}

/// All mail first, slot after slot, each message only in the epoch that it gives up; then the
/// requests, slot after slot: from the lowest free chunk up, those that last from the highest down.
std::vector<plain_change> plain_ledger::pump() const {
  plain_ledger copy{*this};
  std::vector<plain_change> changes;
  auto change_owner = [&](std::uint32_t chunk, holder who, std::uint32_t slot) {
    changes.push_back(change(copy.chunks[chunk], chunk, who, slot));
    copy.chunks[chunk] = changes.back().now;
  };
  for (std::uint32_t slot = 0; slot < clients; ++slot) {
    for (auto const& mail : client.at(slot).unread) {
      auto const& at = copy.chunks[mail.chunk];
      if (at.is_tenants() && at.slot == slot && at.epoch == mail.epoch) {
        change_owner(mail.chunk, holder::nobody_dirty, 0);
      }
    }
  }
  for (std::uint32_t slot = 0; slot < clients; ++slot) {
    auto const& one = client.at(slot);
    if (!one.live || one.asked_number == one.answered_number) {
      continue;
    }
    bool const first = one.asked_first && one.kind == holder::training;
    auto left = std::min(one.asked_chunks, first ? copy.free_chunks() : copy.grantable());
    std::vector<std::uint32_t> order(chunks.size());
    std::iota(order.begin(), order.end(), 0U);
    if (one.asked_lasting) {
      std::reverse(order.begin(), order.end());
    }
    for (auto const i : order) {
      if (left > 0 && copy.chunks[i].is_free()) {
        change_owner(i, one.kind, slot);
        --left;
      }
    }
  }
  return changes;
}

/// The shortest run of free chunks that is long enough, of equal ones the first; if there is none,
/// the first free chunks.
std::vector<plain_change> plain_ledger::take(std::uint32_t count) const {
  std::uint32_t best = 0;
  std::uint32_t best_length = 0;
  for (std::uint32_t start = 0; start < chunks.size(); ++start) {
    if (start > 0 && chunks[start - 1].is_free()) {
      continue;
    }
    std::uint32_t length = 0;
    while (start + length < chunks.size() && chunks[start + length].is_free()) {
      ++length;
    }
    if (length > 0 && length >= count && (best_length == 0 || length < best_length)) {
      best = start;
      best_length = length;
    }
  }
  std::vector<plain_change> changes;
  for (auto i = best; i < chunks.size() && changes.size() < count; ++i) {
    if (chunks[i].is_free()) {
      changes.push_back(change(chunks[i], i, holder::serving, server));
    }
  }
  return changes;
}

std::vector<plain_change> plain_ledger::give_back(std::vector<std::uint32_t> const& which) const {
  std::vector<plain_change> changes;
  std::vector<bool> done(chunks.size());
  for (auto const i : which) {
    if (i < chunks.size() && chunks[i].who == holder::serving && !done[i]) {
      done[i] = true;
      changes.push_back(change(chunks[i], i, holder::nobody_dirty, 0));
    }
  }
  return changes;
}

std::vector<plain_change> plain_ledger::reclaim(std::uint32_t slot) const {
  std::vector<plain_change> changes;
  for (std::uint32_t i = 0; i < chunks.size(); ++i) {
    if (!chunks[i].is_free() && chunks[i].slot == slot) {
      changes.push_back(change(chunks[i], i, holder::nobody_dirty, 0));
    }
  }
  return changes;
}

void plain_ledger::apply(std::vector<plain_change> const& changes) {
  for (auto const& one : changes) {
    chunks[one.chunk] = one.now;
  }
}

std::vector<std::uint32_t> plain_ledger::collect(std::uint32_t slot, std::uint32_t most) {
  auto& one = client.at(slot);
  std::vector<std::uint32_t> granted;
  std::vector<std::uint32_t> surplus;
  for (std::uint32_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i].is_tenants() && chunks[i].slot == slot && chunks[i].epoch != one.known_epoch[i]) {
      one.known_epoch[i] = chunks[i].epoch;
      one.holds[i] = true;
      (granted.size() < most ? granted : surplus).push_back(i);
    }
  }
  release(slot, surplus);
  return granted;
}

void plain_ledger::release(std::uint32_t slot, std::vector<std::uint32_t> const& which) {
  auto& one = client.at(slot);
  for (auto const i : which) {
    if (one.holds[i]) {
      one.holds[i] = false;
      one.unread.push_back({i, one.known_epoch[i]});
    }
  }
}

std::uint32_t plain_ledger::free_chunks() const {
  return static_cast<std::uint32_t>(
      std::count_if(chunks.begin(), chunks.end(), [](auto const& at) { return at.is_free(); }));
}

std::uint32_t plain_ledger::held_by(std::uint32_t slot) const {
  return static_cast<std::uint32_t>(
      std::count_if(chunks.begin(), chunks.end(),
                    [slot](auto const& at) { return !at.is_free() && at.slot == slot; }));
}

std::uint32_t plain_ledger::owned_by(holder who) const {
  return static_cast<std::uint32_t>(
      std::count_if(chunks.begin(), chunks.end(), [who](auto const& at) { return at.who == who; }));
}

std::uint32_t plain_ledger::grantable() const {
  auto const kept = std::uint64_t{reserve} + wanted;
  return free_chunks() > kept ? static_cast<std::uint32_t>(free_chunks() - kept) : 0;
}

std::vector<std::uint32_t> plain_ledger::serving() const {
  std::vector<std::uint32_t> result;
  for (std::uint32_t i = 0; i < chunks.size(); ++i) {
    if (chunks[i].who == holder::serving) {
      result.push_back(i);
    }
  }
  return result;
}

}  // namespace sluice::memhandover::trials
