#include "memhandover/client/detail/acquisition.hpp"

#include <sched.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <thread>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/processes.hpp"
#include "memhandover/base/shared_text.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/ledger/chunk_choice.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/job_needs.hpp"
#include "memhandover/ledger/promised_chunks.hpp"

namespace sluice::memhandover::detail {
namespace {

using std::chrono::nanoseconds;
using std::chrono::steady_clock;

/// What a damaged mailbox may say of it at most.
constexpr std::chrono::milliseconds longest_stay{3'600'000};
/// Of what is refused while a job comes back.
constexpr std::chrono::milliseconds shortest_stay{1};

/// Waits a moment for one of the words to become `value` without going to sleep: waking up would cost more than
/// the answer usually takes.
void await_awake(std::initializer_list<std::atomic<std::uint32_t> const*> words,
                 std::uint32_t value, steady_clock::time_point deadline) {
  constexpr std::chrono::milliseconds patience{20};
  auto const until = std::min(deadline, steady_clock::now() + patience);
  auto const has_come = [value](std::atomic<std::uint32_t> const* word) {
    return word->load(std::memory_order_acquire) == value;
  };
  while (std::none_of(words.begin(), words.end(), has_come) && steady_clock::now() < until) {
    ::sched_yield();
  }
}

/// Whether a thread may stay awake for an answer. On the host training computes on every processor,
/// and on a small machine there is none to spare: who sleeps is then served first.
bool may_stay_awake(backend_kind backend) {
  constexpr unsigned enough_processors = 4;
  return backend == backend_kind::cuda && std::thread::hardware_concurrency() >= enough_processors;
}

/// Until then, at most `longest_stay`.
std::chrono::milliseconds time_left(std::int64_t until_ns, std::int64_t now_ns) {
  auto const most = nanoseconds{longest_stay}.count();
  auto const left = until_ns > now_ns + most ? most : until_ns - now_ns;
  return std::chrono::ceil<std::chrono::milliseconds>(nanoseconds{left});
}

nanoseconds time_between(std::int64_t begin_ns, std::int64_t end_ns) {
  return nanoseconds{std::max<std::int64_t>(0, end_ns - begin_ns)};
}

}  // namespace

acquisition::acquisition(parts const& of)
    : of_(of), stays_awake_(may_stay_awake(of.view.shape().backend)) {}

std::vector<std::uint32_t> acquisition::obtain(std::uint64_t bytes, urgency const& how,
                                               handover_report& report,
                                               foresight const& meanwhile) {
  auto const shape = of_.view.shape();
  auto const count = static_cast<std::uint32_t>(
      (std::max<std::uint64_t>(bytes, 1) + shape.chunk_bytes - 1) / shape.chunk_bytes);
  if (count > shape.chunk_count) {
    throw error{error_kind::out_of_memory,
                format_bytes(bytes) + " are wanted but the whole pool has " +
                    format_bytes(shape.bytes()) + "; make pool.memory larger"};
  }
  std::vector<std::uint32_t> foreseen;
  auto const missing = [this, count] {
    return count - std::min(count, of_.writer->available_chunks());
  };
  wish const wanted{count, how, meanwhile, foreseen, missing, !how.is_spare};
  report.bytes = count * shape.chunk_bytes;

  // Before the mutex, which it needs, so that it goes after that.
  std::stop_callback const wakes{how.called_off, waker()};
  std::unique_lock lock{of_.mutex};
  auto& writer = *of_.writer;
  writer.pump();
  // While this is set, nothing that comes free is granted to tenants.
  writer.set_wanted(count);
  auto const unset = [](ledger_writer* of) { of->set_wanted(0); };
  std::unique_ptr<ledger_writer, decltype(unset)> const at_end{&writer, unset};
  if (writer.available_chunks() < count) {
    writer.release_left(count - writer.available_chunks());
  }
  if (how.is_spare) {
    refuse_spare(count);
  } else if (writer.available_chunks() < count) {
    refuse_hopeless(count);
  }
  if (writer.available_chunks() < count) {
    refuse_again(count);
  }
  spent asked;
  while (writer.available_chunks() < count) {
    refuse_while_owed(count);
    auto const next = next_to_ask(asked, missing(), how.is_spare);
    if (!next && how.is_spare) {
      throw error{error_kind::out_of_memory,
                  format_bytes(bytes) + " are wanted but only " +
                      format_bytes(writer.available_chunks() * shape.chunk_bytes) +
                      " have been given; " + holders()};
    }
    if (!next && dying_hold()) {
      // Their memory comes free when the last of their processes has ended.
      (void)of_.mail.wait_until(lock, how.deadline, [&] {
        return writer.available_chunks() >= count || !dying_hold() ||
               next_to_ask(asked, missing()).has_value();
      });
      if (writer.available_chunks() >= count || steady_clock::now() < how.deadline) {
        continue;
      }
    }
    if (!next) {
      note_futile(count, report);
      refuse_until_parkable(count);  // one may have come back meanwhile
      throw error{error_kind::out_of_memory,
                  format_bytes(bytes) + " are wanted but only " +
                      format_bytes(writer.free_chunks() * shape.chunk_bytes) + " can be had; " +
                      holders() + minimums() + disks_that_failed()};
    }
    auto const before = writer.free_chunks();
    demand_from(*next, wanted, lock, report);
    if (writer.free_chunks() <= before) {
      asked.note(*next);
    }
  }
  futile_ = {};
  auto const slot = static_cast<std::uint16_t>(of_.slot);
  if (foreseen.size() == count && writer.take_these(foreseen, slot)) {
    return foreseen;
  }
  return writer.take(count, slot);
}

void acquisition::gather_owed(steady_clock::time_point deadline, handover_report& report) {
  std::vector<std::uint32_t> foreseen;
  foresight const none;
  auto const missing = [this] {
    auto const next = of_.writer->next_owed();
    return next && next->at_ns <= monotonic_ns() ? next->missing : 0;
  };
  urgency const how{deadline};
  wish const wanted{0, how, none, foreseen, missing, false};
  std::unique_lock lock{of_.mutex};
  auto& writer = *of_.writer;
  writer.pump();
  // With what the server has itself, which it may release.
  if (reachable() + writer.held_by(of_.slot) < writer.free_chunks() + missing()) {
    return;  // nothing is taken from anybody for what cannot be had
  }
  spent asked;
  while (missing() > 0 && steady_clock::now() < deadline) {
    auto skipped = asked;
    skipped.add(not_to_ask_for_owed());
    auto const next = next_to_ask(skipped, missing());
    if (!next) {
      return;
    }
    auto const before = missing();
    demand_from(*next, wanted, lock, report);
    if (missing() >= before) {
      asked.note(*next);
    }
  }
}

/// Who is owed something itself, and jobs while a job is.
std::vector<std::uint32_t> acquisition::not_to_ask_for_owed() const {
  std::vector<std::uint32_t> slots;
  bool job_is_owed = false;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (of_.writer->owed_to(slot) > 0) {
      slots.push_back(slot);
      auto const* const kind = traits_of_live(of_.view.clients()[slot]);
      job_is_owed = job_is_owed || (kind != nullptr && kind->turn == turn_in_handovers::first);
    }
  }
  for (std::uint32_t slot = 0; job_is_owed && slot < max_clients; ++slot) {
    if (turn_of(slot) == turn_in_handovers::first) {
      slots.push_back(slot);
    }
  }
  return slots;
}

