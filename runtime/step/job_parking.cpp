#include "runtime/step/job_parking.hpp"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/pool_account.hpp"
#include "memhandover/ledger/promised_chunks.hpp"

namespace sluice::step {
namespace {

using memhandover::monotonic_ns;
using std::chrono::milliseconds;

/// How often the table of host copies, which others use, too, and the header are looked at.
constexpr milliseconds look_at_copies{100};
/// The same while chunks are waited for, the bell coming before that, and on the host while somebody may come to touch what is
/// away.
constexpr milliseconds look_for_chunks{5};
/// How long the writer may take to answer. Demands are not heard meanwhile.
constexpr milliseconds answer_patience{20};
/// An operator's order waits so long where the device did not come to rest, so that the job can go on to where it does.
constexpr std::int64_t obey_again_after_ns = 1'000'000'000;
/// A thread that is held so long is told of.
constexpr std::chrono::nanoseconds silence = std::chrono::seconds{5};

/// What a damaged header may say at most.
constexpr std::chrono::hours longest_window{24};
constexpr std::uint32_t longest_stay = 1000;

std::int64_t ns_of(std::chrono::steady_clock::time_point at) {
  return std::chrono::nanoseconds{at.time_since_epoch()}.count();
}

std::uint64_t nanoseconds_of(std::chrono::steady_clock::duration span) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds{span}.count());
}

[[noreturn]] void end_without_contents(std::string const& why) {
  spdlog::critical("contents of this job's memory are lost, so it ends reason=\"{}\"", why);
  spdlog::shutdown();
  ::_exit(EXIT_FAILURE);
}

}  // namespace

job_parking::job_parking(parts const& of)
    : of_(of), pinned_(of.copies, of.driver, of.client.view().shape().device) {}

/// As the server says that is there, or was last.
void job_parking::follow_rules() {
  auto const& header = of_.client.view().header();
  auto const window_ns = std::min(header.resident_window_ns.load(std::memory_order_relaxed),
                                  nanoseconds_of(longest_window));
  auto const ppm =
      std::min(header.resident_ppm.load(std::memory_order_relaxed), memhandover::whole_in_ppm);
  scheduler::turn_rules const said{
      .share = window_ns == 0 || of_.is_engine
                   ? 0.0
                   : static_cast<double>(ppm) / memhandover::whole_in_ppm,
      .window = std::chrono::nanoseconds{std::max<std::uint64_t>(1, window_ns)},
      .stay = std::min(header.park_stay.load(std::memory_order_relaxed), longest_stay)};
  if (!(said == rules_)) {
    turns_.revise(said);
    rules_ = said;
  }
  // The first instant of the clock stands for all that are past.
  of_.client.mailbox().stays_until_ns.store(std::max<std::int64_t>(0, ns_of(turns_.stays_until())));
}

bool job_parking::may_be_parked(std::optional<clock::time_point> return_by) const {
  auto const now = clock::now();
  if (rules_.stay == 0 || (return_by && *return_by <= now + 2 * swap_)) {
    return false;
  }
  return turns_.is_away() ? now < turns_.owed_at(expected_coming()) : now >= turns_.stays_until();
}

job_parking::clock::duration job_parking::expected_coming() const {
  auto const parked = parking_->parked();
  return coming_.expected(parked.all(), parked.disk);
}

/// Of who waits for it.
job_parking::clock::time_point job_parking::owed_at() const {
  return of_.is_engine ? clock::time_point{std::chrono::nanoseconds{
                             std::max<std::int64_t>(1, of_.client.mailbox().waits_since_ns.load())}}
                       : turns_.owed_at(expected_coming());
}

