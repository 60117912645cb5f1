#include "memhandover/parking/tenant_parking.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

using clock = std::chrono::steady_clock;

/// What may go waits so long for what follows it; the first goes at once.
constexpr std::chrono::microseconds together{250};

}  // namespace

tenant_parking::tenant_parking(std::mutex& mutex, device_memory& memory, host_copy_share& copies,
                               std::shared_ptr<cuda_driver const> driver,
                               std::unique_ptr<held_pages> own_pages)
    : mutex_(mutex),
      memory_(memory),
      share_(copies),
      transfer_(open_chunk_transfer(driver)),
      hasher_(open_content_hasher(driver)),
      own_pages_(std::move(own_pages)) {
  parked_.reserve(memory.shape().chunk_count);
  going_chunks_.reserve(memory.shape().chunk_count);
  auto const bytes = memory.shape().chunk_bytes;
  for (auto left = share_.staging(); left.size() >= bytes; left = left.subspan(bytes)) {
    stages_.push_back(left.data());
  }
}

tenant_parking::~tenant_parking() {
  for (auto const& each : parked_) {
    if (each.copy) {
      share_.copies().give_back(*each.copy);
    }
    if (each.is_held) {
      own_pages_->release(each.of->at(each.position), memory_.shape().chunk_bytes);
    }
  }
  for (auto const& [address, each] : kept_) {
    share_.copies().give_back(each.slot);
  }
}

tenant_parking::counts tenant_parking::parked() const noexcept {
  counts result;
  for (auto const& at : parked_) {
    ++(!at.copy ? result.zero : at.is_clean ? result.clean : result.dirty);
    result.disk += at.copy && is_on_disk(*at.copy) ? 1 : 0;
  }
  return result;
}

/// Takes chunks away one by one: what the device hashes, what is being copied, and what has been decided.
class tenant_parking::departure {
 public:
  departure(tenant_parking& of, std::vector<place> going, taker const& give)
      : of_(of), going_(std::move(going)), give_(give) {
    ready_.reserve(going_.size());
  }
  departure(departure const&) = delete;
  departure& operator=(departure const&) = delete;
  /// What has not gone is as it was.
  ~departure() {
    for (auto& at : going_) {
      if (at.copy) {
        of_.share_.copies().give_back(*at.copy);
      }
      if (at.stage != nullptr) {
        of_.stages_.push_back(at.stage);
      }
      of_.restore(at);
    }
  }

  void run(std::function<bool()> const& goes_on) {
    try {
      while (begin_some(goes_on) || decided_ < begun_ || !copying_.empty()) {
        if (!decide_some(goes_on) && !finish_some()) {
          std::this_thread::yield();
        }
      }
    } catch (...) {
      of_.transfer_->abandon();
      of_.hasher_->abandon();
      throw;
    }
  }

 private:
  /// True: there are more to begin, though maybe not now.
  bool begin_some(std::function<bool()> const& goes_on) {
    auto const& hasher = *of_.hasher_;
    for (;; ++begun_) {
      if (begun_ == going_.size() || !goes_on()) {
        return false;
      }
      // What has begun ends, also where nobody waits for it any more.
      if (copying_.size() + (begun_ - decided_) >= 2 * chunk_transfer::window ||
          (hasher.available() && !hasher.room())) {
        return true;
      }
      auto const* const contents = of_.take_aside(going_[begun_]);
      if (hasher.available()) {
        of_.hasher_->begin(contents, of_.memory_.shape().chunk_bytes);
      }
    }
  }

  bool decide_some(std::function<bool()> const& goes_on) {
    auto const before = decided_;
    while (decided_ < begun_ && !(of_.disk_is_usable() && of_.stages_.empty())) {
      auto& at = going_[decided_];
      if (of_.hasher_->available() && !(at.hash = of_.hasher_->poll())) {
        break;
      }
      decide(decided_++, goes_on);
    }
    unmap_ready();
    return decided_ > before;
  }

  /// Those that follow each other at once: the driver takes as long for a few as for one.
  void unmap_ready() {
    auto const now = clock::now();
    if (decided_ < begun_ && now < unmapped_at_ + together) {
      return;  // more come
    }
    unmapped_at_ = ready_.empty() ? unmapped_at_ : now;
    for (std::size_t first = 0; first < ready_.size();) {
      auto end = first + 1;
      while (end < ready_.size() && ready_[end] == ready_[end - 1] + 1 &&
             of_.follows(going_[ready_[end]], going_[ready_[end - 1]])) {
        ++end;
      }
      of_.unmap(std::span{going_}.subspan(ready_[first], end - first), give_);
      first = end;
    }
    ready_.clear();
  }

