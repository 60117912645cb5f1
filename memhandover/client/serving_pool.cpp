#include "memhandover/client/serving_pool.hpp"

#include <poll.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "memhandover/base/error.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/client/detail/acquisition.hpp"
#include "memhandover/client/detail/mapping_ahead.hpp"
#include "memhandover/client/detail/pause_lease.hpp"
#include "memhandover/client/detail/server_manifest.hpp"
#include "memhandover/client/detail/whole_view.hpp"
#include "memhandover/client/membership.hpp"
#include "memhandover/client/work_report.hpp"
#include "memhandover/ledger/chunk_choice.hpp"
#include "memhandover/ledger/chunk_history.hpp"
#include "memhandover/ledger/chunk_notes.hpp"
#include "memhandover/ledger/ledger_writer.hpp"

namespace sluice::memhandover {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

/// Whose memory is where: chunks of one placement, and the second address if they are not
/// neighbours.
struct holding {
  std::vector<std::uint32_t> chunks;
  std::byte* data = nullptr;
  bool stitched = false;
};

class pool_server final : public serving_pool, public std::enable_shared_from_this<pool_server> {
 public:
  explicit pool_server(options const& how)
      : options_(how),
        member_({how.runtime_dir, how.backend, how.device, how.pool_bytes, how.chunk_bytes,
                 how.sluice_binary, how.host_copy_bytes, how.host_copy_disk},
                client_kind::server, how.name, how.endpoint),
        memory_(open_device_memory(member_.view().shape(), member_.files().chunks)),
        whole_(*memory_),
        notes_(member_.view(), member_.slot()),
        history_(member_.view(), member_.slot()),
        stop_(make_event()),
        acquisition_({member_.view(), member_.slot(), mutex_, mail_, writer_, reserve_, waiting_,
                      how.demands_from_engines, member_.copies()}),
        pause_(member_.view().header().pause_until_ns, options_.pause_lease) {
    manifest_.emplace(member_.files().manifest.get(),
                      detail::server_manifest::parts{
                          member_.view(), *memory_, whole_.at(0), member_.slot(), mutex_, writer_,
                          [this] { return shared_from_this(); },
                          [this](auto const& chunks, std::byte const* data, std::string_view what) {
                            record_taken(chunks, data, what);
                          }});
    try {
      thread_ = std::thread{[this] { run(); }};
    } catch (std::system_error const& why) {
      throw system_error("cannot start the thread that keeps the pool", error_kind::unavailable,
                         why.code().value());
    }
  }

  /// Waits until this server is the writer, which everything else takes for granted.
  void await_appointment() {
    std::unique_lock lock{mutex_};
    if (!mail_.wait_for(lock, options_.patience, [this] { return writer_.has_value(); })) {
      throw error{error_kind::unavailable,
                  "this server has not become the writer of its pool's ledger within " +
                      std::to_string(options_.patience.count()) +
                      " ms; there is no broker, or a process of an earlier server has not ended"};
    }
  }

  pool_server(pool_server const&) = delete;
  pool_server& operator=(pool_server const&) = delete;

  ~pool_server() override {
    (void)::eventfd_write(stop_.get(), 1);
    thread_.join();
    if (writer_) {
      forget_wishes(member_.view().header());
      manifest_->end();
    }
  }

  [[nodiscard]] pool_shape shape() const override { return member_.view().shape(); }

  [[nodiscard]] pool_usage usage() const override {
    std::lock_guard const lock{mutex_};
    auto const& of = shape();
    // What a dead server has left is had for the asking.
    auto const free = writer_->available_chunks() + writer_->left_chunks();
    auto const serving = writer_->owned_by(owner::serving) - writer_->left_chunks();
    return {.total_bytes = of.bytes(),
            .free_bytes = free * of.chunk_bytes,
            .training_bytes = writer_->owned_by(owner::training) * of.chunk_bytes,
            .serving_bytes = serving * of.chunk_bytes,
            .engine_bytes = writer_->owned_by(owner::engine) * of.chunk_bytes,
            .kept_bytes = acquisition_.kept_for_good() * of.chunk_bytes};
  }