/// What the server and whoever asks for the status are to know.
void job_parking::show_turns(bool waits) {
  auto const now = clock::now();
  auto& mailbox = of_.client.mailbox();
  if (waits && mailbox.waits_since_ns.load() == 0) {
    mailbox.waits_since_ns.store(ns_of(now));
  }
  if (waits && !has_all_) {
    turns_.wanted(now);
    auto const at = owed_at();
    mailbox.looked_ns.store(ns_of(now));
    mailbox.owed_ns.store(at == clock::time_point::max() ? 0 : ns_of(at) + returns_);
  } else if (mailbox.short_chunks.load() == 0) {
    mailbox.owed_ns.store(0);
  }
  if (!waits) {
    mailbox.waits_since_ns.store(0);
  }
  mailbox.window_away_ns.store(nanoseconds_of(turns_.away_in_window(now)));
  mailbox.window_ns.store(nanoseconds_of(turns_.window()));
}

void job_parking::note_back(clock::duration coming) {
  auto const now = clock::now();
  swap_ = going_ + coming;
  turns_.came_back(now, swap_);
  auto& mailbox = of_.client.mailbox();
  mailbox.unpark_ns.fetch_add(nanoseconds_of(coming));
  mailbox.away_since_ns.store(0);
  mailbox.parked_ns.fetch_add(nanoseconds_of(now - left_at_));
  mailbox.missed_ns.store(nanoseconds_of(turns_.missed()));
  follow_rules();
}

void job_parking::want() noexcept {
  if (!wanted_.exchange(true)) {
    of_.client.nudge();
  }
}

void job_parking::note_held(char const* call, std::int64_t since_ns) noexcept {
  std::int64_t nobody = 0;
  if (held_since_ns_.load(std::memory_order_relaxed) == nobody && !is_resident()) {
    held_in_.store(call);
    held_since_ns_.compare_exchange_strong(nobody, since_ns);
  }
}

/// Once in an absence, so that a program that stands still is not a riddle.
void job_parking::report_held() {
  auto const since = held_since_ns_.load();
  if (reported_held_ || since == 0 || is_resident() || monotonic_ns() - since < silence.count()) {
    return;
  }
  reported_held_ = true;
  auto const waited =
      std::chrono::duration<double>{std::chrono::nanoseconds{monotonic_ns() - since}};
  auto const& view = of_.client.view();
  auto const chunk_bytes = view.shape().chunk_bytes;
  if (is_held()) {
    spdlog::warn(
        "a thread of this job has been held for {:.1f} s in {}: an operator has parked the job, "
        "and `sluice wake {}` lets it come back",
        waited.count(), held_in_.load(), view.clients()[of_.client.slot()].pid.load());
    return;
  }
  spdlog::warn(
      "a thread of this job has been held for {:.1f} s in {}: the job is parked, and comes back "
      "when the pool has {} for it; {}. `sluice status` shows when it goes on",
      waited.count(), held_in_.load(), format_bytes(parking_->parked().all() * chunk_bytes),
      memhandover::account_of(view, of_.client.slot()));
}

bool job_parking::is_held() const noexcept {
  return memhandover::is_held(of_.client.view().clients()[of_.client.slot()]);
}

bool job_parking::has_order() const {
  return parking_ != nullptr && !leaving_.load() && !obeyed_ && is_held() &&
         monotonic_ns() >= obey_again_at_ns_;
}

/// What was held because of the order wants to come back, as ever.
void job_parking::end_order() {
  if (std::exchange(obeyed_, false)) {
    of_.client.mailbox().obeys.store(0);
    want();
  }
}

/// Who is woken comes back though nobody is held: the order may have ended before it was obeyed, or what is away may have gone for a
/// demand.
void job_parking::hear_of_waking() {
  auto const order = of_.client.view().clients()[of_.client.slot()].held_until_ns.load();
  if (std::exchange(order_seen_, order) != order && !is_held() && !is_resident()) {
    want();
  }
}

void job_parking::show(memhandover::park_state where) noexcept {
  of_.client.mailbox().where_parked.store(static_cast<std::uint32_t>(where));
}

