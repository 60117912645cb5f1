#include "runtime/step/training_memory.hpp"

#include <spdlog/spdlog.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

namespace sluice::step {
namespace {

using memhandover::chunk_space;
using std::chrono::steady_clock;

/// On CUDA idle persistent chunks go where the arena can have them once they have not been needed
/// while so many micro-batches were committed, or waited for memory in vain. What the optimizer and
/// caches give back and ask for again would otherwise be missing then, and settle among the arena's
/// chunks, where it parts neighbours.
constexpr std::uint32_t turns_to_miss_idle = 64;

constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

thread_local bool commits_here = false;

}  // namespace

training_memory::training_memory(options how) : options_(std::move(how)) {
  client_ = memhandover::training_client::join(
      options_.broker, options_.name,
      [this](memhandover::demand const& wanted) { return answer(wanted); });
  try {
    std::lock_guard const lock{mutex_};
    memory_ = memhandover::open_device_memory(client_->view().shape(), client_->files().chunks,
                                              options_.driver);
    stock_.emplace(*client_, *memory_);
    history_.emplace(client_->view(), client_->slot());
    persistent_ = new_persistent();
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
    for (auto* list : {&retired_, &promoted_, &sparse_}) {
      std::move(list->begin(), list->end(), std::back_inserter(ending));
      list->clear();
    }
  }
  commit_changed_.notify_all();
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

std::unique_ptr<chunk_space> training_memory::new_persistent() {
  auto const chunks = client_->view().shape().chunk_count;
  auto persistent =
      std::make_unique<space>(*memory_, chunks, options_.alignment, options_.persistent);
  persistent->record_in(*history_, "persistent", 0);
  return persistent;
}

void training_memory::begin() {
  if (deferred_) {  // the last commit was left without a word
    static_cast<void>(commit_resolve(never));
  }
  static_cast<void>(await_commit(never));
  std::lock_guard const lock{mutex_};
  if (arena_->is_lost()) {
    replace_arena(retired_);
    if (options_.gate != nullptr) {
      options_.gate->abort_end();  // the last micro-batch was left without a word
    }
  }
  drop_empty(promoted_);
  drop_empty(sparse_);
  let_idle_go();
  exchange_idle();
  publish_kept();
  state_.store(arena_state::sound, std::memory_order_release);
  phase_ = phase::running;
  micro_batch_.fetch_add(1);
  others_know_ = false;
  begun_ns_ = memhandover::monotonic_ns();
  lost_ns_.reset();
  peak_ = arena_->ranges().used();
  began_empty_ = peak_ == 0;
}

/// Before the first micro-batch: what has served to set the job up goes from below what lasts as well, unless more would
/// be lost in the chunks that stay.
void training_memory::leave_sparse() {
  auto const unused = persistent_->unused();
  if (unused.chunks * memory_->shape().chunk_bytes <= unused.other_bytes) {
    return;
  }
  try {
    auto fresh = new_persistent();
    sparse_.reserve(sparse_.size() + 1);
    sparse_.push_back(std::exchange(persistent_, std::move(fresh)));
  } catch (std::exception const& why) {
    spdlog::error("memory that has served to set the job up stays reason=\"{}\"", why.what());
    return;
  }
  give_back_unused(*sparse_.back(), sparse_);
}

/// Chunks of persistent memory that the arena is not to have, which they would part: they lie at the pool's other end.
void training_memory::release_chunks(std::vector<std::uint32_t> const& chunks) {
  if (options_.gate == nullptr) {
    stock_->add(chunks);
  } else {
    client_->release(chunks);
  }
}

/// Persistent chunks that nothing has needed for a while go: on the host all that are idle, because
/// blocks come and go there one by one, and everywhere those that are idle before the first
/// micro-batch, because they served to set the job up.
void training_memory::let_idle_go() {
  auto const idle = persistent_->idle_chunks();
  bool const first = idle_go_at_ == 0;
  bool const all = options_.gate == nullptr || first;
  if (all || turns_ >= idle_go_at_) {
    release_chunks(persistent_->shrink(all ? idle : std::min(idle, least_idle_)));
    if (first) {
      leave_sparse();
    }
    least_idle_ = persistent_->idle_chunks();
    idle_go_at_ = turns_ + turns_to_miss_idle;
  }
}

/// Idle persistent chunks that lie among the arena's, for ones nearer to the pool's end, if there are
/// such without a mapping. A chunk lies badly when memory had to be had while the server held the rest.
void training_memory::exchange_idle() {
  auto const count = persistent_->idle_chunks();
  if (options_.gate != nullptr && stock_->beats(persistent_->chunks().last(count))) {
    stock_->add(persistent_->shrink(count));
    stock_->map_into(*persistent_, count, memhandover::lifetime::lasting);
  }
}

void training_memory::work_together(bool together) {
  together_.store(together);
  if (options_.gate != nullptr) {
    options_.gate->allow_inside(together);
  }
}

bool training_memory::end_with(void* communicator) {
  return options_.gate != nullptr && options_.gate->end_with(communicator);
}

void training_memory::drop_micro_batch(std::function<bool()> const& is_running) {
  std::lock_guard const lock{mutex_};
  if (phase_ != phase::running || state() != arena_state::sound || !is_running()) {
    return;
  }
  others_know_ = true;
  state_.store(arena_state::revoked, std::memory_order_release);
  lost_ns_ = lost_ns_.value_or(memhandover::monotonic_ns());
  if (options_.gate != nullptr) {
    abort_launches();
  }
}

/// Until `discard` what the micro-batch launches is dropped; mutex_ is held. Others hear of it only then:
/// nothing of it may be taken for a launch of the next try.
void training_memory::abort_launches() {
  options_.gate->abort_begin();
  notify_others();
}

/// The micro-batch that is running will run again; mutex_ is held.
void training_memory::notify_others() {
  if (together_.load() && !std::exchange(others_know_, true)) {
    computing().run_again();
  }
}

/// Reaches the commit when all processes agree to it.
bool training_memory::keep_together() {
  struct question {
    training_memory& memory;
    bool kept = false;
  } asked{*this};
  auto const keep = [](void* of) {
    auto& self = *static_cast<question*>(of);
    self.kept = self.memory.reach_commit();
  };
  return state() == arena_state::sound && options_.gate->keep(keep, &asked) && asked.kept;
}

commit_start training_memory::commit_begin(bool may_defer) {
  auto* const gate = options_.gate;
  bool const together = gate != nullptr && together_.load();
  deferred_ =
      may_defer && !together && gate != nullptr && state() == arena_state::sound &&
      gate->defer_commit(
          [](void* of) { return static_cast<training_memory*>(of)->reach_commit() ? 1 : 0; }, this);
  if (!deferred_) {
    if (gate != nullptr) {
      gate->flush();  // while the micro-batch can still be taken away
    }
    if (!(together ? keep_together() : reach_commit())) {
      return commit_start::taken_away;
    }
  }
  commits_here = true;
  return deferred_ ? commit_start::deferred : commit_start::begun;
}

/// All that the micro-batch has launched is with the device, or about to be, or has been dropped.
bool training_memory::reach_commit() noexcept {
  {
    std::lock_guard const lock{mutex_};
    if (state_.load(std::memory_order_relaxed) != arena_state::sound) {
      return false;
    }
    phase_ = phase::committing;
  }
  demand_answered_.notify_all();
  return true;
}

void training_memory::commit_end(bool outlived) {
  commits_here = false;
  auto* const gate = options_.gate;
  if (deferred_) {
    outlives_.store(outlived, std::memory_order_relaxed);
    gate->end_commit(
        [](void* of) {
          auto& self = *static_cast<training_memory*>(of);
          self.finish_commit(self.outlives_.load(std::memory_order_relaxed));
        },
        this);
    return;
  }
  if (gate != nullptr) {
    gate->flush();  // what counts as committed is with the device, and reads no arena later
  }
  finish_commit(outlived);
}

std::optional<bool> training_memory::commit_resolve(std::int64_t deadline_ns) {
  if (deferred_ && commits_here) {
    commit_end(true);  // it was left in the middle
  }
  std::optional<bool> const counts = deferred_ ? options_.gate->resolve_commit(deadline_ns) : true;
  deferred_ = deferred_ && !counts.has_value();
  return counts;
}

bool training_memory::await_commit(std::int64_t deadline_ns) {
  return options_.gate == nullptr || options_.gate->await_commit(deadline_ns);
}

void training_memory::finish_commit(bool outlived) noexcept {
  {
    std::lock_guard const lock{mutex_};
    phase_ = phase::idle;
    ++turns_;
    // On the host every tensor is an allocation of its own, so one that is left outlives its
    // micro-batch. On CUDA what is left are the segments that torch's allocator keeps for the next
    // one, and only torch knows whether something lives in them.
    if ((options_.gate == nullptr || outlived) && arena_->ranges().live() > 0) {
      try {
        replace_arena(promoted_);
      } catch (std::exception const& why) {
        spdlog::error("what has outlived a micro-batch stays in the arena reason=\"{}\"",
                      why.what());
      }
    }
    publish();
  }
  commit_changed_.notify_all();
}

void training_memory::discard() {
  {
    std::lock_guard const lock{mutex_};
    phase_ = phase::idle;
    commits_here = false;
    notify_others();
    try {
      if (arena_->is_lost()) {
        replace_arena(retired_);
      } else if (options_.gate == nullptr && arena_->ranges().live() > 0) {
        replace_arena(promoted_);
      }
    } catch (std::exception const& why) {
      // A lost one `begin` replaces.
      spdlog::error("the arena could not be replaced reason=\"{}\"", why.what());
    }
    bool const lost_still = arena_->is_lost();
    if (!lost_still) {
      state_.store(arena_state::sound, std::memory_order_release);
    }
    if (auto const lost = std::exchange(lost_ns_, std::nullopt)) {
      client_->mailbox().discarded_ns.fetch_add(static_cast<std::uint64_t>(*lost - begun_ns_));
    }
    publish();
    if (options_.gate != nullptr && !lost_still) {
      options_.gate->abort_end();
    }
  }
  commit_changed_.notify_all();
}

/// Puts the arena away among `old` and begins another.
void training_memory::replace_arena(std::vector<std::unique_ptr<space>>& old) {
  auto fresh = new_arena(generation_.load() + 1);
  old.reserve(old.size() + 1);
  if (&old == &promoted_) {
    stock_->add(arena_->close());
  } else if (!arena_->revoked()) {
    stock_->add(arena_->shrink(arena_->idle_chunks()));
  }
  old.push_back(std::exchange(arena_, std::move(fresh)));
  drop_empty(old);
  generation_.fetch_add(1, std::memory_order_acq_rel);
}

void training_memory::drop_empty(std::vector<std::unique_ptr<space>>& spaces) noexcept {
  std::erase_if(spaces, [this](std::unique_ptr<space> const& candidate) {
    if (candidate->ranges().live() > 0 || candidate->awaits_unmapping()) {
      return false;
    }
    try {
      if (!candidate->revoked()) {
        stock_->add(candidate->closed() ? candidate->close()
                                        : candidate->shrink(candidate->idle_chunks()));
      }
    } catch (std::exception const& why) {
      spdlog::error("chunks that nothing uses stay mapped reason=\"{}\"", why.what());
      return false;
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

void training_memory::publish() {
  auto& box = client_->mailbox();
  box.arena_chunks.store(static_cast<std::uint32_t>(arena_->chunks().size()) + unused(),
                         std::memory_order_relaxed);
  box.spare_chunks.store(unused(), std::memory_order_relaxed);
  box.persistent_chunks.store(chunks_kept(), std::memory_order_relaxed);
  publish_kept();
}

/// What no demand gets. The server demands nothing that cannot be had for it.
void training_memory::publish_kept() {
  client_->mailbox().kept_chunks.store(chunks_kept() - persistent_->idle_chunks(),
                                       std::memory_order_relaxed);
}

void training_memory::publish_stranded() const {
  std::lock_guard const lock{mutex_};
  client_->mailbox().stranded_chunks.store(
      persistent_->unused().chunks - persistent_->idle_chunks(), std::memory_order_relaxed);
}

void training_memory::before_fork() {
  mutex_.lock();
  try {
    fork_copies_.reserve(1 + promoted_.size());
  } catch (std::bad_alloc const&) {
    return;  // as where there are no pages for a copy
  }
  auto copy = [&](space& shared) {
    if (shared.revoked() || shared.ranges().live() == 0) {
      return;
    }
    auto const bytes = shared.bytes();
    void* const twin = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (twin != MAP_FAILED) {
      fork_copies_.emplace_back(&shared, static_cast<std::byte*>(twin));
      shared.ranges().for_each([&](std::size_t offset, std::size_t size) {
        std::memcpy(static_cast<std::byte*>(twin) + offset, shared.base() + offset, size);
      });
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
    ::munmap(twin, shared->bytes());
  }
  fork_copies_.clear();
  mutex_.unlock();
}

void training_memory::after_fork_in_child() {
  for (auto const& [shared, twin] : fork_copies_) {
    auto const bytes = shared->bytes();
    ::mremap(twin, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, shared->base());
  }
  client_->abandon_in_child();
  mutex_.unlock();
}

}  // namespace sluice::step
