#include "runtime/step/training_memory.hpp"

#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "memhandover/bytes.hpp"
#include "memhandover/chunk_choice.hpp"
#include "memhandover/error.hpp"
#include "memhandover/pool_account.hpp"

namespace sluice::step {
namespace {

using memhandover::chunk_space;
using memhandover::monotonic_ns;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// How long an allocation waits for the pool's writer. It answers within microseconds unless it has
/// just died.
constexpr milliseconds grant_patience{2000};
/// How long persistent memory that the server holds is waited for: the server's idle timeouts are
/// seconds. Afterwards the job hears that it is out of memory.
constexpr std::chrono::seconds persistent_patience{60};
/// How long the control thread waits for launches to end before it gives nothing: longer than any
/// unit it may meet.
constexpr std::int64_t drain_patience_ns = 2'000'000'000;
/// On CUDA idle persistent chunks go where the arena can have them once they have not been needed
/// while so many micro-batches were committed, or waited for memory in vain. What the optimizer and caches give back and ask for again would
/// otherwise be missing then, and settle among the arena's chunks, where it parts neighbours.
constexpr std::uint32_t turns_to_miss_idle = 64;
/// Chunks that are mapped and zeroed while the lock is held: on a GPU 8 take some 0.3 ms.
constexpr std::uint32_t most_at_once = 8;

thread_local bool commits_here = false;

std::uint32_t still_missing(std::uint32_t wanted, std::vector<std::uint32_t> const& given) {
  return wanted - std::min(wanted, static_cast<std::uint32_t>(given.size()));
}

}  // namespace

training_memory::training_memory(options how) : options_(std::move(how)) {
  client_ = memhandover::training_client::join(
      options_.broker, options_.name,
      [this](memhandover::demand const& wanted) { return answer(wanted); });
  try {
    std::lock_guard const lock{mutex_};
    memory_ = memhandover::open_device_memory(client_->view().shape(), client_->files().chunks,
                                              options_.driver);
    auto const chunks = client_->view().shape().chunk_count;
    needs_scrub_.resize(chunks);
    notes_.emplace(client_->view(), client_->slot());
    history_.emplace(client_->view(), client_->slot());
    persistent_ =
        std::make_unique<space>(*memory_, chunks, options_.alignment, options_.persistent);
    persistent_->record_in(*history_, "persistent", 0);
    arena_ = new_arena(generation_.load());
  } catch (...) {
    client_.reset();  // its thread uses what is destroyed with this object
    throw;
  }
}

training_memory::~training_memory() {
  std::vector<std::unique_ptr<space>> ending;
  {
    std::unique_lock lock{mutex_};
    unmapped_.wait(lock, [this] {
      return !arena_->awaits_unmapping() &&
             std::none_of(retired_.begin(), retired_.end(),
                          [](auto const& old) { return old->awaits_unmapping(); });
    });
    phase_ = phase::idle;
    ending.push_back(std::move(arena_));
    ending.push_back(std::move(persistent_));
    for (auto* list : {&retired_, &promoted_}) {
      std::move(list->begin(), list->end(), std::back_inserter(ending));
      list->clear();
    }
  }
  commit_ended_.notify_all();
  ending.clear();
  client_.reset();  // ends the thread that uses what is destroyed next
}

bool training_memory::committing() noexcept {
  return commits_here;
}

std::unique_ptr<chunk_space> training_memory::new_arena(std::uint64_t generation) {
  auto const chunks = client_->view().shape().chunk_count;
  auto arena = std::make_unique<space>(*memory_, chunks, options_.alignment, space::backing::pool,
                                       options_.gate != nullptr ? chunks : 0);
  arena->record_in(*history_, "arena", generation);
  return arena;
}

void training_memory::begin() {
  std::lock_guard const lock{mutex_};
  if (arena_->is_lost()) {
    replace_arena(retired_);
    if (options_.gate != nullptr) {
      options_.gate->abort_end();  // the last micro-batch was left without a word
    }
  }
  drop_empty(promoted_);
  let_idle_go();
  exchange_idle();
  state_.store(arena_state::sound, std::memory_order_release);
  phase_ = phase::running;
  peak_ = arena_->ranges().used();
  began_empty_ = peak_ == 0;
}

/// Persistent chunks that nothing has needed for a while, to where the arena can have them: on the host
/// all that are idle, because blocks come and go there one by one, and everywhere those that are idle
/// before the first micro-batch, because they served to set the job up.
void training_memory::let_idle_go() {
  auto const idle = persistent_->idle_chunks();
  bool const all = options_.gate == nullptr || turns_ == 0;
  if (all || turns_ >= idle_go_at_) {
    keep_spare(persistent_->shrink(all ? idle : std::min(idle, least_idle_)));
    least_idle_ = persistent_->idle_chunks();
    turns_ = std::max<std::uint64_t>(turns_, 1);
    idle_go_at_ = turns_ + turns_to_miss_idle;
  }
}

/// Idle persistent chunks that lie among the arena's, for ones nearer to the pool's end, if there are
/// such without a mapping. A chunk lies badly when memory had to be had while the server held the rest.
void training_memory::exchange_idle() {
  if (options_.gate == nullptr || persistent_->idle_chunks() == 0 || spare_.empty()) {
    return;
  }
  auto const chunks = persistent_->chunks();
  auto const idle = chunks.last(persistent_->idle_chunks());
  if (*std::min_element(idle.begin(), idle.end()) >
      *std::max_element(spare_.begin(), spare_.end())) {
    return;
  }
  auto const count = persistent_->idle_chunks();
  keep_spare(persistent_->shrink(count));
  map_spare(*persistent_, count);
}

bool training_memory::commit_begin() {
  std::lock_guard const lock{mutex_};
  if (state_.load(std::memory_order_relaxed) != arena_state::sound) {
    return false;
  }
  phase_ = phase::committing;
  commits_here = true;
  return true;
}

void training_memory::commit_end(bool outlived) {
  {
    std::lock_guard const lock{mutex_};
    phase_ = phase::idle;
    commits_here = false;
    ++turns_;
    // On the host every tensor is an allocation of its own, so one that is left outlives its
    // micro-batch. On CUDA what is left are the segments that torch's allocator keeps for the next
    // one, and only torch knows whether something lives in them.
    if ((options_.gate == nullptr || outlived) && arena_->ranges().live() > 0) {
      replace_arena(promoted_);
    }
    publish();
  }
  commit_ended_.notify_all();
}

void training_memory::discard() {
  {
    std::lock_guard const lock{mutex_};
    phase_ = phase::idle;
    commits_here = false;
    if (arena_->is_lost()) {
      replace_arena(retired_);
    } else if (options_.gate == nullptr && arena_->ranges().live() > 0) {
      replace_arena(promoted_);
    }
    state_.store(arena_state::sound, std::memory_order_release);
    publish();
    if (options_.gate != nullptr) {
      options_.gate->abort_end();
    }
  }
  commit_ended_.notify_all();
}

/// Puts the arena away among `old` and begins another.
void training_memory::replace_arena(std::vector<std::unique_ptr<space>>& old) {
  auto fresh = new_arena(generation_.load() + 1);
  if (!arena_->revoked()) {
    keep_spare(arena_->shrink(arena_->idle_chunks()));
  }
  old.push_back(std::exchange(arena_, std::move(fresh)));
  drop_empty(old);
  generation_.fetch_add(1, std::memory_order_acq_rel);
}

void training_memory::drop_empty(std::vector<std::unique_ptr<space>>& spaces) {
  std::erase_if(spaces, [this](std::unique_ptr<space> const& candidate) {
    if (candidate->ranges().live() > 0 || candidate->awaits_unmapping()) {
      return false;
    }
    if (!candidate->revoked()) {
      keep_spare(candidate->shrink(candidate->idle_chunks()));
    }
    return true;
  });
}

std::uint64_t training_memory::survivors() const {
  std::lock_guard const lock{mutex_};
  std::uint64_t count = 0;
  for (auto const& old : retired_) {
    count += old->ranges().live();
  }
  return count;
}

std::uint64_t training_memory::peak_bytes() const {
  std::lock_guard const lock{mutex_};
  return peak_;
}

std::uint64_t training_memory::starved_bytes() const {
  std::lock_guard const lock{mutex_};
  return starved_bytes_;
}

std::uint64_t training_memory::capacity_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const chunks =
      arena_->chunks().size() + unused() + client_->view().header().grantable.load();
  return chunks * client_->view().shape().chunk_bytes;
}

