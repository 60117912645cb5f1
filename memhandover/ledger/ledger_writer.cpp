#include "memhandover/ledger/ledger_writer.hpp"

#include <sys/eventfd.h>

#include <algorithm>

#include "memhandover/ledger/chunk_choice.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/job_needs.hpp"

namespace sluice::memhandover {
namespace {

/// A tenant that waits for what is parked looks for it every few milliseconds.
constexpr std::int64_t longest_unlooked_ns = 1'000'000'000;

/// What a tenant lacks to go on: all that is parked, or what an allocation of an engine's waits for.
std::uint32_t lacking(mailbox_header const& mailbox) {
  auto const parked = mailbox.parked_chunks.load(std::memory_order_relaxed);
  return parked > 0 ? parked : mailbox.short_chunks.load(std::memory_order_relaxed);
}

bool is_left(chunk_state const& state) {
  return state.who == owner::serving && state.client == left_slot;
}

}  // namespace

ledger_writer::ledger_writer(ledger_view const& view) : view_(view) {
  for (std::uint32_t i = 0; i < view_.header().chunk_count; ++i) {
    count(view_.chunk(i), 1);
  }
  publish_grantable();
}

void ledger_writer::set_bell(std::uint32_t slot, unique_fd bell) {
  bells_.at(slot) = std::move(bell);
  ring(slot);
}

void ledger_writer::set_reserve(std::uint32_t chunks) {
  reserve_ = chunks;
  publish_grantable();
}

void ledger_writer::set_wanted(std::uint32_t chunks) {
  wanted_ = chunks;
  publish_grantable();
}

std::uint32_t ledger_writer::pump() {
  std::uint32_t freed = 0;
  auto const clients = view_.clients();
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients[slot].status.load(std::memory_order_acquire) !=
        static_cast<std::uint32_t>(client_status::empty)) {
      freed += take_mail(slot);
    }
  }
  publish_grantable();  // tenants say what they need to come back, too
  if (left_ > 0 && tenant_waits()) {
    freed += release_left(left_);
  }
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (clients[slot].status.load(std::memory_order_acquire) ==
        static_cast<std::uint32_t>(client_status::live)) {
      answer_request(slot);
    }
  }
  return freed;
}

std::uint32_t ledger_writer::take_mail(std::uint32_t slot) {
  auto& control = view_.controls()[slot];
  auto const ring = view_.mail_ring(slot);
  auto read = control.mail_read.load(std::memory_order_relaxed);
  auto const written = view_.mailbox(slot).mail_written.load(std::memory_order_acquire);
  std::uint32_t freed = 0;
  if (written - read > ring.size()) {
    read = written - ring.size();  // only a damaged mailbox can say so; what it overwrote is lost
                                   // to it, not to us
  }
  for (; read != written; ++read) {
    auto const mail =
        release_mail::unpack(ring[read & (ring.size() - 1)].load(std::memory_order_relaxed));
    if (mail.chunk >= view_.header().chunk_count) {
      continue;
    }
    auto const state = view_.chunk(mail.chunk);
    if (is_tenants(state.who) && state.client == slot && state.epoch == mail.epoch) {
      make_dirty(mail.chunk);
      ++freed;
    }
  }
  control.mail_read.store(read, std::memory_order_release);
  return freed;
}

void ledger_writer::answer_request(std::uint32_t slot) {
  auto& control = view_.controls()[slot];
  auto const asked = numbered::unpack(view_.mailbox(slot).request.load(std::memory_order_acquire));
  auto const answered = numbered::unpack(control.grant.load(std::memory_order_relaxed));
  if (asked.seq == answered.seq) {
    return;
  }
  auto const given = grant(slot, asked.chunks);
  control.grant.store(numbered{asked.seq, given}.pack(), std::memory_order_release);
  ring(slot);
}