void job_parking::await_resident(lock_type& lock) {
  if (is_resident()) {
    return;
  }
  want();
  note_held("an allocation", monotonic_ns());
  changed_.wait(lock, [this] { return is_resident() || stopped_; });
}

void job_parking::stop(lock_type& lock) {
  stopped_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !busy_; });
}

void job_parking::leave() noexcept {
  leaving_.store(true);
  wanted_.store(false);
}

/// While it lives the spaces do, too, unless all has been stopped.
class job_parking::piece_of_work {
 public:
  explicit piece_of_work(job_parking& of) : of_(of) {
    lock_type const lock{of_.of_.mutex};
    of_.busy_ = may_go_on_ = !of_.stopped_;
  }
  piece_of_work(piece_of_work const&) = delete;
  piece_of_work& operator=(piece_of_work const&) = delete;
  ~piece_of_work() {
    {
      lock_type const lock{of_.of_.mutex};
      of_.busy_ = false;
    }
    of_.changed_.notify_all();
  }
  [[nodiscard]] bool may_go_on() const noexcept { return may_go_on_; }

 private:
  job_parking& of_;
  bool may_go_on_ = false;
};

std::optional<milliseconds> job_parking::advance() {
  piece_of_work const piece{*this};
  if (!piece.may_go_on()) {
    return std::nullopt;
  }
  if (!is_ready_) {
    if (leaving_.load()) {
      return std::nullopt;
    }
    if (auto const next = on_gpu() ? pinned_.advance() : std::nullopt) {
      return next;
    }
    is_ready_ = true;
    make_ready();
  }
  if (!is_resident() && parking_->touched()) {
    wanted_.store(true);
  }
  if (leaving_.load() && !wanted_.load()) {
    return on_gpu() ? look_at_copies : look_for_chunks;
  }
  hear_of_waking();
  bool const is_held_back = is_held();
  if (!is_held_back) {
    end_order();
  }
  report_held();
  bool const waits = !is_resident() && wanted_.load() && !is_held_back;
  follow_rules();
  show_turns(waits);
  bool const is_back = waits && come_back();
  show_parkable();
  if (is_back) {
    become_resident();
  }
  return !is_resident() && (waits || !on_gpu()) ? look_for_chunks : look_at_copies;
}

/// What a GPU has not pinned is copied at a fifth of the rate, by a call that waits.
void job_parking::make_ready() {
  auto* const copies = of_.client.copies();
  auto& why_not = of_.client.mailbox().why_unparkable;
  why_not.store(static_cast<std::uint32_t>(memhandover::unparkable::refused));
  if (copies == nullptr || (on_gpu() && !pinned_.has_all())) {
    return;  // it has been said why
  }
  try {
    parking_ = std::make_unique<memhandover::tenant_parking>(
        of_.mutex, of_.memory, *copies, of_.driver,
        on_gpu() ? nullptr : std::make_unique<memhandover::held_pages>());
    why_not.store(static_cast<std::uint32_t>(memhandover::unparkable::none));
  } catch (std::exception const& why) {
    spdlog::warn("this job cannot be parked reason=\"{}\"", why.what());
  }
}

/// What a demand could have beyond what nothing needs.
void job_parking::show_parkable() {
  auto const* const copies = of_.client.copies();  // none where the broker has refused them
  bool const others_wait = of_.gate.others_may_wait();
  bool const has_failed = parking_ != nullptr && parking_->disk_fault() != 0;
  auto const counted =
      parking_ != nullptr && copies != nullptr && !others_wait
          ? copies->copies().count(has_failed ? std::optional{memhandover::copy_place::memory}
                                              : std::nullopt)
          : memhandover::copy_counts{};
  if (parking_ != nullptr) {
    using memhandover::unparkable;
    of_.client.mailbox().why_unparkable.store(
        static_cast<std::uint32_t>(others_wait ? unparkable::communicators : unparkable::none));
  }
  auto const slots = counted.free + counted.kept;  // what is kept gives way
  lock_type const lock{of_.mutex};
  of_.spaces.set_parkable(slots);
}