  [[nodiscard]] placement acquire(std::uint64_t bytes, steady_clock::time_point deadline,
                                  handover_report* report, std::string_view what) override;

  [[nodiscard]] std::optional<owed_memory> owed() const override {
    std::lock_guard const lock{mutex_};
    auto const next = writer_->next_owed();
    if (!next) {
      return std::nullopt;
    }
    return owed_memory{steady_clock::time_point{nanoseconds{next->at_ns}},
                       next->missing * shape().chunk_bytes, acquisition_.stay_of(next->slot)};
  }

  void gather_owed(steady_clock::time_point deadline) override {
    auto const alone = next_turn();
    handover_report unused;  // it is no handover to this server
    acquisition_.gather_owed(deadline, unused);
  }

  [[nodiscard]] bool is_needed() const override {
    std::lock_guard const lock{mutex_};
    return acquisition_.is_needed();
  }

  bool gather_needed(steady_clock::time_point deadline, std::stop_token called_off) override {
    std::unique_lock const alone{acquiring_};
    handover_report unused;  // it is no handover to this server
    return acquisition_.gather_needed(urgency::spare(deadline, std::move(called_off)), unused);
  }

  void set_reserve(std::uint64_t bytes) override {
    std::lock_guard const lock{mutex_};
    reserve_ = static_cast<std::uint32_t>((bytes + shape().chunk_bytes - 1) / shape().chunk_bytes);
    writer_->set_reserve(reserve_);
  }

  void set_run_ahead(nanoseconds bound) override {
    auto const kept = std::clamp<nanoseconds>(bound, nanoseconds{1}, longest_run_ahead);
    std::lock_guard const lock{mutex_};
    member_.view().header().run_ahead_ns.store(static_cast<std::uint64_t>(kept.count()));
  }

  void announce_compute(nanoseconds within) override {
    auto const until =
        monotonic_ns() +
        std::clamp<nanoseconds>(within, nanoseconds{1}, longest_announcement).count();
    member_.view().header().announced_until_ns.store(static_cast<std::uint64_t>(until),
                                                     std::memory_order_release);
  }

  [[nodiscard]] compute_claim claim_compute(steady_clock::time_point until) override {
    detail::pause_lease::claim claim;
    {
      std::lock_guard const lock{mutex_};
      bool const first = !pause_.claimed();
      claim = pause_.add(until);
      if (first) {
        // The thread keeps the lease fresh from now on.
        (void)::eventfd_write(member_.files().doorbell.get(), 1);
      }
    }
    auto drop = [self = shared_from_this(), claim](void*) {
      std::lock_guard const lock{self->mutex_};
      self->pause_.drop(claim);
    };
    return compute_claim{std::shared_ptr<void>{nullptr, std::move(drop)}};
  }

  void watch_engines(std::function<void(bool, bool)> hears) override {
    {
      std::lock_guard const lock{hearing_};
      hears_engines_ = std::move(hears);
      engines_work_ = false;
    }
    (void)::eventfd_write(member_.files().doorbell.get(), 1);
  }

  [[nodiscard]] warm_memory* warm() noexcept override { return &*manifest_; }