  void decide(std::size_t number, std::function<bool()> const& goes_on) {
    auto& at = going_[number];
    if (at.hash && at.hash->zero()) {
      if (auto const kept = of_.take_kept(at)) {
        of_.share_.copies().give_back(kept->slot);
      }
      ready_.push_back(number);
      return;
    }
    if (!of_.find_slot(at)) {
      of_.restore(at);
      return;  // it stays
    }
    if (at.is_clean) {
      ready_.push_back(number);
      return;
    }
    bool const to_disk = of_.is_on_disk(*at.copy);
    if (to_disk && !goes_on()) {
      of_.share_.copies().give_back(*std::exchange(at.copy, std::nullopt));
      of_.restore(at);
      return;
    }
    at.stage = to_disk ? of_.take_stage() : nullptr;
    copying_.push_back(number);
    of_.transfer_->out(to_disk ? at.stage : of_.share_.at(at.copy->slot).data(),
                       at.aside != nullptr ? at.aside : at.of->at(at.position),
                       of_.memory_.shape().chunk_bytes);
  }

  bool finish_some() {
    auto const ended = of_.transfer_->poll();
    for (std::size_t i = 0; i < ended; ++i) {
      auto& at = going_[copying_.front()];
      copying_.pop_front();
      if (at.stage == nullptr || of_.save(at)) {
        of_.unmap({&at, 1}, give_);
      }
    }
    return ended > 0;
  }

  tenant_parking& of_;
  std::vector<place> going_;  ///< those that have gone hold nothing any more
  taker const& give_;
  std::size_t begun_ = 0;  ///< their hash, where there are any
  std::size_t decided_ = 0;
  std::deque<std::size_t> copying_;
  std::vector<std::size_t> ready_;  ///< decided, and still mapped; ascending
  clock::time_point unmapped_at_{};
};

void tenant_parking::take(std::span<chunk_space* const> spaces, std::uint32_t count,
                          taker const& give, std::function<bool()> const& goes_on,
                          taker const& chosen) {
  auto chunks = take_unused(spaces, count);
  auto const unused = chunks.size();
  auto going = choose(spaces, count - static_cast<std::uint32_t>(unused));
  if (chosen) {
    for (auto const& at : going) {
      chunks.push_back(at.of->chunk_at(at.position));
    }
    chosen(chunks);
  }
  if (unused > 0) {
    give(std::span{chunks}.first(unused));
  }
  departure{*this, std::move(going), give}.run(goes_on);
}

/// No room is needed for what nobody wrote.
std::vector<std::uint32_t> tenant_parking::take_unused(std::span<chunk_space* const> spaces,
                                                       std::uint32_t count) {
  std::vector<std::uint32_t> taken;
  taken.reserve(count);  // no chunk is lost for want of room
  std::lock_guard const lock{mutex_};
  for (auto* const of : spaces) {
    for (auto const position : of->positions(false)) {
      if (taken.size() == count) {
        return taken;
      }
      taken.push_back(0);
      of->park(position, std::span{taken}.last(1));
      parked_.push_back({of, position});
      if (own_pages_ != nullptr) {
        held_pages::vacate(of->at(position), memory_.shape().chunk_bytes);
      }
    }
  }
  return taken;
}

/// Positions that are in use.
std::vector<tenant_parking::place> tenant_parking::choose(std::span<chunk_space* const> spaces,
                                                          std::uint32_t count) {
  std::vector<place> chosen;
  std::lock_guard const lock{mutex_};
  for (auto* const of : spaces) {
    for (auto const position : of->positions(true)) {
      if (chosen.size() < count) {
        chosen.push_back({of, position});
      }
    }
  }
  return chosen;
}

/// Where the contents are while they are looked at and copied.
std::byte* tenant_parking::take_aside(place& at) {
  auto* const where = at.of->at(at.position);
  if (own_pages_ == nullptr) {
    return where;
  }
  at.aside = own_pages_->take(where, memory_.shape().chunk_bytes);
  at.is_held = true;
  return at.aside;
}

/// What was taken aside is where it was.
void tenant_parking::restore(place& at) noexcept {
  if (at.aside == nullptr) {
    return;
  }
  auto const bytes = memory_.shape().chunk_bytes;
  own_pages_->put(at.of->at(at.position), at.aside, bytes);
  own_pages_->release(at.of->at(at.position), bytes);
  own_pages_->drop(std::exchange(at.aside, nullptr), bytes);
}

/// The contents are where they are to be; positions of one space that follow each other.
void tenant_parking::unmap(std::span<place> run, taker const& give) {
  for (auto& at : run) {
    if (auto* const aside = std::exchange(at.aside, nullptr)) {
      own_pages_->drop(aside, memory_.shape().chunk_bytes);
    }
    parked_.push_back(at);  // there is room for all that there are
    at.copy.reset();
  }
  going_chunks_.resize(run.size());  // and here
  {
    std::lock_guard const lock{mutex_};
    run.front().of->park(run.front().position, going_chunks_);
  }
  give(going_chunks_);
}