bool training_memory::wait_capacity(std::uint64_t bytes, milliseconds patience) {
  auto const chunk = client_->view().shape().chunk_bytes;
  std::uint64_t own = 0;
  {
    std::lock_guard const lock{mutex_};
    own = (arena_->chunks().size() + unused()) * chunk;
  }
  if (own > bytes) {
    return true;
  }
  auto const missing = static_cast<std::uint32_t>((bytes - own) / chunk + 1);
  if (client_->wait_grantable(missing, steady_clock::now() + patience)) {
    return true;
  }
  std::lock_guard const lock{mutex_};
  ++turns_;
  let_idle_go();
  return false;
}

std::byte* training_memory::allocate_arena(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  for (;;) {
    if (arena_->is_lost()) {
      // Nothing that the device is given now is done. A refusal here would be taken for a shortage
      // by libraries that then settle for another kernel, with other rounding, and remember it.
      if (auto* const address =
              options_.gate != nullptr ? arena_->allocate_unbacked(bytes) : nullptr) {
        return address;
      }
      throw error{
          error_kind::cancelled,
          "this micro-batch's memory has gone to the inference server; it will be run again"};
    }
    if (auto* const address = arena_->allocate(bytes)) {
      peak_ = std::max(peak_, arena_->ranges().used());
      return address;
    }
    auto* const before = arena_.get();
    if (fill(*arena_, bytes, lock) || arena_.get() != before || arena_->revoked()) {
      continue;
    }
    starved_bytes_ = starved_in(bytes);
    state_.store(arena_state::starved, std::memory_order_release);
    if (options_.gate != nullptr && phase_ == phase::running) {
      options_.gate->abort_begin();
      if (auto* const address = arena_->allocate_unbacked(bytes)) {
        return address;
      }
    }
    throw error{error_kind::out_of_memory, "the step arena holds " +
                                               format_bytes(arena_->ranges().used()) +
                                               " and cannot get " + format_bytes(bytes) +
                                               " more from the pool at present: " + shortage()};
  }
}