/// For who waits for mail, when a call is called off.
std::function<void()> acquisition::waker() const {
  return [this] {
    { std::lock_guard const held{of_.mutex}; }
    of_.mail.notify_all();
  };
}

bool acquisition::is_needed() const {
  auto const of = first_in_need(of_.view);
  auto const missing = of ? of_.writer->missing_for(*of) : 0;
  if (missing == 0) {
    return false;
  }
  auto const skipped = not_below(*of);
  std::uint32_t most = 0;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    most += std::find(skipped.begin(), skipped.end(), slot) == skipped.end() ? spare_of(slot) : 0;
  }
  return most >= missing;  // nothing is taken from anybody for what cannot be had
}

bool acquisition::gather_needed(urgency const& how, handover_report& report) {
  std::vector<std::uint32_t> foreseen;
  foresight const none;
  std::stop_callback const wakes{how.called_off, waker()};  // before the mutex, as above
  std::unique_lock lock{of_.mutex};
  of_.writer->pump();
  if (!is_needed()) {
    return false;
  }
  auto const needing = first_in_need(of_.view);
  auto const missing = [&] { return needing ? of_.writer->missing_for(*needing) : 0; };
  wish const wanted{0, how, none, foreseen, missing, false};
  spent asked;
  asked.add(not_below(needing.value_or(of_.slot)));
  while (missing() > 0 && steady_clock::now() < how.deadline) {
    auto const next = next_to_ask(asked, missing(), true);
    if (!next) {
      return false;
    }
    auto const before = missing();
    demand_from(*next, wanted, lock, report);
    if (missing() >= before) {
      asked.add({next->slot});
    }
  }
  return missing() == 0;
}