void job_parking::take(memhandover::demand const& wanted, std::uint32_t count,
                       std::span<std::uint32_t const> given) {
  piece_of_work const piece{*this};
  auto const return_by =
      of_.longest_absence ? std::optional{clock::now() + *of_.longest_absence} : std::nullopt;
  follow_rules();
  // An operator is obeyed whatever else is agreed on.
  if (!piece.may_go_on() || leaving_.load() || parking_ == nullptr || of_.gate.others_may_wait() ||
      !(wanted.from_operator || may_be_parked(return_by))) {
    return;
  }
  auto const deadline = monotonic_ns() + (on_gpu() ? kernel_patience_ns : operator_patience_ns);
  auto const began = clock::now();
  bool const was_resident = is_resident();
  show(memhandover::park_state::closing);
  if (!of_.gate.close_all(deadline)) {
    note_not_at_rest(was_resident);
    return;
  }
  auto const closed_ns = monotonic_ns();
  // Until then an allocation is answered: whoever is waited for may need it.
  if (!of_.gate.wait_idle(deadline)) {
    note_not_at_rest(was_resident);
    if (was_resident) {
      open();
    }
    return;
  }
  auto const idle_ns = monotonic_ns();
  if (was_resident) {
    wanted_.store(false);  // before anybody can find it away
  }
  resident_.store(false);
  auto& mailbox = of_.client.mailbox();
  auto const before = parking_->parked();
  auto const note = [&] {
    auto const parked = parking_->parked();
    bool const any = parked.all() > 0 || obeyed_;
    show_parked();
    if (parked.all() > before.all()) {
      going_ = (was_resident ? clock::duration{} : going_) + (clock::now() - began);
      coming_.went(going_, parking_->written());
      mailbox.park_ns.fetch_add(nanoseconds_of(clock::now() - began));
      if (was_resident) {
        if (!wanted.from_operator) {
          turns_.left(began, return_by);
        }
        mailbox.parks.fetch_add(1);
      }
    }
    if (!any) {
      become_resident();
      return;
    }
    show(memhandover::park_state::parked);
    if (was_resident) {
      left_at_ = began;
      has_all_ = false;
      mailbox.away_since_ns.store(ns_of(left_at_));
    }
  };
  std::vector<memhandover::chunk_space*> spaces;
  {
    lock_type const lock{of_.mutex};
    of_.gate.set_parked(true);
    of_.spaces.set_frozen(true);
    spaces = of_.spaces.lasting();
  }
  try {
    show(memhandover::park_state::going);
    mailbox.park_began_ns.store(ns_of(began));
    mailbox.park_closed_ns.store(closed_ns);
    mailbox.park_chunks.store(0);
    mailbox.park_idle_ns.store(idle_ns, std::memory_order_release);
    parking_->take(
        spaces, count,
        [&](std::span<std::uint32_t const> chunks) {
          auto const some = static_cast<std::uint32_t>(chunks.size());
          mailbox.park_chunks.fetch_add(some);
          mailbox.parked_chunks.fetch_add(some);  // before the writer can grant them to others
          wanted.give(chunks);
        },
        wanted.stands,
        [&](std::span<std::uint32_t const> chosen) {
          std::vector<std::uint32_t> all{given.begin(), given.end()};
          all.insert(all.end(), chosen.begin(), chosen.end());
          memhandover::promise(of_.client.view(), of_.client.slot(), wanted.number, all);
        });
    obeyed_ = obeyed_ || (wanted.from_operator && wanted.stands());
  } catch (...) {
    note();
    throw;
  }
  note();
  show_parkable();
  mailbox.obeys.store(obeyed_ ? 1 : 0);
}

