#include "memhandover/allocation/tensor_heap.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/allocation/detail/tensor_heap_impl.hpp"
#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::memhandover {
namespace {

using std::chrono::steady_clock;

/// How often a load decides again because a chunk that it wanted was granted to training meanwhile;
/// then it asks for chunks by number, which cannot fail that way.
constexpr int most_decisions = 3;

/// Kept stitched ranges map at most this share of the pool.
constexpr std::uint32_t kept_divisor = 4;

}  // namespace

std::optional<load_decision> tensor_heap::impl::load_into_free(model_id id, request const& wanted,
                                                               placing_way last) {
  for (int decision = 0; decision < most_decisions; ++decision) {
    std::lock_guard const lock{mutex_};
    auto made = places_.load(id, wanted.sizes, pool_->free_chunks(), wanted.lasts, last);
    try {
      if (!made || pool_->take_chunks(made->taken)) {
        return made;
      }
    } catch (...) {
      places_.unload(id);  // what lies in chunks that were never had is not given back
      throw;
    }
    places_.unload(id);
  }
  return std::nullopt;
}

/// Holes are filled last, when training has too little: a model that lies in many chunks keeps them
/// from becoming empty. Training is not asked in vain, which would cost it a micro-batch.
tensor_heap::impl::placed tensor_heap::impl::decide(model_id id, request const& wanted,
                                                    urgency const& how, handover_report& report) {
  auto const usage = pool_->usage();
  auto const chunk_bytes = pool_->shape().chunk_bytes;
  auto const suffice = places_.chunks_that_suffice(wanted.sizes);
  auto const needed = suffice * chunk_bytes;
  if (usage.free_bytes + hole_bytes() + chunk_bytes > needed) {
    if (auto made = load_into_free(id, wanted, placing_way::dense)) {
      return {std::move(*made)};
    }
  }
  if (usage.free_bytes + usage.tenant_bytes() >= needed) {
    try {
      return load_into_acquired(id, wanted, suffice, how, report);
    } catch (error const& failure) {  // some of training's memory is persistent
      if (failure.kind() != error_kind::out_of_memory) {
        throw;
      }
      if (auto made = load_into_free(id, wanted, placing_way::tight)) {
        return {std::move(*made)};
      }
      throw;
    }
  }
  if (auto made = load_into_free(id, wanted, placing_way::tight)) {
    return {std::move(*made)};
  }
  throw error{
      error_kind::out_of_memory,
      format_bytes(std::accumulate(wanted.sizes.begin(), wanted.sizes.end(), std::uint64_t{0})) +
          " are wanted but the pool has " + format_bytes(usage.free_bytes) + " free, training " +
          format_bytes(usage.training_bytes) + ", engines " + format_bytes(usage.engine_bytes) +
          ", and " + format_bytes(hole_bytes()) + " are free between other models' tensors"};
}

/// While training answers, the tensors are placed where they will probably come to lie. If other chunks
/// come they are placed again, but then code and data are in the processor's caches, which makes it
/// three times as fast.
tensor_heap::impl::placed tensor_heap::impl::load_into_acquired(model_id id, request const& wanted,
                                                                std::uint32_t count,
                                                                urgency const& how,
                                                                handover_report& report) {
  std::vector<std::uint32_t> planned;
  std::optional<load_decision> made;
  auto const plan = [&](std::span<std::uint32_t const> foreseen) {
    try {
      planned.assign(foreseen.begin(), foreseen.end());
      // Nobody is told so of a chunk before it is this server's.
      pool_->note_chunks(planned, wanted.what);
      std::lock_guard const lock{mutex_};
      made = places_.load(id, wanted.sizes, planned, wanted.lasts);
    } catch (std::exception const&) {
      // What cannot be placed there may be placed where the chunks are.
    }
  };
  surplus left{*pool_, {}};  // all of them, until they have been placed
  auto& chunks = left.chunks;
  try {
    chunks = pool_->acquire_chunks(count, how, &report, plan);
  } catch (...) {
    forget_plan(id);
    throw;
  }
  std::lock_guard const lock{mutex_};
  if (made && chunks != planned) {
    places_.unload(id);
    made.reset();
  }
  if (!made) {
    made = places_.load(id, wanted.sizes, chunks, wanted.lasts);
  }
  bool const noted = chunks == planned && made && made->touched == chunks;
  if (!made) {
    throw error{error_kind::internal, "tensors do not fit the chunks that were to suffice"};
  }
  std::erase_if(chunks, [&](std::uint32_t each) {
    return std::binary_search(made->taken.begin(), made->taken.end(), each);
  });
  return {std::move(*made), noted};
}

/// What lies in chunks that were never had; they are not given back.
void tensor_heap::impl::forget_plan(model_id id) {
  std::lock_guard const lock{mutex_};
  if (places_.has(id)) {
    places_.unload(id);
  }
}

std::shared_ptr<tensor_heap::impl::residency> tensor_heap::impl::new_residency(
    request const& wanted) {
  auto const id = [this] {
    std::lock_guard const lock{mutex_};
    return next_++;
  }();
  auto held = std::make_shared<residency>(shared_from_this(), id);
  held->sizes.assign(wanted.sizes.begin(), wanted.sizes.end());
  std::lock_guard const lock{mutex_};
  names_.emplace(id, wanted.what);
  return held;
}