/// All but jobs of lower priority than the one in need.
std::vector<std::uint32_t> acquisition::not_below(std::uint32_t needing) const {
  std::vector<std::uint32_t> slots;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (turn_of(slot) != turn_in_handovers::first ||
        standing_in(slot).rank >= standing_in(needing).rank) {
      slots.push_back(slot);
    }
  }
  return slots;
}

/// Chunks that are free, or that clients do not keep.
std::uint32_t acquisition::reachable() const {
  auto const& writer = *of_.writer;
  auto chunks = writer.free_chunks();
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    chunks += slot == of_.slot ? 0 : writer.held_by(slot) - kept_by(slot);
  }
  return chunks;
}

/// What is free, and what jobs can give without being parked, is too little; or others are to have it.
void acquisition::refuse_spare(std::uint32_t count) const {
  auto const chunk_bytes = of_.view.shape().chunk_bytes;
  auto most = of_.writer->available_chunks();
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    most += spare_of(slot);
  }
  if (of_.writer->next_owed()) {
    throw error{error_kind::out_of_memory, "what is free is owed to somebody who is parked"};
  }
  if (most < count) {
    throw error{error_kind::out_of_memory, format_bytes(count * chunk_bytes) + " are wanted, and " +
                                               format_bytes(most * chunk_bytes) +
                                               " can be had without parking anybody; " + holders() +
                                               minimums()};
  }
}

bool acquisition::is_called_off(urgency const& how) const {
  return how.is_spare && (how.called_off.stop_requested() || of_.waiting > 0);
}

/// Nothing is taken from anybody for what can never be had while clients keep what they keep. They are told.
void acquisition::refuse_hopeless(std::uint32_t count) {
  auto const shape = of_.view.shape();
  auto& writer = *of_.writer;
  auto const most = reachable();
  if (most >= count || kept_for_good() == 0) {
    return;
  }
  refuse_until_parkable(count);
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (kept_by(slot) > 0) {
      writer.report_refused(slot, count);
    }
  }
  throw error{
      error_kind::out_of_memory,
      format_bytes(count * shape.chunk_bytes) + " are wanted, and at most " +
          format_bytes(most * shape.chunk_bytes) + " of the pool's " + format_bytes(shape.bytes()) +
          " can be had beside what training keeps outside of its micro-batches, and what engines "
          "keep: " +
          who("keeps", [this](std::uint32_t slot) { return kept_by(slot); }) + minimums() +
          "; nothing was taken from training for it. A larger pool (pool.memory) would help" +
          (of_.view.header().park_stay.load() > 0
               ? ", or host copies (host_copies.memory, host_copies.disk) for more of what is "
                 "kept: " +
                     room_for_copies() + disks_that_failed()
               : "")};
}

