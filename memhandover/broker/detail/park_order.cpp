#include "memhandover/broker/detail/park_order.hpp"

#include <chrono>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/shared_text.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/broker/conversation.hpp"
#include "memhandover/ledger/client_entries.hpp"

namespace sluice::memhandover::detail {
namespace {

constexpr std::int64_t ns_of_ms = 1'000'000;

/// As an operator knows it.
std::string name_of(client_entry const& entry) {
  return readable_text(text_of(entry.name)) + " (pid " + std::to_string(entry.pid.load()) + ")";
}

std::uint32_t slot_of_job(ledger_view const& view, nlohmann::json const& question) {
  auto const slot = field(question, "slot", max_clients);
  auto const pid = field(question, "pid", std::uint32_t{0});
  auto const* const kind = slot < max_clients ? traits_of_live(view.clients()[slot]) : nullptr;
  if (kind == nullptr || view.clients()[slot].pid.load() != pid) {
    throw error{error_kind::not_found, "the pool of " + memhandover::name_of(view.shape()) +
                                           " has no live job with the pid " + std::to_string(pid) +
                                           " any more"};
  }
  if (!kind->is_tenant) {
    throw error{error_kind::unsupported, name_of(view.clients()[slot]) + " is " + kind->name +
                                             "; only training jobs and engines are parked"};
  }
  return slot;
}

/// Nothing where it may be.
std::string why_not(unparkable why) {
  switch (why) {
    case unparkable::none:
      return {};
    case unparkable::never:
      return "it was started so (`sluice run --park never`, SLUICE_PARK)";
    case unparkable::communicators:
      return "it has a communicator of NCCL whose ranks do not agree where they pause, so that "
             "their devices wait for it";
    case unparkable::no_host_copies:
      return "the broker keeps no host copies for it; whoever starts the broker says how much "
             "(`sluice run --host-memory`, host_copies.memory of the policy)";
    case unparkable::pinning:
      return "it is still pinning the host copies; try again in a moment";
    case unparkable::refused:
      return "its driver has refused to pin the host copies, or the system what parking on the "
             "host needs; the job's log says why";
  }
  return "it says so, without a reason that is known";
}

/// What host copies, or those on disk, have free.
std::string room_in(nlohmann::json const& copies, std::string const& what) {
  auto const of = [&copies](char const* name) {
    return copies.is_object() ? copies.value(name, std::uint64_t{0}) : 0;
  };
  return format_bytes(of("bytes")) + " of " + what + ' ' +
         format_bytes(of("free_bytes") + of("kept_bytes")) + " are free";
}

std::string remedy_for(int disk_fault) {
  return disk_fault == 0
             ? "More of them would help (`sluice run --host-memory`, host_copies.memory of the "
               "policy; `--host-disk`, host_copies.disk)"
             : "It could not write to that disk, and uses it no more: " + reason_of(disk_fault);
}

void refuse_what_cannot_go(ledger_view const& view, std::uint32_t slot,
                           nlohmann::json const& copies) {
  auto const& entry = view.clients()[slot];
  auto const& mailbox = view.mailbox(slot);
  auto const why = unparkable{mailbox.why_unparkable.load()};
  if (auto const text = why_not(why); !text.empty()) {
    throw error{why == unparkable::pinning ? error_kind::unavailable : error_kind::unsupported,
                name_of(entry) + " cannot be parked: " + text};
  }
  auto const kept = mailbox.kept_chunks.load();
  bool const is_copied = mailbox.elastic.load() == 0;
  if (is_copied && kept > 0 && mailbox.parkable_chunks.load() == 0) {
    auto const disk = copies.is_object() ? copies.value("disk", nlohmann::json{}) : copies;
    throw error{error_kind::out_of_memory,
                name_of(entry) + " keeps " + format_bytes(kept * view.shape().chunk_bytes) +
                    ", and of the " + room_in(copies, "host copies") +
                    (disk.is_object() ? ", of the " + room_in(disk, "them on disk") : "") +
                    "; nothing was taken. " + remedy_for(mailbox.disk_fault.load())};
  }
}

/// Of several ranks: the others would give it up.
void refuse_for_too_long(ledger_view const& view, std::uint32_t slot, std::int64_t for_ms) {
  auto const longest_ms = view.mailbox(slot).longest_absence_ns.load() / ns_of_ms;
  if (longest_ms > 0 && (for_ms <= 0 || for_ms > longest_ms)) {
    auto const seconds = std::to_string(std::max<std::int64_t>(1, longest_ms / 1000));
    throw error{error_kind::invalid_argument,
                name_of(view.clients()[slot]) +
                    " is one of several ranks, which wait for it in collectives; it can be parked "
                    "for " +
                    seconds + " s at most: add `--for " + seconds + "s`"};
  }
}

/// For how much longer an order stands, in words.
std::string rest_of(std::uint64_t until_ns) {
  if (until_ns == until_woken) {
    return "until it is woken";
  }
  auto const left = std::chrono::nanoseconds{static_cast<std::int64_t>(until_ns) - monotonic_ns()};
  return "for another " + std::to_string(std::chrono::ceil<std::chrono::seconds>(left).count()) +
         " s";
}

}  // namespace

std::uint32_t order_park(ledger_view const& view, nlohmann::json const& question,
                         nlohmann::json const& copies) {
  auto const slot = slot_of_job(view, question);
  auto& entry = view.clients()[slot];
  if (is_held(entry)) {
    throw error{error_kind::already_exists,
                name_of(entry) + " is parked already, " + rest_of(entry.held_until_ns.load()) +
                    "; `sluice wake " + std::to_string(entry.pid.load()) + "` lets it come back"};
  }
  refuse_what_cannot_go(view, slot, copies);
  auto const for_ms = field(question, "for_ms", std::int64_t{0});
  refuse_for_too_long(view, slot, for_ms);
  entry.held_until_ns.store(
      for_ms <= 0 ? until_woken : static_cast<std::uint64_t>(monotonic_ns() + for_ms * ns_of_ms));
  return slot;
}

std::uint32_t order_wake(ledger_view const& view, nlohmann::json const& question) {
  auto const slot = slot_of_job(view, question);
  auto& entry = view.clients()[slot];
  if (!is_held(entry) && view.mailbox(slot).parked_chunks.load() == 0) {
    throw error{error_kind::not_found, name_of(entry) + " is not parked"};
  }
  entry.held_until_ns.store(static_cast<std::uint64_t>(monotonic_ns()));
  return slot;
}

void mark_use(ledger_view const& view, nlohmann::json const& question) {
  auto& entry = view.clients()[slot_of_job(view, question)];
  if (traits_of(entry)->kind != client_kind::engine) {
    throw error{error_kind::unsupported, name_of(entry) + " is no engine; only those rest"};
  }
  entry.in_use.store(field(question, "in_use", false) ? 1 : 0);
}

}  // namespace sluice::memhandover::detail
