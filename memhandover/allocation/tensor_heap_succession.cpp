/// What of a heap outlives its server: published for a successor, and adopted by it.
#include <algorithm>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "memhandover/allocation/detail/kept_layout.hpp"
#include "memhandover/allocation/detail/tensor_heap_impl.hpp"

namespace sluice::memhandover {

bool tensor_heap::impl::publish(std::shared_ptr<void> const& hold, std::string key,
                                std::string_view tag) {
  auto* const warm = pool_->warm();
  if (warm == nullptr) {
    return false;
  }
  auto& model = residency_of(hold);
  warm->publish_chunks(
      key, model.made.touched,
      detail::pack({std::string{tag}, model.sizes, model.made.tensors, model.made.stitched}));
  model.published = std::move(key);
  return true;
}

void tensor_heap::impl::set_in_use(std::shared_ptr<void> const& hold, bool used) {
  if (auto const& model = residency_of(hold); !model.published.empty()) {
    pool_->warm()->set_in_use(model.published, used);
  }
}

std::optional<tensor_heap::adopted> tensor_heap::impl::adopt(request const& wanted, std::string key,
                                                             std::string_view tag) {
  auto* const warm = pool_->warm();
  if (warm == nullptr) {
    return std::nullopt;
  }
  std::lock_guard const alone{loading_};
  // Looked at before it is claimed: what is of no use here may share chunks with what is.
  auto const left = warm->inherited();
  auto const found = std::find_if(left.begin(), left.end(),
                                  [&](inheritance const& each) { return each.key == key; });
  auto layout = found == left.end() ? std::nullopt : detail::unpack(found->blob);
  if (!layout || layout->tag != tag ||
      !std::equal(layout->sizes.begin(), layout->sizes.end(), wanted.sizes.begin(),
                  wanted.sizes.end())) {
    return std::nullopt;
  }
  auto held = new_residency(wanted);
  auto claimed = warm->claim_chunks(key);
  if (!claimed) {
    return std::nullopt;
  }
  auto const extents =
      detail::extents_of(*layout, claimed->chunks, pool_->shape().chunk_bytes, alignment_);
  std::unique_lock lock{mutex_};
  if (!extents || !places_.restore(held->id, *extents, wanted.lasts)) {
    std::erase_if(claimed->chunks,
                  [this](std::uint32_t chunk) { return !places_.models_in(chunk).empty(); });
    lock.unlock();
    warm->withdraw(key);
    pool_->give_back_chunks(claimed->chunks);
    return std::nullopt;
  }
  lock.unlock();
  held->published = std::move(key);
  held->made.tensors = std::move(layout->tensors);
  held->made.stitched = std::move(layout->stitched);
  held->made.touched = std::move(claimed->chunks);
  auto addresses = map(held->made, held->stitched);
  report_decision(held->made, false, *held, wanted.what);
  auto const bytes = std::accumulate(wanted.sizes.begin(), wanted.sizes.end(), std::uint64_t{0});
  return adopted{{std::move(held), std::move(addresses), bytes}, !claimed->in_use};
}

void tensor_heap::impl::release_rest() {
  if (auto* const warm = pool_->warm()) {
    warm->release_rest();
  }
}

bool tensor_heap::publish(loaded_tensors const& model, std::string key, std::string_view tag) {
  return impl_->publish(model.hold_, std::move(key), tag);
}
void tensor_heap::set_in_use(loaded_tensors const& model, bool used) {
  impl_->set_in_use(model.hold_, used);
}
std::optional<tensor_heap::adopted> tensor_heap::adopt(request const& wanted, std::string key,
                                                       std::string_view tag) {
  return impl_->adopt(wanted, std::move(key), tag);
}
void tensor_heap::release_rest() {
  impl_->release_rest();
}

}  // namespace sluice::memhandover
