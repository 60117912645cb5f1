#include "memhandover/client/elastic_space.hpp"

#include <algorithm>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/ledger/client_entries.hpp"

namespace sluice::memhandover {

using std::chrono::steady_clock;

namespace {

/// How often a demand that is waited for is looked at: nobody rings when it is withdrawn.
constexpr std::chrono::milliseconds look_every{5};
/// The writer answers within microseconds; it may just have died.
constexpr std::chrono::milliseconds writers_time{200};

std::uint64_t time_since(std::int64_t since_ns) {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(0, monotonic_ns() - since_ns));
}

}  // namespace

elastic_space::elastic_space(broker_options const& broker, std::string const& name,
                             std::shared_ptr<cuda_driver const> driver) {
  std::lock_guard const lock{mutex_};  // it is demanded from as soon as it has joined
  client_ = tenant_client::join(broker, client_kind::engine, name,
                                [this](demand const& wanted) { return answer_demand(wanted); });
  memory_ = open_device_memory(client_->view().shape(), client_->files().chunks, std::move(driver));
  notes_.emplace(client_->view(), client_->slot());
  used_.resize(shape().chunk_count);
  client_->mailbox().elastic.store(1);
  client_->meanwhile([this]() -> std::optional<std::chrono::milliseconds> {
    std::lock_guard const waits{mutex_};  // who waits has looked before, or is woken
    changed_.notify_all();
    return std::nullopt;
  });
}

elastic_space::~elastic_space() {
  std::unique_lock lock{mutex_};
  std::vector<std::uint32_t> all;
  for (std::uint32_t place = 0; place < places(); ++place) {
    if (chunks_[place] != none) {
      all.push_back(place);
    }
  }
  release(all);  // so that a demand that waits has them
  lock.unlock();
  client_.reset();  // its thread uses what is destroyed next
  if (base_ != nullptr) {
    memory_->release(base_, places());
  }
}

pool_shape const& elastic_space::shape() const noexcept {
  return client_->view().shape();
}

void elastic_space::reserve(std::uint32_t places) {
  if (places == 0 || places > shape().chunk_count || base_ != nullptr) {
    throw error{error_kind::invalid_argument,
                base_ != nullptr ? "the addresses of this space are reserved already"
                                 : "a space of " + std::to_string(places) +
                                       " chunks is wanted; it can have 1 to " +
                                       std::to_string(shape().chunk_count) + ", what the pool of " +
                                       format_bytes(shape().bytes()) + " has"};
  }
  std::vector<std::uint32_t> chunks(places, none);
  base_ = memory_->reserve(places);
  std::lock_guard const lock{mutex_};
  chunks_ = std::move(chunks);
}

std::byte* elastic_space::at(std::uint32_t place) const noexcept {
  return base_ + place * shape().chunk_bytes;
}

void elastic_space::check(std::span<std::uint32_t const> places, bool backed) const {
  for (auto place = places.begin(); place != places.end(); ++place) {
    if (*place >= this->places() || (chunks_[*place] != none) != backed ||
        std::find(places.begin(), place, *place) != place) {
      throw error{error_kind::invalid_argument, "place " + std::to_string(*place) +
                                                    " of a space of " +
                                                    std::to_string(this->places()) +
                                                    (*place >= this->places() ? " does not exist"
                                                     : backed                 ? " is not backed"
                                                              : " is backed already")};
    }
  }
}

bool elastic_space::back(std::span<std::uint32_t const> places, steady_clock::time_point deadline) {
  std::lock_guard const growing{growing_};
  {
    std::lock_guard const lock{mutex_};
    check(places, false);
  }
  std::vector<std::uint32_t> chunks;
  std::vector<std::uint32_t> dirty;
  auto const count = static_cast<std::uint32_t>(places.size());
  auto const began_ns = monotonic_ns();
  if (is_parked() ? !obtain_to_come_back(chunks, dirty, count, deadline)
                  : !obtain(chunks, dirty, count, deadline)) {
    return false;
  }
  try {
    std::lock_guard const lock{mutex_};
    fill(places, chunks, dirty);
  } catch (...) {
    client_->release(chunks);
    throw;
  }
  if (is_parked()) {
    note_back(began_ns);
  }
  return true;
}

/// All that are wanted, or none.
bool elastic_space::obtain(std::vector<std::uint32_t>& chunks, std::vector<std::uint32_t>& dirty,
                           std::uint32_t count, steady_clock::time_point deadline) {
  for (;;) {
    dirty.clear();
    client_->ask(count, lifetime::lasting, std::max(deadline, steady_clock::now() + writers_time));
    chunks = client_->collect(&dirty);
    if (chunks.size() == count) {
      return true;
    }
    client_->release(chunks);
    if (steady_clock::now() >= deadline || !client_->wait_grantable(count, deadline)) {
      return false;
    }
  }
}

/// The same of who is parked: what the writer owes it, and nothing while it is to stay away.
bool elastic_space::obtain_to_come_back(std::vector<std::uint32_t>& chunks,
                                        std::vector<std::uint32_t>& dirty, std::uint32_t count,
                                        steady_clock::time_point deadline) {
  if (is_held()) {
    return false;
  }
  auto& mailbox = client_->mailbox();
  if (mailbox.owed_ns.load() == 0) {
    mailbox.waits_since_ns.store(monotonic_ns());
    mailbox.looked_ns.store(monotonic_ns());
    mailbox.owed_ns.store(monotonic_ns());
    mailbox.where_parked.store(static_cast<std::uint32_t>(park_state::coming_back));
  }
  for (;;) {
    mailbox.looked_ns.store(monotonic_ns());
    dirty.clear();
    client_->ask(count, lifetime::lasting, std::max(deadline, steady_clock::now() + writers_time),
                 precedence::coming_back);
    chunks = client_->collect(&dirty);
    if (chunks.size() == count) {
      return true;
    }
    client_->release(chunks);
    if (steady_clock::now() >= deadline || is_held()) {
      return false;
    }
    (void)client_->wait_grantable(count, std::min(deadline, steady_clock::now() + look_every));
  }
}