/// What can be had at once of the `request` of the client in `slot`; returns how many chunks. Who is no tenant gets none.
std::uint32_t ledger_writer::grant(std::uint32_t slot, std::uint32_t request) {
  auto const* const kind = traits_of(view_.clients()[slot]);
  if (kind == nullptr || !kind->is_tenant) {
    return 0;
  }
  bool const lasting = (request & request_lasting) != 0;
  bool const goes_first = kind->commits && (request & request_before_demands) != 0;
  bool const whole = (request & request_whole) != 0;
  auto const now_ns = monotonic_ns();
  bool const beyond_reserve = (request & request_beyond_reserve) != 0;
  auto const wish = request & ~(request_lasting | request_before_demands | request_whole |
                                request_beyond_reserve);
  bool const grows = !kind->commits && view_.mailbox(slot).short_chunks.load() > 0;
  auto const owed_ns = whole || grows ? owed_at(slot, now_ns) : std::nullopt;
  bool const is_owed = owed_ns && *owed_ns <= now_ns;
  auto const to_be_had = [&] {
    if (goes_first || is_owed) {
      return free_;
    }
    auto const chunks = whole            ? beside_owed(now_ns)
                        : beyond_reserve ? beside_parked(free_ - std::min(free_, wanted_))
                                         : beside_parked(grantable());
    return beside_needs(view_, slot, chunks, held_by(slot));
  };
  if (left_ > 0 && wish > to_be_had()) {
    release_left(wish - to_be_had());
  }
  auto const count = whole && to_be_had() < wish ? 0 : std::min(wish, to_be_had());
  auto const total = view_.header().chunk_count;
  std::uint32_t given = 0;
  for (std::uint32_t tried = 0; tried < total && given < count; ++tried) {
    auto const i = lasting ? total - 1 - tried : tried;
    auto const state = view_.chunk(i);
    if (state.is_free()) {
      set(i, kind->owns, static_cast<std::uint16_t>(slot), state.who == owner::dirty);
      ++given;
    }
  }
  if (is_owed && given > 0) {
    met_.at(slot) = owed_ns.value_or(now_ns);
  }
  if (given > 0) {
    (view_.header().*kind->granted_bytes)
        .fetch_add(given * view_.header().chunk_bytes, std::memory_order_relaxed);
    publish_grantable();
  }
  return given;
}

std::vector<std::uint32_t> ledger_writer::take(std::uint32_t count, std::uint16_t slot) {
  auto taken =
      choose_chunks_to_take(view_.header().chunk_count, count,
                            [this](std::uint32_t chunk) { return view_.chunk(chunk).is_free(); });
  for (auto const chunk : taken) {
    set(chunk, owner::serving, slot, false);
  }
  publish_grantable();
  return taken;
}

bool ledger_writer::take_these(std::span<std::uint32_t const> chunks, std::uint16_t slot) {
  if (!std::all_of(chunks.begin(), chunks.end(), [&](std::uint32_t chunk) {
        return chunk < view_.header().chunk_count && view_.chunk(chunk).is_free();
      })) {
    return false;
  }
  for (auto const chunk : chunks) {
    set(chunk, owner::serving, slot, false);
  }
  publish_grantable();
  return true;
}

void ledger_writer::give_back(std::span<std::uint32_t const> chunks) {
  for (auto const chunk : chunks) {
    if (chunk < view_.header().chunk_count && view_.chunk(chunk).who == owner::serving) {
      make_dirty(chunk);
    }
  }
  publish_grantable();
}

std::uint32_t ledger_writer::leave(std::span<std::uint32_t const> chunks, std::uint16_t slot) {
  std::uint32_t left = 0;
  for (auto const chunk : chunks) {
    auto const state = view_.chunk(chunk);
    if (state.who == owner::serving && state.client == slot) {
      change_hands(chunk, left_slot);
      ++left;
    }
  }
  return left;
}

void ledger_writer::claim(std::span<std::uint32_t const> chunks, std::uint16_t slot) {
  for (auto const chunk : chunks) {
    if (is_left(view_.chunk(chunk))) {
      change_hands(chunk, slot);
    }
  }
}