/// The most that this micro-batch has been shown to be too large for, once `bytes` did not fit.
std::uint64_t training_memory::starved_in(std::size_t bytes) const {
  auto const shape = client_->view().shape();
  // What an earlier micro-batch has left may lie in the way; in an arena that began empty, all of
  // the pool would not have done.
  if (began_empty_ && arena_->chunks_needed(bytes) > arena_->room()) {
    return shape.bytes();
  }
  return (arena_->chunks().size() + unused()) * shape.chunk_bytes;
}

std::byte* training_memory::allocate_persistent(std::size_t bytes) {
  std::unique_lock lock{mutex_};
  auto const deadline = steady_clock::now() + persistent_patience;
  for (;;) {
    if (auto* const address = persistent_->allocate(bytes)) {
      least_idle_ = std::min(least_idle_, persistent_->idle_chunks());
      return address;
    }
    if (!fill(*persistent_, bytes, lock) && !await_persistent(bytes, deadline, lock)) {
      throw error{error_kind::out_of_memory,
                  "cannot get " + format_bytes(bytes) + " of persistent memory: " + shortage()};
    }
  }
}

/// Gets hold of chunks for `bytes` of persistent memory where the pool has none to grant: what the
/// arena does not use itself, else what the server gives back before the deadline. False: there
/// will be none.
bool training_memory::await_persistent(std::size_t bytes, steady_clock::time_point deadline,
                                       std::unique_lock<std::mutex>& lock) {
  auto const needed = persistent_->chunks_needed(bytes);
  if (needed > persistent_->room()) {
    return false;
  }
  auto const wanted = [&] {
    if (spare_.size() < needed && !arena_->revoked()) {
      // All of them, so that those at the pool's end can be chosen.
      keep_spare(arena_->shrink(arena_->idle_chunks()));
    }
    return needed - std::min(needed, static_cast<std::uint32_t>(spare_.size()));
  }();
  if (wanted == 0) {
    return true;
  }
  bool const server_is_there = client_->view().header().serving_now.load() != 0;
  lock.unlock();
  bool const granted = server_is_there && client_->wait_grantable(wanted, deadline);
  lock.lock();
  return granted;
}

