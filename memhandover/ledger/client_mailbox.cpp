#include "memhandover/ledger/client_mailbox.hpp"

#include <algorithm>

#include "memhandover/ledger/job_needs.hpp"

namespace sluice::memhandover {

client_mailbox::client_mailbox(ledger_view const& view, std::uint32_t slot)
    : view_(view),
      slot_(slot),
      known_epoch_(view.header().chunk_count),
      held_(view.header().chunk_count) {}

void client_mailbox::ask(std::uint32_t count, lifetime kind, precedence turn) {
  auto& word = mailbox().request;
  auto const number = numbered::unpack(word.load(std::memory_order_relaxed)).seq + 1;
  auto const wish = std::min(count, view_.header().chunk_count) |
                    (kind == lifetime::lasting ? request_lasting : 0) |
                    (turn == precedence::before_demands ? request_before_demands : 0) |
                    (turn == precedence::coming_back ? request_whole : 0) |
                    (turn == precedence::beyond_reserve ? request_beyond_reserve : 0);
  word.store(numbered{number, wish}.pack(), std::memory_order_release);
  withdrawn_ = false;
}

bool client_mailbox::answered() const noexcept {
  auto const asked = numbered::unpack(mailbox().request.load(std::memory_order_relaxed)).seq;
  auto const& grant = view_.controls()[slot_].grant;
  return numbered::unpack(grant.load(std::memory_order_acquire)).seq == asked;
}

void client_mailbox::withdraw() {
  ask(0, lifetime::revocable);
  withdrawn_ = true;
}

std::vector<std::uint32_t> client_mailbox::collect(std::uint32_t most,
                                                   std::vector<std::uint32_t>* needs_scrub) {
  std::vector<std::uint32_t> granted;
  // What is noted as held here must reach the caller: nothing that throws comes in between.
  auto const chunks = view_.header().chunk_count;
  granted.reserve(std::min(most, chunks));
  if (needs_scrub != nullptr) {
    needs_scrub->reserve(needs_scrub->size() + std::min(most, chunks));
  }
  for (std::uint32_t i = 0; i < chunks; ++i) {
    auto const state = view_.chunk(i);
    if (!is_tenants(state.who) || state.client != slot_ || known_epoch_[i] == state.epoch) {
      continue;
    }
    known_epoch_[i] = state.epoch;
    held_[i] = true;
    if (granted.size() == most) {
      release({&i, 1});
      continue;
    }
    granted.push_back(i);
    if (state.needs_scrub && needs_scrub != nullptr) {
      needs_scrub->push_back(i);
    }
  }
  return granted;
}

bool client_mailbox::resolve() {
  if (!withdrawn_ || !answered()) {
    return false;
  }
  withdrawn_ = false;
  auto const before = mailbox().mail_written.load(std::memory_order_relaxed);
  (void)collect(0);
  return mailbox().mail_written.load(std::memory_order_relaxed) != before;
}

bool client_mailbox::has_mail() const noexcept {
  return view_.controls()[slot_].mail_read.load(std::memory_order_relaxed) !=
         mailbox().mail_written.load(std::memory_order_relaxed);
}

void client_mailbox::release(std::span<std::uint32_t const> chunks) {
  auto const ring = view_.mail_ring(slot_);
  auto written = mailbox().mail_written.load(std::memory_order_relaxed);
  for (auto const chunk : chunks) {
    if (held_.at(chunk)) {
      held_[chunk] = false;
      // No message is ever overwritten: a chunk has at most one on its way, and the ring holds one
      // for each.
      ring[written & (ring.size() - 1)].store(release_mail{chunk, known_epoch_[chunk]}.pack(),
                                              std::memory_order_relaxed);
      ++written;
    }
  }
  mailbox().mail_written.store(written, std::memory_order_release);
}

void client_mailbox::set_waiting(bool waiting) noexcept {
  // In one order with `grantable` below and both in the writer: weaker ones let each side read what
  // the other has not written yet.
  mailbox().waiting.store(waiting ? 1 : 0, std::memory_order_seq_cst);
}

std::uint32_t client_mailbox::grantable() const noexcept {
  return grantable_to(view_, slot_);
}

}  // namespace sluice::memhandover