bool tenant_parking::follows(place const& one, place const& other) const noexcept {
  return one.of == other.of && one.position == other.position + 1;
}

/// A slot for the contents: the one that has them already, the one that had what was there before, or another. False: there
/// is none.
bool tenant_parking::find_slot(place& at) {
  auto& copies = share_.copies();
  if (auto const kept = take_kept(at); kept && copies.hold_again(kept->slot)) {
    bool const on_disk = is_on_disk(kept->slot);
    at.is_clean = at.hash == kept->hash && (!on_disk || disk_is_usable());
    auto const better = on_disk && !at.is_clean ? slot_in(copy_place::memory) : std::nullopt;
    if (better || (on_disk && !disk_is_usable())) {
      copies.give_back(kept->slot);
      at.copy = better;
    } else {
      at.copy = kept->slot;
    }
  }
  if (!at.copy) {
    at.copy = any_slot();
  }
  return at.copy.has_value();
}

/// The copy that was kept for that position, which is then known no more; others may have taken its slot.
std::optional<tenant_parking::kept_copy> tenant_parking::take_kept(place const& at) {
  auto const found = kept_.extract(at.of->at(at.position));
  return found ? std::optional{found.mapped()} : std::nullopt;
}

/// What others have kept in memory costs them a copy; the disk would cost this tenant more, twice.
std::optional<held_copy> tenant_parking::any_slot() {
  auto& copies = share_.copies();
  if (auto const in_memory = slot_in(copy_place::memory)) {
    return in_memory;
  }
  if (auto const on_disk = disk_is_usable() ? slot_in(copy_place::disk) : std::nullopt) {
    return on_disk;
  }
  while (!kept_.empty()) {  // of what comes last, and so may be needed last
    auto const own = std::prev(kept_.end())->second.slot;
    kept_.erase(std::prev(kept_.end()));
    if (is_on_disk(own) && !disk_is_usable()) {
      copies.give_back(own);
    } else if (copies.hold_again(own)) {
      return own;
    }
  }
  return std::nullopt;
}

/// One that is free, or that others have kept.
std::optional<held_copy> tenant_parking::slot_in(copy_place where) {
  auto& copies = share_.copies();
  if (auto const free = copies.hold(1, share_.holder(), where); !free.empty()) {
    return free.front();
  }
  auto const stolen = copies.steal(1, share_.holder(), where);
  return stolen.empty() ? std::nullopt : std::optional{stolen.front()};
}

bool tenant_parking::is_on_disk(held_copy const& slot) const noexcept {
  return share_.shape().is_on_disk(slot.slot);
}

bool tenant_parking::disk_is_usable() const noexcept {
  return share_.disk() != nullptr && disk_fault_ == 0;
}

/// There is one.
std::byte* tenant_parking::take_stage() noexcept {
  auto* const stage = stages_.back();
  stages_.pop_back();
  return stage;
}

/// What is staged goes to its slot on the disk. False: it could not, and has stayed where it was.
bool tenant_parking::save(place& at) {
  auto* const stage = std::exchange(at.stage, nullptr);
  auto const began = clock::now();
  try {
    if (disk_is_usable()) {
      share_.disk()->write(share_.disk_offset(at.copy->slot), {stage, memory_.shape().chunk_bytes});
    }
  } catch (disk_error const& why) {
    disk_fault_ = why.number();
    spdlog::error("this job uses the disk of host copies no more, and loses nothing reason=\"{}\"",
                  why.what());
  }
  stages_.push_back(stage);  // there is room for all that there are
  if (disk_fault_ != 0) {
    share_.copies().give_back(*std::exchange(at.copy, std::nullopt));
    restore(at);
    return false;
  }
  written_.time += clock::now() - began;
  ++written_.chunks;
  return true;
}

/// Where contents lie that have been read from the disk. A stage is free.
std::byte* tenant_parking::load(place const& at) {
  auto const bytes = memory_.shape().chunk_bytes;
  auto const began = clock::now();
  try {
    share_.disk()->read(share_.disk_offset(at.copy->slot), {stages_.back(), bytes});
  } catch (disk_error const& why) {
    throw contents_lost{why.what()};
  }
  read_.time += clock::now() - began;
  ++read_.chunks;
  return take_stage();
}