  [[nodiscard]] std::vector<std::uint32_t> free_chunks() const override {
    std::vector<std::uint32_t> result;
    auto const& view = member_.view();
    for (std::uint32_t i = 0; i < view.shape().chunk_count; ++i) {
      if (view.chunk(i).is_free()) {
        result.push_back(i);
      }
    }
    std::lock_guard const lock{mutex_};
    result.resize(std::min<std::size_t>(result.size(), writer_->available_chunks()));
    return result;
  }
  [[nodiscard]] bool take_chunks(std::span<std::uint32_t const> chunks) override {
    std::lock_guard const lock{mutex_};
    return chunks.size() <= writer_->available_chunks() &&
           writer_->take_these(chunks, static_cast<std::uint16_t>(member_.slot()));
  }
  [[nodiscard]] std::vector<std::uint32_t> acquire_chunks(std::uint32_t count, urgency const& how,
                                                          handover_report* report,
                                                          foresight const& meanwhile) override;
  void give_back_chunks(std::span<std::uint32_t const> chunks) override {
    std::lock_guard const lock{mutex_};
    manifest_->withdraw_all_in(chunks);
    writer_->give_back(chunks);
  }
  [[nodiscard]] std::byte* whole_view() const noexcept override { return whole_.at(0); }
  [[nodiscard]] std::byte* stitch(std::span<std::uint32_t const> chunks) override {
    auto* const where = memory_->map_anew(chunks);
    note_stitched(where, chunks);
    return where;
  }
  /// If it throws, nothing is mapped there any more.
  void note_stitched(std::byte* where, std::span<std::uint32_t const> chunks) {
    try {
      std::lock_guard const lock{mutex_};
      manifest_->note_stitched(where, {chunks.begin(), chunks.end()});
    } catch (...) {
      memory_->unmap_and_release(where, static_cast<std::uint32_t>(chunks.size()));
      throw;
    }
  }
  void unstitch(std::byte* where, std::uint32_t count) noexcept override {
    {
      std::lock_guard const lock{mutex_};
      manifest_->forget_stitched(where);  // before others may get these addresses
    }
    memory_->unmap_and_release(where, count);
  }
  void note_chunks(std::span<std::uint32_t const> chunks, std::string_view what) override {
    std::lock_guard const lock{noting_};
    notes_.say(chunks, what);
  }
  void record_use(std::span<std::uint32_t const> chunks, std::byte const* where,
                  std::string_view what) override {
    std::lock_guard const lock{noting_};
    if (where != nullptr) {
      history_.record(chunk_event::taken, chunks, where, 0, what);
      return;
    }
    for (std::size_t i = 0; i < chunks.size();) {
      auto end = i + 1;
      while (end < chunks.size() && chunks[end] == chunks[end - 1] + 1) {
        ++end;
      }
      history_.record(chunk_event::taken, chunks.subspan(i, end - i), whole_.at(chunks[i]), 0,
                      what);
      i = end;
    }
  }

  void give_back(holding const& held) {
    if (held.stitched) {
      unstitch(held.data, static_cast<std::uint32_t>(held.chunks.size()));
    }
    give_back_chunks(held.chunks);
  }

 private:
  /// Who asks later is told that `chunks` hold `what`, and lie at `data`.
  void record_taken(std::span<std::uint32_t const> chunks, std::byte const* data,
                    std::string_view what) {
    note_chunks(chunks, what);
    record_use(chunks, data, what);
  }

  [[nodiscard]] std::unique_lock<std::mutex> next_turn();
  void publish_turns(ledger_header& to) const;
  void run();
  std::optional<std::int64_t> look_at_engines();
  void handle(message received);
  void finish(handover_report const& result, handover_report* report);