/// In host copies, in memory and on disk.
std::string acquisition::room_for_copies() const {
  if (of_.copies == nullptr) {
    return "there are none";
  }
  auto const shape = of_.copies->shape();
  auto const text = [&](copy_place where, std::uint64_t all) {
    auto const counted = of_.copies->copies().count(where);
    return format_bytes((counted.free + counted.kept) * shape.slot_bytes) + " of " +
           format_bytes(all);
  };
  return "of those, " + text(copy_place::memory, shape.bytes()) + " in memory and " +
         text(copy_place::disk, shape.disk_bytes()) + " on disk are free";
}

/// Of jobs that have stopped to use it.
std::string acquisition::disks_that_failed() const {
  std::string text;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const fault = of_.view.mailbox(slot).disk_fault.load();
    if (fault != 0 && has_status(of_.view.clients()[slot], client_status::live)) {
      text += "; " + name_of_client(slot) +
              " could not write to that disk, and uses it no more: " + reason_of(fault);
    }
  }
  return text;
}

/// Tenants that have just come back stay for a while; what they could be parked for then is a matter of time.
void acquisition::refuse_until_parkable(std::uint32_t count) const {
  auto const now_ns = monotonic_ns();
  auto const bytes = [this](std::uint32_t chunks) {
    return format_bytes(chunks * of_.view.shape().chunk_bytes);
  };
  auto to_be_had = reachable();
  auto const missing = count - std::min(count, to_be_had);
  std::string jobs;
  std::int64_t until_ns = now_ns;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const& mailbox = of_.view.mailbox(slot);
    auto const stays_until_ns = mailbox.stays_until_ns.load();
    auto const parkable = giveable_by(slot, true).all() - giveable_by(slot).all();
    if (parkable > 0 && stays_until_ns > now_ns) {
      to_be_had += parkable;
      until_ns = std::max(until_ns, stays_until_ns);
      jobs += (jobs.empty() ? "" : ", ") + name_of_client(slot) + " could give " + bytes(parkable) +
              ", and stays for another " +
              std::to_string(time_left(stays_until_ns, now_ns).count()) + " ms";
    }
  }
  if (until_ns == now_ns || to_be_had < count) {
    return;
  }
  throw error{error_kind::out_of_memory,
              bytes(count) + " are wanted, of which " + bytes(missing) +
                  " are missing, for which jobs would have to be parked that have come back a "
                  "moment ago: " +
                  jobs,
              time_left(until_ns, now_ns)};
}

/// What is free is a job's that comes back now, and what it has then it keeps for its stay. While one waits nobody else is asked
/// to give anything.
void acquisition::refuse_while_owed(std::uint32_t count) const {
  auto const& writer = *of_.writer;
  auto const available = writer.available_chunks();
  std::string jobs;
  std::chrono::milliseconds stay{0};
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (auto const chunks = writer.owed_to(slot); chunks > 0) {
      jobs += (jobs.empty() ? "" : ", ") + name_of_client(slot) + " is to have " +
              format_bytes(chunks * of_.view.shape().chunk_bytes) + " back";
      stay = std::max(stay, stay_of(slot));
    }
  }
  if (jobs.empty() || available >= count) {
    return;
  }
  auto const missing = count - available;
  throw error{error_kind::out_of_memory,
              format_bytes(count * of_.view.shape().chunk_bytes) + " are wanted, of which " +
                  format_bytes(missing * of_.view.shape().chunk_bytes) +
                  " are missing; what is free beyond that is owed to jobs that are parked: " +
                  jobs + ", and stays then for about " + std::to_string(stay.count()) + " ms",
              std::max(stay, shortest_stay)};
}

