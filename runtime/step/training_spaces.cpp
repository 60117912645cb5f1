#include "runtime/step/training_spaces.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>

#include "memhandover/ledger/chunk_choice.hpp"

namespace sluice::step {
namespace {

/// On CUDA idle persistent chunks go where the arena can have them once they have not been needed
/// while so many micro-batches were committed, or waited for memory in vain. What the optimizer and
/// caches give back and ask for again would otherwise be missing then, and come to lie among the arena's
/// chunks, where it parts neighbours.
constexpr std::uint32_t turns_to_miss_idle = 64;

}  // namespace

using memhandover::chunk_space;

training_spaces::training_spaces(memhandover::tenant_client& client,
                                 memhandover::device_memory& memory,
                                 memhandover::chunk_history& history, options how)
    : client_(client),
      memory_(memory),
      history_(history),
      how_(how),
      stock_(client, memory),
      persistent_(new_persistent()),
      arena_(new_arena(generation_.load())) {}

std::unique_ptr<chunk_space> training_spaces::new_arena(std::uint64_t generation) {
  auto const chunks = client_.view().shape().chunk_count;
  auto arena = std::make_unique<space>(memory_, chunks, how_.alignment, space::backing::pool,
                                       how_.on_gpu ? chunks : 0);
  arena->record_in(history_, "arena", generation);
  return arena;
}

std::unique_ptr<chunk_space> training_spaces::new_persistent() {
  auto const chunks = client_.view().shape().chunk_count;
  auto persistent = std::make_unique<space>(memory_, chunks, how_.alignment, how_.persistent);
  persistent->record_in(history_, "persistent", 0);
  return persistent;
}

bool training_spaces::owns(void const* address) const {
  auto const holds = [address](std::unique_ptr<space> const& candidate) {
    return candidate->contains(address);
  };
  auto const any_holds = [&holds](space_list const* list) {
    return std::any_of(list->begin(), list->end(), holds);
  };
  auto const kept = lists_of_kept();
  return holds(arena_) || holds(persistent_) || any_holds(&retired_) ||
         std::any_of(kept.begin(), kept.end(), any_holds);
}

bool training_spaces::is_former(void const* address) const {
  auto const holds = [address](auto const& candidate) { return candidate->contains(address); };
  return std::any_of(promoted_.begin(), promoted_.end(), holds) ||
         std::any_of(retired_.begin(), retired_.end(), holds);
}

std::pair<std::byte*, std::size_t> training_spaces::persistent_range(std::byte* address) const {
  auto const* lies_in = persistent_.get();
  for (auto const* list : {&sparse_, &pieces_}) {
    for (auto const& each : *list) {
      lies_in = each->contains(address) ? each.get() : lies_in;
    }
  }
  if (!lies_in->contains(address)) {
    return {nullptr, 0};
  }
  auto const range =
      lies_in->ranges().containing(static_cast<std::size_t>(address - lies_in->base()));
  return range ? std::pair{lies_in->base() + range->first, range->second}
               : std::pair{static_cast<std::byte*>(nullptr), std::size_t{0}};
}

std::byte* training_spaces::allocate_persistent(std::size_t bytes) {
  auto* const address = persistent_->allocate(bytes);
  if (address != nullptr) {
    least_idle_ = std::min(least_idle_, persistent_->idle_chunks());
    publish_kept();
  }
  return address;
}

chunk_space& training_spaces::begin_piece(std::size_t bytes) {
  auto const chunk = memory_.shape().chunk_bytes;
  auto const chunks = static_cast<std::uint32_t>((bytes + chunk - 1) / chunk);
  auto piece = std::make_unique<space>(memory_, chunks, how_.alignment, space::backing::pool);
  piece->record_in(history_, "virtual memory", 0);
  return *pieces_.emplace_back(std::move(piece));
}

std::byte* training_spaces::allocate_piece(space& piece, std::size_t bytes) {
  auto* const address = piece.allocate(bytes);
  if (address != nullptr) {
    publish_kept();
  }
  return address;
}

void training_spaces::end_piece(space& piece) {
  (void)piece.free(piece.base());
  release_lasting(piece.shrink(piece.idle_chunks()));
  std::erase_if(pieces_, [&piece](auto const& each) { return each.get() == &piece; });
  publish();
}

bool training_spaces::free(std::byte* address) {
  if (arena_->contains(address)) {
    return arena_->free(address) > 0;
  }
  if (persistent_->contains(address)) {
    bool const freed = persistent_->free(address) > 0;  // what is idle then, `tidy` sees to
    publish_kept();
    return freed;
  }
  for (auto* list : {&retired_, &promoted_, &sparse_}) {
    for (auto& candidate : *list) {
      if (candidate->contains(address)) {
        bool const freed = candidate->free(address) > 0;
        if (!frozen_ || list == &retired_) {
          give_back_unused(*candidate, *list);
          drop_empty(*list);
        }
        publish();
        return freed;
      }
    }
  }
  return false;
}

std::uint32_t training_spaces::idle() const {
  auto count = stock_.size();
  for (auto const* const candidate : {arena_.get(), persistent_.get()}) {
    count += candidate->revoked() ? 0 : candidate->idle_chunks();
  }
  return count;
}

std::uint32_t training_spaces::kept() const {
  auto kept = persistent_->mapped_chunks();
  for (auto const* list : lists_of_kept()) {
    for (auto const& old : *list) {
      kept += old->mapped_chunks();
    }
  }
  return kept;
}

std::uint32_t training_spaces::needed_for_good() const {
  return kept() - persistent_->idle_chunks();
}

std::uint32_t training_spaces::short_for_good(std::uint32_t needed) const {
  auto const wanted = arena_->chunks().size() + needed + kept();
  auto const total = memory_.shape().chunk_count;
  return static_cast<std::uint32_t>(wanted - std::min<std::size_t>(wanted, total));
}

std::uint64_t training_spaces::survivors() const {
  std::uint64_t count = 0;
  for (auto const& old : retired_) {
    count += old->ranges().live();
  }
  return count;
}

void training_spaces::publish() {
  auto& box = client_.mailbox();
  box.arena_chunks.store(static_cast<std::uint32_t>(arena_->chunks().size()) + unused(),
                         std::memory_order_relaxed);
  box.spare_chunks.store(unused(), std::memory_order_relaxed);
  box.persistent_chunks.store(kept(), std::memory_order_relaxed);
  publish_kept();
}

/// The server demands nothing that cannot be had for it.
void training_spaces::publish_kept() {
  auto const needed = needed_for_good();
  std::uint32_t stays = 0;
  for (auto const& one : promoted_) {
    stays += may_be_parked(*one) ? 0 : one->mapped_chunks();
  }
  client_.mailbox().parkable_chunks.store(std::min(needed - stays, parkable_),
                                          std::memory_order_relaxed);
  client_.mailbox().kept_chunks.store(needed, std::memory_order_relaxed);
}

void training_spaces::set_parkable(std::uint32_t chunks) {
  parkable_ = chunks;
  publish_kept();
}

std::vector<chunk_space*> training_spaces::lasting() const {
  std::vector<space*> found{persistent_.get()};
  for (auto const* list : lists_of_kept()) {
    for (auto const& each : *list) {
      if (may_be_parked(*each)) {
        found.push_back(each.get());
      }
    }
  }
  return found;
}

void training_spaces::publish_stranded() const {
  client_.mailbox().stranded_chunks.store(persistent_->unused().chunks - persistent_->idle_chunks(),
                                          std::memory_order_relaxed);
}

void training_spaces::retire_arena() {
  replace_arena(retired_);
}

void training_spaces::promote_arena() {
  replace_arena(promoted_);
}

void training_spaces::replace_arena(space_list& old) {
  auto fresh = new_arena(generation_.load() + 1);
  old.reserve(old.size() + 1);
  if (&old == &promoted_) {
    stock_.add(arena_->close());
  } else if (!arena_->revoked()) {
    stock_.add(arena_->shrink(arena_->idle_chunks()));
  }
  old.push_back(std::exchange(arena_, std::move(fresh)));
  drop_empty(old);
  generation_.fetch_add(1, std::memory_order_acq_rel);
}

void training_spaces::drop_empty(space_list& spaces) noexcept {
  if (frozen_ && &spaces != &retired_) {
    return;
  }
  std::erase_if(spaces, [this](std::unique_ptr<space> const& candidate) {
    if (candidate->ranges().live() > 0 || candidate->awaits_unmapping()) {
      return false;
    }
    try {
      if (!candidate->revoked()) {
        stock_.add(candidate->closed() ? candidate->close()
                                       : candidate->shrink(candidate->idle_chunks()));
      }
    } catch (std::exception const& why) {
      spdlog::error("chunks that nothing uses stay mapped reason=\"{}\"", why.what());
      return false;
    }
    return true;
  });
}

void training_spaces::tidy() {
  if (frozen_) {
    return;  // before the next one
  }
  drop_empty(promoted_);
  drop_empty(sparse_);
  release_idle();
  exchange_idle();
  publish_kept();
}

/// Before the first micro-batch: what has served to set the job up goes from below what lasts as well, unless more would
/// be lost in the chunks that stay.
void training_spaces::leave_sparse() {
  auto const unused = persistent_->unused();
  if (unused.chunks * memory_.shape().chunk_bytes <= unused.other_bytes) {
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

/// What nothing uses any more of a former space; later, where that takes more memory than there is.
void training_spaces::give_back_unused(space& of, space_list const& list) noexcept {
  try {
    if (&list == &sparse_) {
      release_lasting(of.close());
    } else if (of.closed()) {
      stock_.add(of.close());
    }
  } catch (std::exception const& why) {
    spdlog::error("chunks that nothing uses stay mapped reason=\"{}\"", why.what());
  }
}

/// Chunks of persistent memory that the arena is not to have, which they would part: they lie at the pool's other end.
void training_spaces::release_lasting(std::vector<std::uint32_t> const& chunks) {
  if (how_.on_gpu) {
    client_.release(chunks);
  } else {
    stock_.add(chunks);
  }
}

void training_spaces::release_idle() {
  if (frozen_) {
    return;
  }
  auto const idle = persistent_->idle_chunks();
  bool const first = idle_go_at_ == 0;
  bool const all = !how_.on_gpu || first;
  if (all || turns_ >= idle_go_at_) {
    release_lasting(persistent_->shrink(all ? idle : std::min(idle, least_idle_)));
    if (first) {
      leave_sparse();
    }
    least_idle_ = persistent_->idle_chunks();
    idle_go_at_ = turns_ + turns_to_miss_idle;
  }
}

/// Idle persistent chunks that lie among the arena's, for ones nearer to the pool's end, if there are
/// such without a mapping. A chunk lies badly when memory had to be had while the server held the rest.
void training_spaces::exchange_idle() {
  auto const count = persistent_->idle_chunks();
  if (how_.on_gpu && stock_.beats(persistent_->chunks().last(count))) {
    stock_.add(persistent_->shrink(count));
    stock_.map_into(*persistent_, count, memhandover::lifetime::lasting);
  }
}

void training_spaces::release_idle_arena(std::uint32_t count) {
  if (!arena_->is_lost()) {
    client_.release(arena_->shrink(std::min(count, arena_->idle_chunks())));
  }
}

bool training_spaces::release_unused() {
  auto given =
      arena_->revoked() ? std::vector<std::uint32_t>{} : arena_->shrink(arena_->idle_chunks());
  auto const stocked = stock_.chunks();
  given.insert(given.end(), stocked.begin(), stocked.end());
  stock_.clear();
  if (!given.empty()) {
    client_.release(given);
  }
  return !given.empty();
}

/// What the server need not map at a second address it has at once.
std::vector<std::uint32_t> training_spaces::choose(std::uint32_t count,
                                                   std::vector<std::uint32_t>& from,
                                                   std::vector<std::uint32_t> const& given) const {
  auto const& view = client_.view();
  std::vector<bool> free(view.shape().chunk_count);
  for (std::uint32_t chunk = 0; chunk < view.shape().chunk_count; ++chunk) {
    free[chunk] = view.chunk(chunk).is_free();
  }
  for (auto const chunk : given) {
    free.at(chunk) = true;
  }
  std::sort(from.begin(), from.end());
  return memhandover::choose_chunks_to_give(from, free, count);
}

void training_spaces::give_stock(std::uint32_t count, std::vector<std::uint32_t>& given) {
  std::vector<std::uint32_t> here{stock_.chunks().begin(), stock_.chunks().end()};
  auto const chosen = choose(count, here, given);
  given.reserve(given.size() + chosen.size());
  stock_.remove(chosen);
  given.insert(given.end(), chosen.begin(), chosen.end());
}

void training_spaces::take_idle(std::uint32_t count, std::vector<std::uint32_t>& given) {
  give_stock(count, given);
  auto const missing = [&] {
    return count - std::min(count, static_cast<std::uint32_t>(given.size()));
  };
  given.reserve(given.size() + missing());  // no chunk is lost for want of room
  for (auto* candidate : {arena_.get(), persistent_.get()}) {
    if (missing() > 0 && !candidate->revoked()) {
      auto const idle = candidate->shrink(missing(), space::unmapping::soon);
      given.insert(given.end(), idle.begin(), idle.end());
    }
  }
}

std::vector<chunk_space*> training_spaces::revocable() const {
  std::vector<space*> found;
  auto const consider = [&found](std::unique_ptr<space> const& candidate) {
    if (!candidate->chunks().empty()) {
      found.push_back(candidate.get());
    }
  };
  consider(arena_);
  std::for_each(retired_.begin(), retired_.end(), consider);
  return found;
}

void training_spaces::keep_until_unmapped(std::vector<std::uint32_t> kept) noexcept {
  stock_.clear();  // what is kept of it is among `kept`
  unmapping_ = std::move(kept);
}

bool training_spaces::awaits_unmapping() const noexcept {
  return arena_->awaits_unmapping() ||
         std::any_of(retired_.begin(), retired_.end(),
                     [](auto const& old) { return old->awaits_unmapping(); });
}

bool training_spaces::finish_unmapping() noexcept {
  auto const unmap = [](std::unique_ptr<space> const& of) {
    bool const was_left = of->awaits_unmapping();
    of->finish_revoke();
    return was_left;
  };
  bool any = unmap(arena_);
  for (auto const& old : retired_) {
    any = unmap(old) || any;
  }
  if (any) {
    stock_.add(unmapping_);
    unmapping_.clear();
  }
  return any;
}

}  // namespace sluice::step