std::uint32_t ledger_writer::release_left(std::uint32_t count) {
  std::uint32_t freed = 0;
  for (std::uint32_t i = 0; i < view_.header().chunk_count && freed < count; ++i) {
    if (is_left(view_.chunk(i))) {
      make_dirty(i);
      ++freed;
    }
  }
  publish_grantable();
  return freed;
}

bool ledger_writer::tenant_waits() const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (view_.clients()[slot].status.load(std::memory_order_acquire) ==
            static_cast<std::uint32_t>(client_status::live) &&
        view_.mailbox(slot).waiting.load(std::memory_order_acquire) != 0) {
      return true;
    }
  }
  return false;
}

std::uint32_t ledger_writer::demand(std::uint32_t slot, std::uint32_t count, bool may_park) {
  auto& word = view_.controls()[slot].demand;
  auto const last = numbered::unpack(word.load(std::memory_order_relaxed));
  numbered const next{last.seq + 1, count | (count > 0 && !may_park ? demand_without_parking : 0U)};
  word.store(next.pack(), std::memory_order_release);
  ring(slot);
  return next.seq;
}

void ledger_writer::report_refused(std::uint32_t slot, std::uint32_t count) {
  auto& most = view_.controls()[slot].refused;
  most.store(std::max(most.load(std::memory_order_relaxed), count), std::memory_order_relaxed);
}

std::uint32_t ledger_writer::reclaim(std::uint32_t slot) {
  std::uint32_t freed = 0;
  for (std::uint32_t i = 0; i < view_.header().chunk_count; ++i) {
    auto const state = view_.chunk(i);
    if (!state.is_free() && state.client == slot) {
      make_dirty(i);
      ++freed;
    }
  }
  auto& mailbox = view_.mailbox(slot);
  auto& control = view_.controls()[slot];
  control.mail_read.store(mailbox.mail_written.load(std::memory_order_acquire),
                          std::memory_order_release);
  control.grant.store(numbered{numbered::unpack(mailbox.request.load()).seq, 0}.pack());
  control.refused.store(0, std::memory_order_relaxed);
  met_.at(slot) = 0;
  bells_.at(slot).reset();
  demand(slot, 0);  // else the slot's next owner would answer it
  publish_grantable();
  return freed;
}

void ledger_writer::set(std::uint32_t chunk, owner who, std::uint16_t client, bool needs_scrub) {
  put(chunk, {who, needs_scrub, client, view_.chunk(chunk).epoch + 1});
}

void ledger_writer::put(std::uint32_t chunk, chunk_state const& state) {
  constexpr auto one_less = ~std::uint32_t{0};
  count(view_.chunk(chunk), one_less);
  count(state, 1);
  view_.chunks()[chunk].store(state.pack(), std::memory_order_release);
}

/// Counts a chunk, or with `by` = −1 as it is no longer.
void ledger_writer::count(chunk_state const& state, std::uint32_t by) noexcept {
  if (auto const at = static_cast<std::size_t>(state.who); at < by_owner_.size()) {
    by_owner_[at] += by;
  }
  if (state.is_free()) {
    free_ += by;
    return;
  }
  left_ += is_left(state) ? by : 0;
  if (state.client < max_clients) {
    held_[state.client] += by;
  }
}

/// The epoch says since when the chunk has had its contents, and stays.
void ledger_writer::change_hands(std::uint32_t chunk, std::uint16_t client) {
  auto state = view_.chunk(chunk);
  state.client = client;
  put(chunk, state);
}

void ledger_writer::make_dirty(std::uint32_t chunk) {
  set(chunk, owner::dirty, 0, false);
}