std::chrono::milliseconds acquisition::stay_of(std::uint32_t slot) const {
  auto const& mailbox = of_.view.mailbox(slot);
  auto const parks = std::max<std::uint64_t>(1, mailbox.parks.load());
  auto const swap = (mailbox.park_ns.load() + mailbox.unpark_ns.load()) / parks;
  auto const longest_swap = static_cast<std::uint64_t>(nanoseconds{longest_stay}.count());
  auto const ns = std::min(swap, longest_swap) *
                  std::uint64_t{of_.view.header().park_stay.load(std::memory_order_relaxed)};
  return std::min(std::chrono::ceil<std::chrono::milliseconds>(
                      nanoseconds{static_cast<std::int64_t>(std::min(ns, longest_swap))}),
                  longest_stay);
}

void acquisition::refuse_again(std::uint32_t count) const {
  auto const left = futile_.until - steady_clock::now();
  if (futile_.chunks == 0 || count < futile_.chunks || left <= nanoseconds::zero()) {
    return;
  }
  throw error{error_kind::out_of_memory,
              format_bytes(count * of_.view.shape().chunk_bytes) +
                  " are wanted; as much was demanded from training in vain a moment ago, at the "
                  "cost of its "
                  "micro-batches, and will be again in " +
                  std::to_string(std::chrono::ceil<std::chrono::milliseconds>(left).count()) +
                  " ms; " + holders(),
              std::chrono::ceil<std::chrono::milliseconds>(left)};
}