loaded_tensors tensor_heap::impl::load(request const& wanted, urgency const& how,
                                       handover_report* report) {
  std::lock_guard const alone{loading_};
  auto const start = steady_clock::now();
  handover_report result;
  auto held = new_residency(wanted);
  auto [decided, noted] = decide(held->id, wanted, how, result);
  held->made = std::move(decided);
  auto const& decision = held->made;
  auto const mapping = steady_clock::now();
  auto addresses = map(decision, held->stitched);
  result.map += steady_clock::now() - mapping;
  report_decision(decision, noted, *held, wanted.what);
  result.bytes = decision.taken.size() * pool_->shape().chunk_bytes;
  result.total = steady_clock::now() - start;
  if (report != nullptr) {
    *report = result;
  }
  {
    std::lock_guard const lock{mutex_};
    ++counters_.loads;
    counters_.tight_loads += decision.way == placing_way::tight ? 1 : 0;
    counters_.stitched_ranges += held->stitched.size();
    counters_.stitched_ahead +=
        static_cast<std::uint64_t>(std::count_if(held->stitched.begin(), held->stitched.end(),
                                                 [](auto const& each) { return each.was_kept; }));
  }
  auto const bytes = std::accumulate(wanted.sizes.begin(), wanted.sizes.end(), std::uint64_t{0});
  return {std::move(held), std::move(addresses), bytes};
}

/// Whoever asks later is told what lies where; who cannot be told goes without.
void tensor_heap::impl::report_decision(load_decision const& made, bool noted, residency const& by,
                                        std::string_view what) noexcept {
  try {
    if (!noted) {
      note(made, what);
    }
    pool_->record_use(made.touched, nullptr, what);
    for (auto const& each : by.stitched) {
      pool_->record_use(each.chunks, each.data, what);
    }
  } catch (std::exception const& why) {
    spdlog::warn("what a model's chunks hold is not told model={} reason=\"{}\"", what, why.what());
  }
}

std::vector<std::byte*> tensor_heap::impl::map(
    load_decision const& decision, std::vector<detail::stitched_ranges::range>& stitched) {
  stitched.reserve(decision.stitched.size());
  for (auto const& each : decision.stitched) {
    stitched.push_back(ranges_.get(each));
  }
  std::vector<std::byte*> addresses;
  addresses.reserve(decision.tensors.size());
  auto* const whole = pool_->whole_view();
  for (auto const& spot : decision.tensors) {
    auto* const begin = spot.range == tensor_spot::whole_view ? whole : stitched[spot.range].data;
    addresses.push_back(begin + spot.offset);
  }
  return addresses;
}

/// Also after a load that has got nowhere.
void tensor_heap::impl::unload(residency& model) noexcept {
  if (!model.published.empty()) {
    pool_->warm()->withdraw(model.published);  // before others may write there
  }
  for (auto& each : model.stitched) {
    ranges_.keep(std::move(each));
  }
  unload_decision gone;
  {
    std::lock_guard const lock{mutex_};
    names_.erase(model.id);
    if (places_.has(model.id)) {
      gone = places_.unload(model.id);
      // Under the lock: a load that finds them free must find them empty here.
      pool_->give_back_chunks(gone.emptied);
    }
  }
  try {
    note(gone.kept);
  } catch (std::exception const& why) {
    spdlog::warn("whose chunks are after a model has gone is not told reason=\"{}\"", why.what());
  }
}

void tensor_heap::impl::note(std::vector<std::uint32_t> const& chunks) {
  std::vector<std::pair<std::string, std::vector<std::uint32_t>>> notes;
  {
    std::lock_guard const lock{mutex_};
    // By how many models share a chunk, and which one has it alone.
    std::map<std::pair<std::size_t, model_id>, std::vector<std::uint32_t>> by_models;
    for (auto const chunk : chunks) {
      auto const models = places_.models_in(chunk);
      if (!models.empty()) {
        by_models[{models.size(), models.size() == 1 ? models.front() : 0}].push_back(chunk);
      }
    }
    for (auto& [models, where] : by_models) {
      auto const [count, alone] = models;
      notes.emplace_back(count == 1 ? names_[alone] : std::to_string(count) + " models",
                         std::move(where));
    }
  }
  for (auto const& [what, where] : notes) {
    pool_->note_chunks(where, what);
  }
}

void tensor_heap::impl::note(load_decision const& made, std::string_view what) {
  if (made.touched.size() == made.taken.size()) {
    pool_->note_chunks(made.taken, what);  // shared with none
  } else {
    note(made.touched);
  }
}

void tensor_heap::impl::prepare(std::span<std::uint64_t const> sizes, residence lasts) {
  std::optional<load_decision> decision;
  {
    std::unique_lock lock{mutex_};
    auto trial = places_;
    auto const id = next_;
    auto const offered = pool_->free_chunks();
    lock.unlock();
    decision = trial.load(id, sizes, offered, lasts, placing_way::dense);
  }
  if (!decision) {
    return;
  }
  for (auto const& each : decision->stitched) {
    if (!ranges_.keeps(each)) {
      ranges_.keep(ranges_.get(each));
    }
  }
}

void tensor_heap::impl::tidy() {
  ranges_.trim(pool_->shape().chunk_count / kept_divisor);
}

tensor_heap::tensor_heap(std::shared_ptr<serving_pool> pool, std::uint64_t alignment)
    : impl_(std::make_shared<impl>(std::move(pool), alignment)) {}
tensor_heap::~tensor_heap() = default;

loaded_tensors tensor_heap::load(request const& wanted, urgency const& how,
                                 handover_report* report) {
  return impl_->load(wanted, how, report);
}
void tensor_heap::prepare(std::span<std::uint64_t const> sizes, residence lasts) {
  impl_->prepare(sizes, lasts);
}
void tensor_heap::tidy() {
  impl_->tidy();
}
std::uint64_t tensor_heap::hole_bytes() const {
  return impl_->hole_bytes();
}
tensor_heap::counters tensor_heap::count() const {
  return impl_->count();
}

}  // namespace sluice::memhandover