/// When what the tenant in `slot` has parked is owed to it, if it is. One that does not look for it, since it is stopped, say,
/// keeps nobody waiting.
std::optional<std::int64_t> ledger_writer::owed_at(std::uint32_t slot, std::int64_t now_ns) const {
  auto const& mailbox = view_.mailbox(slot);
  auto const at_ns = mailbox.owed_ns.load(std::memory_order_acquire);
  if (at_ns == 0 || at_ns == met_.at(slot) || lacking(mailbox) == 0 ||
      now_ns - mailbox.looked_ns.load() > longest_unlooked_ns ||
      !has_status(view_.clients()[slot], client_status::live)) {
    return std::nullopt;
  }
  return at_ns;
}

std::uint32_t ledger_writer::missing_for(std::uint32_t slot) const {
  auto const needed = needed_by(view_, slot);
  return needed -
         std::min(needed, beside_needs(view_, slot, beside_parked(grantable()), held_by(slot)));
}

std::uint32_t ledger_writer::owed_to(std::uint32_t slot) const {
  auto const now_ns = monotonic_ns();
  auto const at_ns = owed_at(slot, now_ns);
  return at_ns && *at_ns <= now_ns
             ? std::min(view_.header().chunk_count, lacking(view_.mailbox(slot)))
             : 0;
}

/// Chunks that tenants are owed by then.
std::uint32_t ledger_writer::owed_by(std::int64_t at_ns, std::int64_t now_ns) const {
  auto const most = view_.header().chunk_count;
  std::uint32_t chunks = 0;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (auto const owed_ns = owed_at(slot, now_ns); owed_ns && *owed_ns <= at_ns) {
      chunks += std::min(most - chunks, lacking(view_.mailbox(slot)));
    }
  }
  return chunks;
}

std::uint32_t ledger_writer::available_chunks() const {
  auto const now_ns = monotonic_ns();
  return free_ - std::min(free_, owed_by(now_ns, now_ns));
}

std::optional<ledger_writer::owed> ledger_writer::next_owed() const {
  auto const now_ns = monotonic_ns();
  std::optional<owed> first;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const at_ns = owed_at(slot, now_ns);
    if (!at_ns || (first && first->at_ns <= *at_ns)) {
      continue;
    }
    auto const chunks = owed_by(std::max(*at_ns, now_ns), now_ns);
    if (chunks > free_) {
      first = owed{slot, *at_ns, chunks - free_};
    }
  }
  return first;
}

/// What a tenant may have to come back before it is owed that.
std::uint32_t ledger_writer::beside_owed(std::int64_t now_ns) const {
  auto const chunks = grantable();
  return chunks - std::min(chunks, owed_by(now_ns, now_ns));
}

std::uint32_t ledger_writer::grantable() const noexcept {
  auto const unreserved = free_ - std::min(free_, reserve_);
  return unreserved - std::min(unreserved, wanted_);
}

/// What of so many is not owed to tenants that are parked. Who is held by an operator comes back to what there is then.
std::uint32_t ledger_writer::beside_parked(std::uint32_t chunks) const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const& entry = view_.clients()[slot];
    if (has_status(entry, client_status::live) && !is_held(entry)) {
      chunks -= std::min(chunks, lacking(view_.mailbox(slot)));
    }
  }
  return chunks;
}

void ledger_writer::publish_grantable() {
  auto const to_parked = grantable();
  auto const now = beside_parked(to_parked);
  auto const before_to_parked =
      view_.header().grantable_to_parked.exchange(to_parked, std::memory_order_seq_cst);
  // Who waits is read after this is written, in the order that client_mailbox.cpp needs.
  auto const before = view_.header().grantable.exchange(now, std::memory_order_seq_cst);
  if (now > before || to_parked > before_to_parked) {
    for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
      if (bells_.at(slot) && view_.mailbox(slot).waiting.load(std::memory_order_seq_cst) != 0) {
        ring(slot);
      }
    }
  }
}

void ledger_writer::ring(std::uint32_t slot) {
  if (bells_.at(slot)) {
    // The only failure is a counter at its maximum, and then the client is being woken anyway.
    (void)::eventfd_write(bells_.at(slot).get(), 1);
  }
}

}  // namespace sluice::memhandover