void acquisition::note_futile(std::uint32_t count, handover_report const& report) {
  constexpr std::chrono::milliseconds first{1000};
  constexpr std::chrono::milliseconds longest{60'000};
  if (report.bytes_live > 0) {
    auto const pause = futile_.chunks == 0 ? first : std::min(2 * futile_.pause, longest);
    auto const least = futile_.chunks == 0 ? count : std::min(count, futile_.chunks);
    futile_ = {least, steady_clock::now() + pause, pause};
  }
}

/// Demands what is missing, and waits for the answer.
void acquisition::demand_from(next_asked const& next, wish const& wanted,
                              std::unique_lock<std::mutex>& lock, handover_report& report) {
  auto const slot = next.slot;
  auto const shape = of_.view.shape();
  auto& writer = *of_.writer;
  auto const missing = wanted.missing();
  auto const held = writer.held_by(slot);
  bool const is_last = next.chunks == missing;
  auto const refill = wanted.refills && is_last && turn_of(slot) == turn_in_handovers::first
                          ? std::min(of_.reserve, shape.chunk_count - wanted.chunks)
                          : 0;
  auto const demanded = std::min(next.chunks + refill, most_demanded_of(slot));
  auto const since_ns = monotonic_ns();
  if (is_called_off(wanted.how)) {
    throw error{error_kind::cancelled, "others want memory now"};
  }
  bool const may_park = next.may_park && !wanted.how.is_spare;
  auto const number = writer.demand(slot, demanded, may_park);
  auto const& mailbox = of_.view.mailbox(slot);
  auto const& entry = of_.view.clients()[slot];
  auto enough = [&] { return wanted.missing() == 0; };
  bool const says_which = may_park && has_to_park(slot, demanded);
  lock.unlock();
  if (wanted.meanwhile) {
    if (stays_awake_ && says_which) {
      await_awake({&mailbox.demand_chosen, &mailbox.demand_done}, number, wanted.how.deadline);
    }
    wanted.foreseen = foresee(slot, number, demanded, wanted.chunks);
    wanted.meanwhile(wanted.foreseen);
  }
  if (stays_awake_) {
    await_awake({&mailbox.demand_done}, number, wanted.how.deadline);
  }
  lock.lock();
  // A dying client's memory comes free through the broker; the deadline covers that as well.
  bool const in_time = of_.mail.wait_until(lock, wanted.how.deadline, [&] {
    writer.pump();
    return mailbox.demand_done.load(std::memory_order_acquire) == number ||
           !has_status(entry, client_status::live) || enough() || is_called_off(wanted.how);
  });
  if (!enough() && is_called_off(wanted.how)) {
    writer.demand(slot, 0);
    throw error{error_kind::cancelled, "others want memory now; the demand has been withdrawn"};
  }
  if (!in_time) {
    writer.demand(slot, 0);
    bool const stopped = is_stopped(process_of(entry));
    throw error{error_kind::deadline_exceeded,
                std::string{name_of_kind(entry.kind.load())} + " (pid " +
                    std::to_string(entry.pid.load()) + ")" +
                    (stopped ? " is stopped (SIGSTOP, or a debugger) and" : "") + " did not give " +
                    format_bytes(missing * shape.chunk_bytes) +
                    " back in time; the demand has been withdrawn" +
                    (stopped ? ", and what it has not given stays its own; `kill -CONT " +
                                   std::to_string(entry.pid.load()) + "` lets it go on"
                             : "")};
  }
  bool const answered = mailbox.demand_done.load() == number;
  if (answered) {
    writer.pump();  // the releases were posted before the answer
    add_phases(slot, since_ns, report);
  } else if (!enough()) {
    of_.mail.wait_until(lock, wanted.how.deadline, [&] {
      return writer.held_by(slot) == 0 || enough() || is_called_off(wanted.how);
    });
  }
  add_parking(slot, since_ns, answered, report);
  // What it gave beyond that is the reserve's.
  auto const given = std::min(missing, held - std::min(held, writer.held_by(slot)));
  report.bytes_reclaimed += given * shape.chunk_bytes;
  if (answered) {
    report.bytes_live += std::min(given, mailbox.live_chunks.load()) * shape.chunk_bytes;
  }
}

/// Whether the client in `slot` could meet such a demand by parking alone. What it parks goes by what it has copies of already, which it
/// alone knows: it says which chunks these are long before it has given them.
bool acquisition::has_to_park(std::uint32_t slot, std::uint32_t demanded) const {
  auto const has = giveable_by(slot);
  return demanded > has.at_once && has.parked > 0;
}

/// The chunks that there will be for the server if the client in `slot` gives what it has promised; before it has, if it chooses the
/// `demanded` ones among all that it has, as it would if it could give each of them.
std::vector<std::uint32_t> acquisition::foresee(std::uint32_t slot, std::uint32_t number,
                                                std::uint32_t demanded,
                                                std::uint32_t wanted) const {
  auto const total = of_.view.shape().chunk_count;
  std::vector<bool> free(total);
  std::vector<std::uint32_t> own;
  for (std::uint32_t i = 0; i < total; ++i) {
    auto const state = of_.view.chunk(i);
    free[i] = state.is_free();
    if (!state.is_free() && state.client == slot) {
      own.push_back(i);
    }
  }
  auto const said = promised(of_.view, slot, number);
  for (auto const chunk : said ? *said : choose_chunks_to_give(own, free, demanded)) {
    free[chunk] = true;
  }
  return choose_chunks_to_take(total, wanted, [&](std::uint32_t chunk) { return free[chunk]; });
}

/// What the client says of the demand that it has just answered.
void acquisition::add_phases(std::uint32_t slot, std::int64_t start_ns,
                             handover_report& report) const {
  auto const& mailbox = of_.view.mailbox(slot);
  auto const awake = mailbox.awake_ns.load();
  auto const closed = mailbox.closed_ns.load();
  auto const idle = mailbox.idle_ns.load();
  auto const released = mailbox.released_ns.load();
  report.unit += time_between(start_ns, mailbox.unit_ended_ns.load());
  report.notify += time_between(start_ns, awake);
  report.gate += time_between(awake, closed);
  report.drain += time_between(closed, idle);
  report.revoke += time_between(idle, released);
  report.ledger += time_between(released, monotonic_ns());
}

/// What has been parked of the client since then. Chunks come one by one, often enough of them before the answer.
void acquisition::add_parking(std::uint32_t slot, std::int64_t start_ns, bool answered,
                              handover_report& report) const {
  auto const& mailbox = of_.view.mailbox(slot);
  auto const idle_ns = mailbox.park_idle_ns.load(std::memory_order_acquire);
  if (idle_ns < start_ns) {
    return;
  }
  auto const began_ns = mailbox.park_began_ns.load();
  auto const closed_ns = mailbox.park_closed_ns.load();
  auto const closing = time_between(began_ns, closed_ns);
  auto const idle = time_between(closed_ns, idle_ns);
  auto const out = time_between(idle_ns, answered ? mailbox.released_ns.load() : monotonic_ns());
  report.bytes_parked += mailbox.park_chunks.load() * of_.view.shape().chunk_bytes;
  report.park_closing += closing;
  report.park_idle += idle;
  report.park_out += out;
  if (!answered) {
    report.notify += time_between(start_ns, began_ns);
    report.gate += closing;
    report.drain += idle;
    report.revoke += out;
  }
}

/// When the client in `slot` is asked, if it is.
std::optional<turn_in_handovers> acquisition::turn_of(std::uint32_t slot) const {
  auto const* const kind = traits_of_live(of_.view.clients()[slot]);
  if (kind == nullptr) {
    return std::nullopt;
  }
  switch (kind->turn) {
    case turn_in_handovers::first:
      return kind->turn;
    case turn_in_handovers::last_if_wanted:
      return of_.demands_from_engines ? std::optional{kind->turn} : std::nullopt;
    case turn_in_handovers::never:
      break;
  }
  return std::nullopt;
}

/// What another live client has that no acquisition gets: of one that is asked what it says, and its minimum; of others all. What the
/// dead have comes free.
std::uint32_t acquisition::kept_by(std::uint32_t slot) const {
  return slot == of_.slot || !has_status(of_.view.clients()[slot], client_status::live)
             ? 0
             : of_.writer->held_by(slot) - giveable_by(slot).all();
}

/// What the client in `slot` could give to a demand; also what it could be parked for later if it `stays` no longer.
giveable acquisition::giveable_by(std::uint32_t slot, bool may_stay) const {
  if (slot == of_.slot || !turn_of(slot)) {
    return {};
  }
  auto const& mailbox = of_.view.mailbox(slot);
  bool const may_be_parked = of_.view.header().park_stay.load() > 0 &&
                             (may_stay || monotonic_ns() >= mailbox.stays_until_ns.load());
  return giveable_of({.held = of_.writer->held_by(slot),
                      .kept = mailbox.kept_chunks.load(),
                      .parkable = may_be_parked ? mailbox.parkable_chunks.load() : 0,
                      .least = standing_in(slot).least_chunks});
}

job_standing acquisition::standing_in(std::uint32_t slot) const {
  return standing_of(of_.view.clients()[slot], of_.view.shape().chunk_count);
}

/// Who has no minimum may be asked for more than it has.
std::uint32_t acquisition::most_demanded_of(std::uint32_t slot) const {
  auto const least = standing_in(slot).least_chunks;
  auto const held = of_.writer->held_by(slot);
  return least == 0 ? of_.view.shape().chunk_count : held - std::min(held, least);
}

/// What the job in `slot` can give without being parked.
std::uint32_t acquisition::spare_of(std::uint32_t slot) const {
  return turn_of(slot) == turn_in_handovers::first ? giveable_by(slot).at_once : 0;
}

std::uint32_t acquisition::kept_for_good() const {
  std::uint32_t kept = 0;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    kept += kept_by(slot);
  }
  return kept;
}