void job_parking::show_parked() {
  auto const parked = parking_->parked();
  auto& mailbox = of_.client.mailbox();
  mailbox.parked_dirty.store(parked.dirty, std::memory_order_relaxed);
  mailbox.parked_clean.store(parked.clean, std::memory_order_relaxed);
  mailbox.parked_disk.store(parked.disk, std::memory_order_relaxed);
  mailbox.parked_chunks.store(parked.all(), std::memory_order_relaxed);
  mailbox.disk_fault.store(parking_->disk_fault(), std::memory_order_relaxed);
}

/// Nothing has been taken; an order is tried again later.
void job_parking::note_not_at_rest(bool is_resident) {
  show(is_resident ? memhandover::park_state::resident : memhandover::park_state::parked);
  obey_again_at_ns_ = monotonic_ns() + obey_again_after_ns;
}

/// True: everything is where it was.
bool job_parking::come_back() {
  auto const needed = parking_->parked().all();
  if (!get_chunks(needed)) {
    return false;
  }
  if (auto const slot = parking_->lost()) {
    end_without_contents("slot " + std::to_string(*slot) + " of the host copies is another's");
  }
  auto const began = clock::now();
  show(memhandover::park_state::coming_back);
  std::vector<std::uint32_t> chunks;
  {
    lock_type const lock{of_.mutex};
    chunks = of_.spaces.stock().take(needed);
  }
  try {
    parking_->bring_back(chunks);
  } catch (memhandover::contents_lost const& why) {
    end_without_contents(why.what());
  } catch (std::exception const& why) {
    spdlog::error("this job could not come back, and tries again reason=\"{}\"", why.what());
    show(memhandover::park_state::parked);
    lock_type const lock{of_.mutex};
    of_.spaces.stock().add(chunks);
    return false;
  }
  auto const coming = clock::now() - began;
  coming_.came(coming, needed, parking_->read());
  note_back(coming);
  return true;
}

/// All that are needed, or none: two that each had a half would wait for each other for ever.
bool job_parking::get_chunks(std::uint32_t needed) {
  auto const lacking = [&] {
    lock_type const lock{of_.mutex};
    of_.spaces.stock().collect();
    return of_.spaces.stock().missing(needed);
  };
  auto const asked = lacking();
  has_all_ = asked == 0;
  if (has_all_) {
    return true;
  }
  set_waiting(true);
  // What is owed it is granted beyond what all may have.
  bool const is_owed = clock::now() >= owed_at();
  if (!is_owed && of_.client.view().header().grantable_to_parked.load() < asked) {
    return false;
  }
  of_.client.ask(asked, memhandover::lifetime::lasting, clock::now() + answer_patience,
                 memhandover::precedence::coming_back);
  has_all_ = lacking() == 0;
  if (has_all_) {
    ++returns_;
    of_.client.mailbox().owed_ns.store(0);
  }
  return has_all_;
}

void job_parking::set_waiting(bool waits) {
  if (shows_waiting_ != waits) {
    shows_waiting_ = waits;
    of_.client.show_waiting(waits);
  }
}

void job_parking::become_resident() {
  auto& mailbox = of_.client.mailbox();
  mailbox.parked_chunks.store(0);
  mailbox.parked_dirty.store(0);
  mailbox.parked_clean.store(0);
  mailbox.parked_disk.store(0);
  show(memhandover::park_state::resident);
  held_since_ns_.store(0);
  reported_held_ = false;
  set_waiting(false);
  {
    lock_type const lock{of_.mutex};
    of_.spaces.set_frozen(false);
    of_.spaces.publish();
    resident_.store(true);
    of_.gate.set_parked(false);
  }
  open();
  changed_.notify_all();
}

/// Unless it is closed for what has been revoked.
void job_parking::open() {
  lock_type const lock{of_.mutex};
  if (!of_.spaces.awaits_unmapping()) {
    of_.gate.open();
  }
}

}  // namespace sluice::step