/// Waits until the control thread has answered what it is being asked.
void training_memory::let_demands_pass(std::unique_lock<std::mutex>& lock) {
  if (!commits_here) {  // the demand may be waiting for that commit
    (void)demand_answered_.wait_for(lock, std::chrono::nanoseconds{drain_patience_ns},
                                    [this] { return demands_waiting_ == 0; });
  }
}

/// Maps chunks into `where`, so that `bytes` fit sooner or later; false if there are too few. The lock
/// is let go while the pool is asked.
bool training_memory::fill(space& where, std::size_t bytes, std::unique_lock<std::mutex>& lock) {
  let_demands_pass(lock);
  if (where.is_lost()) {
    return true;  // that is what the demand took
  }
  auto needed = where.chunks_needed(bytes);
  if (needed > where.room()) {
    return false;
  }
  bool const lasting = &where == persistent_.get();
  if (spare_.size() < needed) {
    unmapped_.wait(lock, [this] { return unmapping_ == 0; });
  }
  if (auto const asked = to_ask_for(needed, lasting); asked > 0) {
    auto const answered = demands_answered_;
    lock.unlock();
    client_->ask(std::max(asked, options_.grow_by),
                 lasting ? memhandover::lifetime::lasting : memhandover::lifetime::revocable,
                 steady_clock::now() + grant_patience);
    lock.lock();
    collect_granted();
    if (demands_answered_ != answered) {
      return true;  // it may have had what was granted here: look again
    }
    if (!lasting && options_.gate != nullptr) {
      keep_spare(persistent_->shrink(short_for_good(needed)));
    }
    if (spare_.size() < needed) {
      return false;
    }
    if (where.chunks_needed(bytes) != needed || where.revoked()) {
      return true;  // others were here meanwhile: look again
    }
  }
  // A few at a time, between which a demand gets its turn.
  map_spare(where, std::min(needed, most_at_once));
  publish();
  return true;
}

/// Maps so many chunks that are at hand into `where`: neighbours together, so that one mapping covers a
/// run of them, and what stays at the pool's end, where the ledger's writer grants it too.
void training_memory::map_spare(space& where, std::uint32_t needed) {
  bool const lasting = &where == persistent_.get();
  std::sort(spare_.begin(), spare_.end());
  auto const first = lasting ? spare_.end() - static_cast<std::ptrdiff_t>(needed) : spare_.begin();
  auto const last = first + static_cast<std::ptrdiff_t>(needed);
  std::vector<std::uint32_t> const taken(first, last);
  auto* const at = where.base() + where.chunks().size() * memory_->shape().chunk_bytes;
  where.grow(taken);
  spare_.erase(first, last);
  try {
    scrub_new(at, taken, where.holds_private_pages());
  } catch (...) {
    keep_spare(where.shrink(needed));  // nobody may have it unscrubbed
    throw;
  }
  notes_->say(taken, lasting ? "persistent" : "arena");
}

