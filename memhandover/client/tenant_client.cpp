#include "memhandover/client/tenant_client.hpp"

#include <poll.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/client/membership.hpp"
#include "memhandover/ledger/chunk_counts.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/standing.hpp"

namespace sluice::memhandover {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Nothing that goes wrong on the control thread may end the process, or it.
template <typename Work>
void unless_it_fails(char const* what, Work&& work) noexcept {
  try {
    work();
  } catch (std::exception const& why) {
    spdlog::error("{} failed reason=\"{}\"", what, why.what());
  }
}

class tenant_member final : public tenant_client {
 public:
  tenant_member(broker_options const& broker, client_kind kind, std::string const& name,
                handler on_demand, job_wish const& wish)
      : member_(broker, kind, name, "", wish),
        on_demand_(std::move(on_demand)),
        stop_(make_event()),
        box_(member_.view(), member_.slot()) {
    // The slot may have had an earlier owner; its old demands and requests are not ours.
    answered_ = numbered::unpack(control().demand.load(std::memory_order_acquire)).seq;
    mailbox().demand_done.store(answered_, std::memory_order_release);
    if (kind == client_kind::engine) {
      // Until it says otherwise: one that speaks for itself has no way to be.
      mailbox().why_unparkable.store(static_cast<std::uint32_t>(unparkable::never));
    }
    // Signals are for the program's own threads.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, &before);
    try {
      thread_ = std::thread{[this] { run(); }};
    } catch (std::system_error const& why) {
      ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw system_error("cannot start the thread that answers demands", error_kind::unavailable,
                         why.code().value());
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  tenant_member(tenant_member const&) = delete;
  tenant_member& operator=(tenant_member const&) = delete;

  ~tenant_member() override {
    (void)::eventfd_write(stop_.get(), 1);
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  [[nodiscard]] ledger_view const& view() const noexcept override { return member_.view(); }
  [[nodiscard]] pool_files const& files() const noexcept override { return member_.files(); }
  [[nodiscard]] host_copy_share* copies() const noexcept override { return member_.copies(); }
  [[nodiscard]] std::uint32_t slot() const noexcept override { return member_.slot(); }
  [[nodiscard]] mailbox_header& mailbox() const noexcept override { return view().mailbox(slot()); }

  void ask(std::uint32_t count, lifetime kind, steady_clock::time_point deadline,
           precedence turn) override;
  [[nodiscard]] std::vector<std::uint32_t> collect(
      std::vector<std::uint32_t>* needs_scrub) override;
  void release(std::span<std::uint32_t const> chunks) override;
  void await_releases(steady_clock::time_point deadline) override;
  bool wait_grantable(std::uint32_t count, steady_clock::time_point deadline) override;
  void watch(std::function<void()> look, milliseconds every) override;
  void stay_awake() override;
  void meanwhile(std::function<std::optional<milliseconds>()> work) override;
  void show_waiting(bool waits) override;
  void nudge() const noexcept override { (void)::eventfd_write(member_.bell(), 1); }
  void leave() override {
    leaving_.store(true);
    std::lock_guard const done{at_work_};
  }

  void abandon_in_child() noexcept override {
    member_.abandon_in_child();
    thread_.detach();  // it does not exist here
  }

 private:
  [[nodiscard]] client_control& control() const noexcept { return view().controls()[slot()]; }
  void ring_writer() const { (void)::eventfd_write(files().doorbell.get(), 1); }
  void run();
  void await_events(std::span<pollfd> events);
  void answer_demand();
  [[nodiscard]] std::uint32_t above_minimum() const;
  template <typename Condition>
  bool await(std::unique_lock<std::mutex>& lock, steady_clock::time_point deadline,
             Condition const& holds);
  [[nodiscard]] milliseconds patience();
  void look();
  void make_work_due();
  void go_on_with_work();

  membership member_;
  handler on_demand_;
  unique_fd stop_;
  std::mutex asking_;  ///< one request at a time
  std::mutex mutex_;   ///< guards what follows
  std::condition_variable bell_rang_;
  client_mailbox box_;
  std::uint64_t awaited_ = 0;  ///< messages that had been written when `await_releases` last waited
  std::uint32_t uncollected_ = 0;  ///< chunks that may have been granted since the last `collect`
  std::uint32_t waiting_ = 0;      ///< threads in `wait_grantable`, and who shows that it waits
  std::function<void()> look_;
  milliseconds look_every_{};
  std::function<std::optional<milliseconds>()> work_;
  std::optional<steady_clock::time_point> work_at_;  ///< when the next piece of it is due
  std::atomic<bool> awake_{false};
  std::atomic<bool> leaving_{false};
  std::mutex at_work_;          ///< the control thread has it while it does something
  std::uint32_t answered_ = 0;  ///< control thread only
  std::thread thread_;
};

void tenant_member::run() {
  ::pthread_setname_np(::pthread_self(), "sluice-control");
  for (;;) {
    std::array<pollfd, 3> polled{
        {{stop_.get(), POLLIN, 0}, {member_.bell(), POLLIN, 0}, {member_.news(), POLLIN, 0}}};
    await_events(polled);
    if (polled[0].revents != 0) {
      return;
    }
    std::lock_guard const working{at_work_};
    if (polled[1].revents != 0) {
      eventfd_t count = 0;
      (void)::eventfd_read(member_.bell(), &count);
      answer_demand();
      {
        std::lock_guard const lock{mutex_};
        if (box_.resolve()) {
          ring_writer();
        }
      }
      bell_rang_.notify_all();
      make_work_due();
    }
    unless_it_fails("the conversation with the broker",
                    [&] { (void)member_.attend(polled[2].revents != 0); });
    unless_it_fails("a look at the pool", [this] { look(); });
    go_on_with_work();
  }
}

void tenant_member::await_events(std::span<pollfd> events) {
  auto const limit = patience();
  auto const end = steady_clock::now() + limit;
  while (awake_.load(std::memory_order_relaxed) && view().header().serving_now.load() != 0) {
    if (::poll(events.data(), events.size(), 0) > 0 ||
        (limit.count() >= 0 && steady_clock::now() >= end)) {
      return;
    }
    std::this_thread::yield();
  }
  ::poll(events.data(), events.size(), static_cast<int>(limit.count()));
}

/// How long nothing needs to be done unless somebody rings; negative: for ever.
milliseconds tenant_member::patience() {
  auto const until_search = member_.patience();
  std::lock_guard const lock{mutex_};
  auto until = until_search;
  auto at_most = [&until](milliseconds limit) { until = std::min(until.value_or(limit), limit); };
  if (look_ != nullptr) {
    at_most(look_every_);
  }
  if (work_at_) {
    at_most(std::max(milliseconds{0},
                     std::chrono::ceil<milliseconds>(*work_at_ - steady_clock::now())));
  }
  return until.value_or(milliseconds{-1});
}

void tenant_member::meanwhile(std::function<std::optional<milliseconds>()> work) {
  {
    std::lock_guard const lock{mutex_};
    work_ = std::move(work);
    work_at_ = steady_clock::now();
  }
  (void)::eventfd_write(member_.bell(), 1);
}

void tenant_member::make_work_due() {
  std::lock_guard const lock{mutex_};
  if (work_ != nullptr) {
    work_at_ = steady_clock::now();
  }
}

/// `work_` changes no more once it is set.
void tenant_member::go_on_with_work() {
  {
    std::lock_guard const lock{mutex_};
    if (!work_at_ || steady_clock::now() < *work_at_) {
      return;
    }
  }
  std::optional<milliseconds> next;
  unless_it_fails("work beside demands", [&] { next = work_(); });
  std::lock_guard const lock{mutex_};
  work_at_ = next ? std::optional{steady_clock::now() + *next} : std::nullopt;
}

void tenant_member::look() {
  std::unique_lock lock{mutex_};
  auto const look_now = look_;
  lock.unlock();
  if (look_now != nullptr) {
    look_now();
  }
}

void tenant_member::watch(std::function<void()> look, milliseconds every) {
  {
    std::lock_guard const lock{mutex_};
    look_ = std::move(look);
    look_every_ = every;
  }
  (void)::eventfd_write(member_.bell(), 1);
}

void tenant_member::stay_awake() {
  awake_.store(true, std::memory_order_relaxed);
  (void)::eventfd_write(member_.bell(), 1);
}

/// Chunks that it has beyond its minimum. A writer may have died since it wrote a demand that has been answered in part, and its successor
/// may have counted what was on its way.
std::uint32_t tenant_member::above_minimum() const {
  auto const least =
      standing_of(view().clients()[slot()], view().header().chunk_count).least_chunks;
  if (least == 0) {
    return view().header().chunk_count;
  }
  auto const unread = mailbox().mail_written.load() - control().mail_read.load();
  auto const held = count_chunks(view()).by_client.at(slot());
  return held - static_cast<std::uint32_t>(std::min<std::uint64_t>(held, unread + least));
}

void tenant_member::answer_demand() {
  auto const asked = numbered::unpack(control().demand.load(std::memory_order_acquire));
  if (asked.seq == answered_) {
    return;
  }
  answered_ = asked.seq;
  if (leaving_.load()) {
    return;  // whoever asks has all of it when this process has ended
  }
  auto const awake = monotonic_ns();
  demand_answer answer;
  answer.noticed_ns = answer.closed_ns = answer.idle_ns = awake;
  auto const wanted = std::min(asked.chunks & ~demand_without_parking, above_minimum());
  if (wanted > 0) {
    unless_it_fails("answering a demand", [&] {
      answer =
          on_demand_({.number = asked.seq,
                      .chunks = wanted,
                      .awake_ns = awake,
                      .stands =
                          [&] {
                            return numbered::unpack(control().demand.load()).seq == asked.seq &&
                                   !leaving_.load();
                          },
                      .give = [this](std::span<std::uint32_t const> chunks) { release(chunks); },
                      .may_park = (asked.chunks & demand_without_parking) == 0});
    });
    std::lock_guard const lock{mutex_};
    box_.release(answer.chunks);
  }
  if (leaving_.load() && asked.chunks > 0) {
    ring_writer();
    return;  // the rest comes with the end
  }
  auto& box = mailbox();
  box.live_chunks.store(answer.live_chunks);
  box.awake_ns.store(answer.noticed_ns);
  box.closed_ns.store(answer.closed_ns);
  box.unit_ended_ns.store(answer.unit_ended_ns);
  box.idle_ns.store(answer.idle_ns);
  box.released_ns.store(monotonic_ns());
  box.demand_done.store(asked.seq, std::memory_order_release);
  ring_writer();
  if (answer.afterwards) {
    unless_it_fails("what follows a demand", [&] { answer.afterwards(answer.chunks); });
  }
}

/// Waits until what the writer has written makes `holds` true; false at the deadline. Who waits here
/// may be what a demand waits for, and then the control thread hears no bell.
template <typename Condition>
bool tenant_member::await(std::unique_lock<std::mutex>& lock, steady_clock::time_point deadline,
                          Condition const& holds) {
  constexpr milliseconds most_seldom{20};
  for (microseconds patience{250}; !holds();
       patience = std::min<microseconds>(2 * patience, most_seldom)) {
    auto const now = steady_clock::now();
    if (now >= deadline) {
      return false;
    }
    (void)bell_rang_.wait_until(lock, std::min(deadline, now + patience));
  }
  return true;
}

void tenant_member::ask(std::uint32_t count, lifetime kind, steady_clock::time_point deadline,
                        precedence turn) {
  std::unique_lock alone{asking_, std::defer_lock};
  if (turn != precedence::coming_back) {
    alone.lock();
  } else if (!alone.try_lock()) {
    return;
  }
  std::unique_lock lock{mutex_};
  box_.ask(count, kind, turn);
  uncollected_ += count;
  ring_writer();
  if (!await(lock, deadline, [&] { return box_.answered(); })) {
    box_.withdraw();
    uncollected_ -= std::min(uncollected_, count);
    ring_writer();
  }
}

std::vector<std::uint32_t> tenant_member::collect(std::vector<std::uint32_t>* needs_scrub) {
  std::lock_guard const lock{mutex_};
  if (uncollected_ == 0) {
    return {};
  }
  bool const all_there = box_.answered();  // what is granted from here on is for the next time
  auto granted = box_.collect(uncollected_, needs_scrub);
  if (all_there) {
    uncollected_ = 0;
  } else {
    uncollected_ -= static_cast<std::uint32_t>(granted.size());
  }
  if (box_.has_mail()) {
    ring_writer();
  }
  return granted;
}

void tenant_member::release(std::span<std::uint32_t const> chunks) {
  if (chunks.empty()) {
    return;
  }
  std::lock_guard const lock{mutex_};
  box_.release(chunks);
  ring_writer();
}

/// The writer answers a request after it has taken all mail, and has told what is free then.
void tenant_member::await_releases(steady_clock::time_point deadline) {
  {
    std::lock_guard const lock{mutex_};
    auto const sent = mailbox().mail_written.load(std::memory_order_relaxed);
    if (std::exchange(awaited_, sent) == sent) {
      return;
    }
  }
  ask(0, lifetime::revocable, deadline, precedence::after_demands);
}

void tenant_member::show_waiting(bool waits) {
  std::lock_guard const lock{mutex_};
  waiting_ = waits ? waiting_ + 1 : waiting_ - 1;
  box_.set_waiting(waiting_ > 0);
  ring_writer();  // as below
}

bool tenant_member::wait_grantable(std::uint32_t count, steady_clock::time_point deadline) {
  std::unique_lock lock{mutex_};
  ++waiting_;
  box_.set_waiting(true);
  ring_writer();  // it may have kept something for a server that has died
  bool const had = await(lock, deadline, [&] { return box_.grantable() >= count; });
  box_.set_waiting(--waiting_ > 0);
  return had;
}

}  // namespace

std::unique_ptr<tenant_client> tenant_client::join(broker_options const& broker, client_kind kind,
                                                   std::string const& name, handler on_demand,
                                                   job_wish const& wish) {
  if (auto const& traits = traits_of(kind); !traits.is_tenant) {
    throw error{error_kind::invalid_argument,
                std::string{"a "} + traits.name + " is no tenant: it neither asks nor is asked"};
  }
  return std::make_unique<tenant_member>(broker, kind, name, std::move(on_demand), wish);
}

}  // namespace sluice::memhandover