  options options_;
  membership member_;
  std::unique_ptr<device_memory> memory_;
  detail::whole_view whole_;
  chunk_notes notes_;
  chunk_history history_;
  unique_fd stop_;
  std::mutex acquiring_;      ///< one acquisition at a time
  std::mutex noting_;         ///< guards notes and history
  mutable std::mutex mutex_;  ///< guards what follows
  std::condition_variable mail_;
  std::optional<ledger_writer> writer_;
  std::optional<detail::server_manifest> manifest_;
  std::uint32_t reserve_ = 0;
  std::uint32_t waiting_ = 0;        ///< who want their turn with `acquiring_`
  detail::acquisition acquisition_;  ///< used by whoever has `acquiring_`
  detail::pause_lease pause_;
  std::mutex hearing_;  ///< before mutex_; guards the next two
  std::function<void(bool, bool)> hears_engines_;
  bool engines_work_ = false;  ///< as it was told last
  std::thread thread_;
};

/// The writer's thread: mailboxes, the broker's messages, the pause's lease. Begins when everything
/// is open that a writer needs.
void pool_server::run() {
  ::pthread_setname_np(::pthread_self(), "sluice-ledger");
  member_.say_ready();
  auto const renew_every = std::max<milliseconds>(milliseconds{1}, options_.pause_lease / 3);
  std::optional<std::int64_t> engines_until;
  for (;;) {
    bool claimed = false;
    int doorbell = -1;  // rings for the broker until this is the writer
    std::optional<std::int64_t> left_until;
    {
      std::lock_guard const lock{mutex_};
      doorbell = writer_ ? member_.files().doorbell.get() : -1;
      claimed = pause_.claimed();
      left_until = manifest_->end_grace();
    }
    auto timeout = member_.patience();
    auto const at_most = [&timeout](milliseconds limit) {
      timeout = std::min(timeout.value_or(limit), limit);
    };
    if (claimed) {
      at_most(renew_every);
    }
    auto const at_latest = [&at_most](std::int64_t instant_ns) {
      at_most(
          std::max(milliseconds{0}, ceil<milliseconds>(nanoseconds{instant_ns - monotonic_ns()})));
    };
    if (left_until) {
      at_latest(*left_until);
    }
    if (engines_until) {
      at_latest(*engines_until);
    }
    std::array<pollfd, 3> polled{
        {{stop_.get(), POLLIN, 0}, {doorbell, POLLIN, 0}, {member_.news(), POLLIN, 0}}};
    ::poll(polled.data(), polled.size(),
           static_cast<int>(timeout.value_or(milliseconds{-1}).count()));
    if (polled[0].revents != 0) {
      return;
    }
    if (polled[1].revents != 0) {  // before any look: who rings from now on is seen by the next
      eventfd_t count = 0;
      (void)::eventfd_read(doorbell, &count);
    }
    engines_until = look_at_engines();
    {
      std::lock_guard const lock{mutex_};
      if (polled[1].revents != 0) {
        writer_->pump();
        mail_.notify_all();
      }
      if (pause_.claimed()) {
        pause_.renew();
      }
    }
    if (auto received = member_.attend(polled[2].revents != 0)) {
      handle(std::move(*received));
    }
  }
}

/// Tells whether the device works for them: without `mutex_`, since who hears of it claims the device. When it is to be looked
/// at again, whoever rings.
std::optional<std::int64_t> pool_server::look_at_engines() {
  std::lock_guard const lock{hearing_};
  if (!hears_engines_) {
    return std::nullopt;
  }
  auto const seen = work_of_engines(member_.view(), monotonic_ns());
  if (std::exchange(engines_work_, seen.works) != seen.works) {
    hears_engines_(seen.works, seen.waited);
  }
  return seen.works ? std::optional{seen.until_ns} : std::nullopt;
}

/// Of an acquisition that somebody waits for: one that is spare gives way to it.
std::unique_lock<std::mutex> pool_server::next_turn() {
  std::unique_lock alone{acquiring_, std::try_to_lock};
  if (!alone.owns_lock()) {
    auto const wait = [this](std::int32_t by) {
      std::lock_guard const lock{mutex_};
      waiting_ += static_cast<std::uint32_t>(by);
    };
    wait(1);
    mail_.notify_all();
    alone.lock();
    wait(-1);
  }
  return alone;
}

/// What holds for who is parked.
void pool_server::publish_turns(ledger_header& to) const {
  auto const share = std::clamp(options_.resident_share, 0.0, 1.0);
  auto const window = std::max(options_.resident_window, nanoseconds{1});
  to.resident_window_ns.store(static_cast<std::uint64_t>(window.count()));
  to.resident_ppm.store(static_cast<std::uint32_t>(std::lround(share * whole_in_ppm)));
  to.park_stay.store(options_.park_stay);
}

void pool_server::handle(message received) {
  std::lock_guard const lock{mutex_};
  auto const& type = received.body["type"];
  auto const slot = received.body.value("slot", max_clients);
  if (type == "appointed" && !writer_) {
    writer_.emplace(member_.view());
    writer_->set_reserve(reserve_);
    publish_turns(member_.view().header());
    mail_.notify_all();
  } else if (type == "client_joined" && slot < max_clients && received.descriptors.size() == 1 &&
             writer_) {
    writer_->set_bell(slot, std::move(received.descriptors[0]));
    writer_->pump();
  } else if (type == "client_gone" && slot < max_clients && writer_) {
    auto const freed = writer_->reclaim(slot);
    spdlog::info("took back what a client held slot={} chunks={}", slot, freed);
    member_.send({{"type", "reclaimed"}, {"slot", slot}});
    mail_.notify_all();
  }
}

std::vector<std::uint32_t> pool_server::acquire_chunks(std::uint32_t count, urgency const& how,
                                                       handover_report* report,
                                                       foresight const& meanwhile) {
  if (count == 0) {
    return {};
  }
  auto const alone = how.is_spare ? std::unique_lock{acquiring_} : next_turn();
  auto const start = steady_clock::now();
  handover_report result;
  auto chunks = acquisition_.obtain(count * shape().chunk_bytes, how, result, meanwhile);
  result.total = steady_clock::now() - start;
  finish(result, report);
  return chunks;
}

placement pool_server::acquire(std::uint64_t bytes, steady_clock::time_point deadline,
                               handover_report* report, std::string_view what) {
  auto const alone = next_turn();
  auto const start = steady_clock::now();
  handover_report result;
  auto const held = std::make_shared<holding>();
  std::shared_ptr<void> hold{nullptr, [self = shared_from_this(), held](void*) {
                               if (!held->chunks.empty()) {
                                 self->give_back(*held);
                               }
                             }};
  detail::mapping_ahead ahead{*memory_};
  held->chunks = acquisition_.obtain(bytes, deadline, result,
                                     [&ahead](std::span<std::uint32_t const> foreseen) {
                                       if (!are_neighbours(foreseen)) {
                                         ahead.map(foreseen);
                                       }
                                     });
  auto const mapping = steady_clock::now();
  if (are_neighbours(held->chunks)) {
    held->data = whole_.at(held->chunks.front());
  } else if (auto there = ahead.put_right(held->chunks)) {
    held->chunks = std::move(there->chunks);
    note_stitched(there->data, held->chunks);
    held->data = there->data;
    held->stitched = true;
  } else {
    held->data = stitch(held->chunks);
    held->stitched = true;
  }
  auto const end = steady_clock::now();
  result.map = end - mapping;
  result.total = end - start;
  finish(result, report);
  record_taken(held->chunks, held->data, what);
  return {std::move(hold), held->data, result.bytes};
}

/// Tells of an acquisition that is over.
void pool_server::finish(handover_report const& result, handover_report* report) {
  if (result.bytes_reclaimed > 0) {
    detail::record_handover(member_.view().header(), result);
  }
  if (report != nullptr) {
    *report = result;
  }
}

}  // namespace

placement::placement(placement&& other) noexcept
    : hold_(std::move(other.hold_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

placement& placement::operator=(placement&& other) noexcept {
  hold_ = std::move(other.hold_);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

placement::~placement() = default;

std::shared_ptr<serving_pool> serving_pool::join(options const& how) {
  auto server = std::make_shared<pool_server>(how);
  server->await_appointment();
  return server;
}

}  // namespace sluice::memhandover