/// How many chunks the pool is asked for when `needed` are to be mapped: what is missing, and for
/// lasting memory what lies nearer to the pool's end than chunks at hand.
std::uint32_t training_memory::to_ask_for(std::uint32_t needed, bool lasting) const {
  auto const missing = needed - std::min(needed, static_cast<std::uint32_t>(spare_.size()));
  if (!lasting || options_.gate == nullptr) {
    return missing;
  }
  auto const& view = client_->view();
  std::vector<bool> at_hand(view.shape().chunk_count);
  for (auto const chunk : spare_) {
    at_hand.at(chunk) = true;
  }
  std::uint32_t better = 0;
  std::uint32_t seen = 0;
  for (auto chunk = view.shape().chunk_count; chunk-- > 0 && seen < needed;) {
    bool const free = view.chunk(chunk).is_free();
    better += free ? 1 : 0;
    seen += free || at_hand[chunk] ? 1 : 0;
  }
  return std::max(missing, better);
}

/// How many chunks short of its next `needed` ones the arena would be even if the server gave
/// everything back.
std::uint32_t training_memory::short_for_good(std::uint32_t needed) const {
  auto const wanted = arena_->chunks().size() + needed + chunks_kept();
  auto const total = memory_->shape().chunk_count;
  return static_cast<std::uint32_t>(wanted - std::min<std::size_t>(wanted, total));
}

std::uint32_t training_memory::chunks_kept() const {
  auto kept = persistent_->chunks().size();
  for (auto const& old : promoted_) {
    kept += old->chunks().size();
  }
  return static_cast<std::uint32_t>(kept);
}

std::uint64_t training_memory::reachable_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const shape = memory_->shape();
  auto const needed_for_good = chunks_kept() - persistent_->idle_chunks();
  return (shape.chunk_count - std::min(shape.chunk_count, needed_for_good)) * shape.chunk_bytes;
}

/// Zeroes those of `chunks`, mapped from `at` on, that hold another's contents, or all.
void training_memory::scrub_new(std::byte* at, std::vector<std::uint32_t> const& chunks, bool all) {
  for (std::size_t i = 0; i < chunks.size();) {
    std::size_t end = i;
    while (end < chunks.size() && (all || needs_scrub_.at(chunks[end]))) {
      ++end;
    }
    if (end > i) {
      memory_->scrub(at + i * memory_->shape().chunk_bytes, std::span{chunks}.subspan(i, end - i));
      for (; i < end; ++i) {
        needs_scrub_.at(chunks[i]) = false;
      }
    }
    i = end + 1;
  }
}

bool training_memory::free(std::byte* address) {
  std::lock_guard const lock{mutex_};
  if (arena_->contains(address)) {
    return arena_->free(address) > 0;
  }
  if (persistent_->contains(address)) {
    return persistent_->free(address) > 0;  // what is idle then, `begin` sees to
  }
  for (auto* list : {&retired_, &promoted_}) {
    for (auto& candidate : *list) {
      if (candidate->contains(address)) {
        bool const freed = candidate->free(address) > 0;
        if (list == &promoted_) {
          keep_spare(candidate->shrink(candidate->idle_chunks()));
        }
        drop_empty(*list);
        publish();
        return freed;
      }
    }
  }
  return false;
}

bool training_memory::owns(void const* address) const {
  std::lock_guard const lock{mutex_};
  auto holds = [address](std::unique_ptr<space> const& candidate) {
    return candidate->contains(address);
  };
  return holds(arena_) || holds(persistent_) ||
         std::any_of(retired_.begin(), retired_.end(), holds) ||
         std::any_of(promoted_.begin(), promoted_.end(), holds);
}

bool training_memory::is_promoted(void const* address) const {
  std::lock_guard const lock{mutex_};
  return std::any_of(promoted_.begin(), promoted_.end(),
                     [address](auto const& candidate) { return candidate->contains(address); });
}

