#include "runtime/torch/step/detail/buffers.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>

namespace sluice::detail {
namespace {

bool have_one_form(torch::Tensor const& a, torch::Tensor const& b) {
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() && a.device() == b.device();
}

}  // namespace

void buffers::save() {
  at::NoGradGuard const no_grad;
  auto now = model_.buffers();
  std::erase_if(now, [](auto const& buffer) { return !buffer.defined(); });
  copies_.resize(now.size());
  for (std::size_t i = 0; i < now.size(); ++i) {
    if (!copies_[i].defined() || !have_one_form(now[i], copies_[i])) {
      copies_[i] = at::empty_like(now[i]);
    }
  }
  buffers_ = std::move(now);
  if (!buffers_.empty()) {
    at::_foreach_copy_(copies_, buffers_);
  }
}

void buffers::restore() {
  at::NoGradGuard const no_grad;
  if (!buffers_.empty()) {
    at::_foreach_copy_(buffers_, copies_);
  }
}

}  // namespace sluice::detail