/// Nothing is to be had of it any more: of that of who was not to be parked, without parking it.
void acquisition::spent::note(next_asked const& asked) {
  (asked.may_park ? of_all : at_once).push_back(asked.slot);
}

void acquisition::spent::add(std::vector<std::uint32_t> const& slots) {
  of_all.insert(of_all.end(), slots.begin(), slots.end());
}

/// Of those that have not given all that they can, whom demand_order.hpp says.
std::optional<next_asked> acquisition::next_to_ask(spent const& asked, std::uint32_t missing,
                                                   bool is_spare) const {
  auto const is_in = [](std::vector<std::uint32_t> const& slots, std::uint32_t slot) {
    return std::find(slots.begin(), slots.end(), slot) != slots.end();
  };
  std::vector<giver> givers;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const turn = turn_of(slot);
    if (!turn || is_in(asked.of_all, slot) || (is_spare && turn != turn_in_handovers::first)) {
      continue;
    }
    auto has = giveable_by(slot);
    has.at_once = is_in(asked.at_once, slot) ? 0 : has.at_once;
    has.parked = is_spare ? 0 : has.parked;
    givers.push_back(
        {.slot = slot,
         .turn = *turn,
         .rank = standing_in(slot).rank,
         .in_use = of_.view.clients()[slot].in_use.load(std::memory_order_relaxed) != 0,
         .is_copied = of_.view.mailbox(slot).elastic.load(std::memory_order_relaxed) == 0,
         .most = most_demanded_of(slot),
         .has = has});
  }
  return next_demand(givers, missing);
}