std::pair<std::byte*, std::size_t> training_memory::persistent_range(std::byte* address) const {
  std::lock_guard const lock{mutex_};
  if (!persistent_->contains(address)) {
    return {nullptr, 0};
  }
  auto const range =
      persistent_->ranges().containing(static_cast<std::size_t>(address - persistent_->base()));
  return range ? std::pair{persistent_->base() + range->first, range->second}
               : std::pair{static_cast<std::byte*>(nullptr), std::size_t{0}};
}

std::string training_memory::shortage() const {
  auto const& view = client_->view();
  auto const slot = client_->slot();
  return memhandover::account_of(view, slot) +
         ". What would help: " + memhandover::remedies(view, slot) + '.';
}

std::uint64_t training_memory::persistent_free_bytes() const {
  std::lock_guard const lock{mutex_};
  auto const idle = arena_->revoked() ? 0 : arena_->idle_chunks();
  auto const chunks = unused() + idle + client_->view().header().grantable.load();
  return persistent_->ranges().capacity() - persistent_->ranges().used() +
         chunks * memory_->shape().chunk_bytes;
}

void training_memory::keep_spare(std::vector<std::uint32_t> const& chunks) {
  notes_->say(chunks, "spare");
  spare_.insert(spare_.end(), chunks.begin(), chunks.end());
}

void training_memory::collect_granted() {
  std::vector<std::uint32_t> dirty;
  keep_spare(client_->collect(&dirty));
  for (auto const chunk : dirty) {
    needs_scrub_.at(chunk) = true;
  }
}

/// Chunks that nothing uses: those without a mapping, then the idle ends of arena and persistent
/// memory.
void training_memory::take_idle(std::uint32_t count, std::vector<std::uint32_t>& given) {
  hand_over(count, spare_, given);
  auto missing = [&] { return still_missing(count, given); };
  for (auto* candidate : {arena_.get(), persistent_.get()}) {
    if (missing() > 0 && !candidate->revoked()) {
      auto const idle = candidate->shrink(missing(), space::unmapping::soon);
      given.insert(given.end(), idle.begin(), idle.end());
    }
  }
}

/// Moves `count` chunks, or all, from `from` to `given`. It may be more, where only that makes the
/// server find neighbours: what it need not map at a second address it has at once.
void training_memory::hand_over(std::uint32_t count, std::vector<std::uint32_t>& from,
                                std::vector<std::uint32_t>& given) const {
  auto const& view = client_->view();
  std::vector<bool> free(view.shape().chunk_count);
  for (std::uint32_t chunk = 0; chunk < view.shape().chunk_count; ++chunk) {
    free[chunk] = view.chunk(chunk).is_free();
  }
  for (auto const chunk : given) {
    free.at(chunk) = true;
  }
  std::sort(from.begin(), from.end());
  auto const chosen = memhandover::choose_chunks_to_give(from, free, count);
  std::vector<std::uint32_t> kept;
  std::set_difference(from.begin(), from.end(), chosen.begin(), chosen.end(),
                      std::back_inserter(kept));
  given.insert(given.end(), chosen.begin(), chosen.end());
  from = std::move(kept);
}

/// On the control thread.
memhandover::demand_answer training_memory::answer(memhandover::demand const& wanted) {
  auto* const gate = options_.gate;
  demands_waiting_.fetch_add(1);
  auto const passed = [this, gate, &wanted](training_memory*) {
    {
      std::lock_guard const lock{mutex_};
      demands_waiting_.fetch_sub(1);
    }
    demand_answered_.notify_all();
    if (gate != nullptr) {
      gate->demand_answered(wanted);
    }
  };
  // Whatever happens here, nobody stays held for it.
  std::unique_ptr<training_memory, decltype(passed)> const turn{this, passed};
  auto given = give_up(wanted);
  auto const seen = gate != nullptr ? gate->demand_seen_ns() : 0;
  given.noticed_ns = seen > 0 ? std::min(seen, wanted.awake_ns) : wanted.awake_ns;
  tell_history(given);
  return given;
}