void elastic_space::note_back(std::int64_t since_ns) {
  auto& mailbox = client_->mailbox();
  mailbox.parked_ns.fetch_add(time_since(mailbox.away_since_ns.exchange(0)));
  mailbox.unpark_ns.fetch_add(time_since(since_ns));
  mailbox.owed_ns.store(0);
  mailbox.waits_since_ns.store(0);
  mailbox.obeys.store(0);
  mailbox.parked_chunks.store(0);
  mailbox.where_parked.store(static_cast<std::uint32_t>(park_state::resident));
  parked_.store(false, std::memory_order_release);
}

void elastic_space::fill(std::span<std::uint32_t const> places,
                         std::span<std::uint32_t const> chunks,
                         std::span<std::uint32_t const> dirty) {
  std::size_t done = 0;
  try {
    for (; done < places.size(); ++done) {
      auto const chunk = chunks[done];
      auto* const where = at(places[done]);
      memory_->map(where, {&chunk, 1});
      chunks_[places[done]] = chunk;
      if (used_.at(chunk) || std::find(dirty.begin(), dirty.end(), chunk) != dirty.end()) {
        memory_->scrub(where, {&chunk, 1});
      }
    }
  } catch (...) {
    for (auto const place : places) {
      if (std::exchange(chunks_[place], none) != none) {
        memory_->unmap(at(place), 1);
      }
    }
    throw;
  }
  for (auto const chunk : chunks) {
    used_[chunk] = true;
  }
  backed_ += static_cast<std::uint32_t>(places.size());
  notes_->say(chunks, "KV cache");
  show_kept();
}

void elastic_space::give_back(std::span<std::uint32_t const> places) {
  std::lock_guard const lock{mutex_};
  check(places, true);
  release(places);
}

void elastic_space::release(std::span<std::uint32_t const> places) {
  std::vector<std::uint32_t> gone;
  gone.reserve(places.size());
  for (auto const place : places) {
    memory_->unmap(at(place), 1);
    gone.push_back(std::exchange(chunks_[place], none));
  }
  client_->release(gone);
  auto const count = static_cast<std::uint32_t>(gone.size());
  backed_ -= count;
  demanded_ -= std::min(demanded_.load(), count);
  show_kept();
  changed_.notify_all();
}

void elastic_space::answer(std::uint32_t kept, bool may_be_parked) {
  std::lock_guard const lock{mutex_};
  kept_ = kept;
  answers_ = true;
  client_->mailbox().why_unparkable.store(
      static_cast<std::uint32_t>(may_be_parked ? unparkable::none : unparkable::never));
  show_kept();
}

/// What no demand gets: until demands are answered, all.
void elastic_space::show_kept() {
  client_->mailbox().kept_chunks.store(answers_ ? std::min(kept_, backed_) : backed_);
}

std::uint32_t elastic_space::await_demand(steady_clock::time_point deadline) {
  std::unique_lock lock{mutex_};
  changed_.wait_until(lock, deadline, [this] {
    return roused_ || demanded_.load() > 0 || is_held() != is_parked();
  });
  roused_ = false;
  return demanded_.load();
}

void elastic_space::rouse() {
  std::lock_guard const lock{mutex_};
  roused_ = true;
  changed_.notify_all();
}

void elastic_space::refuse_rest() {
  std::lock_guard const lock{mutex_};
  demanded_.store(0, std::memory_order_release);
  changed_.notify_all();
}

void elastic_space::show_used(std::uint64_t bytes) noexcept {
  client_->mailbox().used_bytes.store(bytes, std::memory_order_relaxed);
}

bool elastic_space::is_held() const noexcept {
  return memhandover::is_held(client_->view().clients()[client_->slot()]);
}

bool elastic_space::is_ordered_away() const noexcept {
  return is_held() && !is_parked();
}

void elastic_space::rest(std::uint32_t needed) {
  std::lock_guard const growing{growing_};
  std::lock_guard const lock{mutex_};
  if (needed == 0 || needed > places() || backed_ > 0 || is_parked()) {
    throw error{error_kind::invalid_argument,
                backed_ > 0   ? std::to_string(backed_) + " places are still backed"
                : is_parked() ? "it is parked already"
                              : "a space of " + std::to_string(places()) +
                                    " places is to come back with " + std::to_string(needed)};
  }
  auto& mailbox = client_->mailbox();
  mailbox.parked_chunks.store(needed);
  mailbox.away_since_ns.store(monotonic_ns());
  mailbox.parks.fetch_add(1);
  mailbox.where_parked.store(static_cast<std::uint32_t>(park_state::parked));
  mailbox.obeys.store(1);
  parked_.store(true, std::memory_order_release);
}

/// The chunks have been released one by one when this returns; none is left for the answer itself.
demand_answer elastic_space::answer_demand(demand const& wanted) {
  demand_answer answer;
  answer.noticed_ns = answer.closed_ns = wanted.awake_ns;
  std::unique_lock lock{mutex_};
  if (answers_) {
    demanded_.store(std::min(wanted.chunks, backed_ - std::min(kept_, backed_)),
                    std::memory_order_release);
    changed_.notify_all();
    while (demanded_.load() > 0 && wanted.stands()) {
      changed_.wait_for(lock, look_every);
    }
    demanded_.store(0, std::memory_order_release);
  }
  answer.idle_ns = monotonic_ns();
  return answer;
}

}  // namespace sluice::memhandover