/// Whether a client that has ended still holds something.
bool acquisition::dying_hold() const {
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (has_status(of_.view.clients()[slot], client_status::gone) &&
        of_.writer->held_by(slot) > 0) {
      return true;
    }
  }
  return false;
}

/// Of jobs that have one.
std::string acquisition::minimums() const {
  auto const text = who("has a minimum of", [this](std::uint32_t slot) {
    return turn_of(slot) ? std::min(standing_in(slot).least_chunks, of_.writer->held_by(slot)) : 0;
  });
  return text.empty() ? text : "; of which no demand takes what was promised: " + text;
}

std::string acquisition::holders() const {
  auto const text = who("holds", [this](std::uint32_t slot) { return of_.writer->held_by(slot); });
  return text.empty() ? "nobody holds the rest" : text;
}

/// Clients that `chunks_of` says something of, by pid and name, each with what it `does` and how much.
template <typename Chunks>
std::string acquisition::who(char const* does, Chunks const& chunks_of) const {
  std::string text;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    if (std::uint32_t const chunks = chunks_of(slot); chunks > 0) {
      text += (text.empty() ? "" : ", ") + name_of_client(slot) + " " + does + " " +
              format_bytes(chunks * of_.view.shape().chunk_bytes);
    }
  }
  return text;
}

std::string acquisition::name_of_client(std::uint32_t slot) const {
  auto const& entry = of_.view.clients()[slot];
  return "pid " + std::to_string(entry.pid.load()) + " (" +
         (slot == of_.slot ? "this server" : readable_text(text_of(entry.name))) + ")";
}

void record_handover(ledger_header& header, handover_report const& report) {
  auto const seq = header.handovers.load() + 1;
  auto& entry = header.recent[seq % recent_handovers];
  auto ns = [](nanoseconds value) { return static_cast<std::uint64_t>(value.count()); };
  entry.seq.store(0, std::memory_order_release);
  entry.bytes.store(report.bytes_reclaimed);
  entry.notify_ns.store(ns(report.notify));
  entry.gate_ns.store(ns(report.gate));
  entry.drain_ns.store(ns(report.drain));
  entry.revoke_ns.store(ns(report.revoke));
  entry.ledger_ns.store(ns(report.ledger));
  entry.map_ns.store(ns(report.map));
  entry.total_ns.store(ns(report.total));
  entry.parked_bytes.store(report.bytes_parked);
  entry.park_closing_ns.store(ns(report.park_closing));
  entry.park_idle_ns.store(ns(report.park_idle));
  entry.park_out_ns.store(ns(report.park_out));
  entry.seq.store(seq, std::memory_order_release);
  header.handovers.store(seq);
  header.bytes_to_serving.fetch_add(report.bytes_reclaimed);
}

}  // namespace sluice::memhandover::detail