/// Has the history told what goes, when the server need not wait for it.
void training_memory::tell_history(memhandover::demand_answer& of) {
  of.afterwards = [this, given = of.chunks, others = std::move(of.afterwards)] {
    {
      std::lock_guard const lock{mutex_};
      history_->tell(memhandover::happening::given, given);
    }
    if (others) {
      others();
    }
  };
}

memhandover::demand_answer training_memory::give_up(memhandover::demand const& wanted) {
  memhandover::demand_answer answer;
  std::unique_lock lock{mutex_};
  if (arena_ == nullptr) {
    answer.closed_ns = answer.idle_ns = monotonic_ns();
    return answer;  // still being set up: there is nothing to give
  }
  if (phase_ == phase::committing) {
    // A commit is short, and what it adds up must not be lost. A compute pause lets it through
    // meanwhile.
    urgent_.store(true, std::memory_order_release);
    if (options_.gate != nullptr) {
      options_.gate->set_urgent(true);
    }
    commit_ended_.wait(lock, [this] { return phase_ != phase::committing; });
    urgent_.store(false, std::memory_order_release);
    if (options_.gate != nullptr) {
      options_.gate->set_urgent(false);
    }
  }
  ++demands_answered_;
  collect_granted();  // a thread may not have come back for it yet
  auto* const gate = options_.gate;
  answer.closed_ns = answer.idle_ns = monotonic_ns();
  if (gate == nullptr) {
    take_idle(wanted.chunks, answer.chunks);
    answer.afterwards = [this] { memory_->sweep(); };
  } else if (spare_.size() >= wanted.chunks) {
    hand_over(wanted.chunks, spare_, answer.chunks);
  }
  auto const missing = still_missing(wanted.chunks, answer.chunks);
  if (missing > 0 && !arena_->chunks().empty() && !arena_->revoked()) {
    try {
      if (gate == nullptr) {
        revoke_arena(divide(missing, answer.chunks), answer);
      } else {
        take_arena_behind_gate(missing, lock, answer);
      }
    } catch (error const& why) {
      // What has been taken already is the server's; the arena is as it was.
      spdlog::error("the arena could not be taken away reason=\"{}\"", why.what());
    }
  }
  if (answer.chunks.empty()) {
    hand_over(wanted.chunks, spare_, answer.chunks);  // less than was asked for, but all there is
  }
  publish();
  return answer;
}

/// Which of the arena's chunks go if the arena is taken and the server needs `count`. On CUDA those
/// without a mapping are taken into account as well, so that neighbours are found among all of them.
training_memory::division training_memory::divide(std::uint32_t count,
                                                  std::vector<std::uint32_t> const& given) const {
  division result;
  result.arena = arena_->chunks().size();
  result.spare = spare_.size();
  result.generation = generation();
  result.kept.assign(arena_->chunks().begin(), arena_->chunks().end());
  if (options_.gate != nullptr) {
    result.kept.insert(result.kept.end(), spare_.begin(), spare_.end());
  }
  result.given = given;
  hand_over(count, result.kept, result.given);
  if (phase_ == phase::running) {
    std::vector<bool> live(client_->view().shape().chunk_count);
    for (auto const chunk : arena_->chunks()) {
      live.at(chunk) = true;
    }
    result.live = static_cast<std::uint32_t>(
        std::count_if(result.given.begin(), result.given.end(),
                      [&live](std::uint32_t chunk) { return live.at(chunk); }));
  }
  return result;
}