/// When the contents are on the device again.
void tenant_parking::keep_or_drop(place const& at) noexcept {
  if (!at.copy) {
    return;
  }
  auto& copies = share_.copies();
  try {
    if (at.hash && at.of->is_in_use(at.position)) {
      kept_.insert_or_assign(at.of->at(at.position), kept_copy{*at.copy, *at.hash});
      if (copies.keep(*at.copy)) {
        return;
      }
      kept_.erase(at.of->at(at.position));
    }
  } catch (std::bad_alloc const&) {  // then it is copied once more
  }
  copies.give_back(*at.copy);
}

std::optional<std::uint32_t> tenant_parking::lost() const {
  for (auto const& at : parked_) {
    if (!at.copy) {
      continue;
    }
    auto const word = share_.copies().at(at.copy->slot);
    if (word.state != copy_state::held || word.holder != at.copy->holder ||
        word.generation != at.copy->generation) {
      return at.copy->slot;
    }
  }
  return std::nullopt;
}

/// The end of the places from `first` on that follow each other, as many as can be copied at once.
std::size_t tenant_parking::run_from(std::size_t first) const noexcept {
  auto end = first + 1;
  while (end < parked_.size() && end - first < chunk_transfer::window &&
         follows(parked_[end], parked_[end - 1])) {
    ++end;
  }
  return end;
}

void tenant_parking::note_ended(std::size_t copies) {
  for (; copies > 0; --copies) {
    if (auto* const stage = coming_.front()) {
      stages_.push_back(stage);
    }
    coming_.pop_front();
  }
}

/// Until fewer copies back are on their way.
void tenant_parking::await_copies_below(std::size_t count) {
  while (coming_.size() >= count) {
    auto const ended = transfer_->poll();
    note_ended(ended);
    if (ended == 0) {
      std::this_thread::yield();
    }
  }
}

/// Begins to bring back what lived in a chunk that is mapped there.
void tenant_parking::refill(place const& at, std::uint32_t chunk, bool in_use) {
  auto const bytes = memory_.shape().chunk_bytes;
  auto* const where = at.of->at(at.position);
  if (own_pages_ != nullptr) {
    if (in_use) {  // else it is zero as soon as nobody is held
      auto* const stage = is_on_disk(*at.copy) ? load(at) : nullptr;
      own_pages_->put(where, stage != nullptr ? stage : share_.at(at.copy->slot).data(), bytes);
      if (stage != nullptr) {
        stages_.push_back(stage);
      }
    }
    return;
  }
  if (!in_use) {
    memory_.scrub(where, {&chunk, 1});
    return;
  }
  bool const on_disk = is_on_disk(*at.copy);
  await_copies_below(chunk_transfer::window);
  while (on_disk && stages_.empty()) {
    await_copies_below(coming_.size());
  }
  auto* const stage = on_disk ? load(at) : nullptr;
  coming_.push_back(stage);
  transfer_->in(where, stage != nullptr ? stage : share_.at(at.copy->slot).data(), bytes);
}

void tenant_parking::bring_back(std::span<std::uint32_t const> chunks) {
  if (chunks.size() != parked_.size()) {
    throw error{error_kind::invalid_argument,
                std::to_string(parked_.size()) + " chunks are parked, and " +
                    std::to_string(chunks.size()) + " have come for them"};
  }
  std::sort(parked_.begin(), parked_.end(), [](place const& one, place const& other) {
    return one.of != other.of ? std::less<>{}(one.of, other.of) : one.position < other.position;
  });
  auto const bytes = memory_.shape().chunk_bytes;
  read_ = {};
  std::size_t mapped = 0;
  try {
    while (mapped < parked_.size()) {
      auto const first = mapped;
      auto const end = run_from(first);
      auto const run = chunks.subspan(first, end - first);
      std::array<bool, chunk_transfer::window> in_use{};
      {
        std::lock_guard const lock{mutex_};
        parked_[first].of->unpark(parked_[first].position, run);
        mapped = end;
        for (auto i = first; i < end; ++i) {
          in_use[i - first] = parked_[i].copy && parked_[i].of->is_in_use(parked_[i].position);
        }
      }
      for (auto i = first; i < end; ++i) {
        refill(parked_[i], run[i - first], in_use[i - first]);
      }
    }
    await_copies_below(1);
  } catch (...) {
    transfer_->abandon();
    note_ended(coming_.size());
    std::lock_guard const lock{mutex_};
    for (std::size_t i = 0; i < mapped; ++i) {
      std::uint32_t chunk = 0;
      parked_[i].of->park(parked_[i].position, {&chunk, 1});
    }
    throw;
  }
  for (auto const& each : parked_) {
    if (each.is_held) {
      own_pages_->release(each.of->at(each.position), bytes);
    }
  }
  {
    std::lock_guard const lock{mutex_};
    for (auto const& each : parked_) {
      keep_or_drop(each);
    }
  }
  parked_.clear();
  written_ = {};
}

}  // namespace sluice::memhandover