/// Takes the arena. On CUDA the mappings are removed, and the gate opened, afterwards.
void training_memory::revoke_arena(division parts, memhandover::demand_answer& answer) {
  auto* const gate = options_.gate;
  auto* const victim = arena_.get();
  (void)victim->revoke(gate == nullptr);
  state_.store(arena_state::revoked, std::memory_order_release);
  answer.chunks = std::move(parts.given);
  answer.live_chunks = parts.live;
  auto& kept = parts.kept;
  if (gate == nullptr) {
    keep_spare(kept);
    return;
  }
  spare_.clear();
  unmapping_ = static_cast<std::uint32_t>(kept.size());
  answer.afterwards = [this, victim, gate, kept = std::move(kept)] {
    {
      std::lock_guard const again{mutex_};
      victim->finish_revoke();
      keep_spare(kept);
      unmapping_ = 0;
      if (arena_.get() == victim && phase_ == phase::running) {
        gate->abort_begin();  // until `discard`; if that has been called already there is nothing
                              // left to abort
      }
      gate->open();
      drop_empty(retired_);
      publish();
    }
    unmapped_.notify_all();
  };
}

/// Closes the gate, waits until nothing runs, and takes the arena.
void training_memory::take_arena_behind_gate(std::uint32_t count,
                                             std::unique_lock<std::mutex>& lock,
                                             memhandover::demand_answer& answer) {
  auto* const gate = options_.gate;
  auto const deadline = monotonic_ns() + drain_patience_ns;
  division parts;
  for (;;) {
    lock.unlock();  // a thread inside a launch may need this lock to get out
    bool const closed = gate->close(deadline);
    answer.closed_ns = monotonic_ns();
    if (closed) {
      lock.lock();
      parts = divide(count, answer.chunks);  // while the device still runs
      lock.unlock();
    }
    bool const idle = closed && gate->wait_idle(deadline);
    answer.idle_ns = monotonic_ns();
    answer.unit_ended_ns = idle ? gate->unit_ended_ns() : 0;
    lock.lock();
    if (closed && idle && phase_ != phase::committing) {
      break;
    }
    if (closed) {
      gate->open();
    }
    if (!closed || !idle) {
      return;
    }
    commit_ended_.wait(lock,
                       [this] { return phase_ != phase::committing; });  // it began in between
  }
  if (arena_->chunks().empty() || arena_->revoked()) {
    gate->open();
    return;
  }
  // Memory is allocated beside a closed gate as well.
  bool const as_it_was = parts.arena == arena_->chunks().size() && parts.spare == spare_.size() &&
                         parts.generation == generation();
  revoke_arena(as_it_was ? std::move(parts) : divide(count, answer.chunks), answer);
}

void training_memory::publish() {
  auto& box = client_->mailbox();
  box.arena_chunks.store(static_cast<std::uint32_t>(arena_->chunks().size()) + unused(),
                         std::memory_order_relaxed);
  box.spare_chunks.store(unused(), std::memory_order_relaxed);
  box.persistent_chunks.store(chunks_kept(), std::memory_order_relaxed);
}

void training_memory::before_fork() {
  mutex_.lock();
  auto const chunk = memory_->shape().chunk_bytes;
  auto copy = [&](space& shared) {
    if (shared.revoked() || shared.ranges().live() == 0) {
      return;
    }
    auto const bytes = shared.chunks().size() * chunk;
    void* const twin = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (twin != MAP_FAILED) {
      shared.ranges().for_each([&](std::size_t offset, std::size_t size) {
        std::memcpy(static_cast<std::byte*>(twin) + offset, shared.base() + offset, size);
      });
      fork_copies_.emplace_back(&shared, static_cast<std::byte*>(twin));
    }
  };
  // Persistent memory lies in private pages already.
  copy(*arena_);
  for (auto& old : promoted_) {
    copy(*old);
  }
}

void training_memory::after_fork_in_parent() {
  for (auto const& [shared, twin] : fork_copies_) {
    ::munmap(twin, shared->chunks().size() * memory_->shape().chunk_bytes);
  }
  fork_copies_.clear();
  mutex_.unlock();
}

void training_memory::after_fork_in_child() {
  for (auto const& [shared, twin] : fork_copies_) {
    auto const bytes = shared->chunks().size() * memory_->shape().chunk_bytes;
    ::mremap(twin, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, shared->base());
  }
  client_->abandon_in_child();
  mutex_.unlock();
}

}  // namespace sluice::step
