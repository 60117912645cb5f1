#include "runtime/torch/model/detail/torch_weights.hpp"

#include <ATen/core/ivalue.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "memhandover/base/error.hpp"

namespace sluice::server::detail {

namespace {

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + weight_alignment - 1) / weight_alignment * weight_alignment;
}

void refuse_if(std::stop_token const& called_off) {
  if (called_off.stop_requested()) {
    throw error{error_kind::cancelled, "others want to be loaded now"};
  }
}

}  // namespace

void wait_for(at::Device device) {
  if (device.is_cpu()) {
    return;
  }
  c10::impl::VirtualGuardImpl const backend{device.type()};
  backend.synchronizeStream(backend.getStream(device));
}

/// Walks everything reachable from a module: submodules, lists, tuples, dictionaries, objects of
/// scripted classes.
class torch_weights::collector {
 public:
  explicit collector(torch_weights& into) : into_(into) {}

  /// Of each region.
  [[nodiscard]] std::vector<c10::Storage> const& storages() const { return storages_; }

  void visit(c10::IValue const& value) {
    if (value.isTensor()) {
      take(value.toTensor());
    } else if (value.isObject()) {
      visit_object(value.toObject());
    } else if (value.isList()) {
      for (c10::IValue const& element : value.toListRef()) {
        visit(element);
      }
    } else if (value.isTuple()) {
      for (auto const& element : value.toTupleRef().elements()) {
        visit(element);
      }
    } else if (value.isGenericDict()) {
      for (auto const& entry : value.toGenericDict()) {
        visit(entry.value());
      }
    } else if (value.isCapsule()) {
      into_.holds_all_unread_ = false;  // an object of C++, made of what was read
    }
  }

 private:
  void visit_object(c10::intrusive_ptr<c10::ivalue::Object> const& object) {
    if (!objects_.insert(object.get()).second) {
      return;
    }
    auto const slots = object->slots();
    for (auto const& slot : slots) {
      visit(slot);
    }
    into_.attributes_.push_back({object, slots});
  }

  void take(at::Tensor const& tensor) {
    if (!tensor.defined() || !tensors_.insert(tensor.unsafeGetTensorImpl()).second) {
      return;
    }
    if (tensor.layout() != at::kStrided || tensor.is_quantized() || !tensor.has_storage() ||
        !tensor.is_cpu()) {
      into_.outside_bytes_ +=
          tensor.layout() == at::kStrided && tensor.has_storage() ? tensor.storage().nbytes() : 0;
      return;
    }
    if (tensor.storage().nbytes() == 0) {
      return;
    }
    auto const& storage = tensor.storage();
    auto const [known, is_new] =
        regions_.try_emplace(storage.unsafeGetStorageImpl(), into_.regions_.size());
    if (is_new) {
      into_.regions_.push_back({.bytes = storage.nbytes()});
      storages_.push_back(storage);
    }
    tensor.requires_grad_(false);
    into_.weights_.push_back({tensor, known->second, tensor.storage_offset(), tensor.sizes().vec(),
                              tensor.strides().vec(), 0});
  }

  torch_weights& into_;
  std::set<c10::ivalue::Object const*> objects_;
  std::set<c10::TensorImpl const*> tensors_;
  std::map<c10::StorageImpl const*, std::size_t> regions_;
  std::vector<c10::Storage> storages_;
};

torch_weights::torch_weights(torch_structure const& from, std::shared_ptr<model_file const> file,
                             at::Device device)
    : device_(device) {
  at::NoGradGuard const no_gradients;
  collector found{*this};
  found.visit(c10::IValue{from.module._ivalue()});
  lay_out(found.storages(), from, std::move(file));
  empty_tensors();
}

torch_weights::~torch_weights() {
  try {
    empty_tensors();  // the module may live on in somebody's hands, but never in lent memory
  } catch (
      ...) {  // NOLINT(bugprone-empty-catch): nothing refers to the memory any more than before
  }
}

void torch_weights::lay_out(std::vector<c10::Storage> const& storages, torch_structure const& from,
                            std::shared_ptr<model_file const> file) {
  in_image_.resize(regions_.size());
  std::iota(in_image_.begin(), in_image_.end(), std::size_t{0});
  // The largest first, as they are placed in memory: then most neighbours there are neighbours here.
  std::stable_sort(in_image_.begin(), in_image_.end(), [&](std::size_t a, std::size_t b) {
    return aligned(regions_[a].bytes) > aligned(regions_[b].bytes);
  });
  for (auto const& each : regions_) {
    pieces_.push_back(each.bytes);
  }
  std::vector<weights_image::part> parts;
  std::uint64_t end = 0;
  std::size_t unread = 0;
  for (auto const number : in_image_) {
    auto& each = regions_[number];
    auto const& storage = storages[number];
    each.offset = aligned(end);
    end = each.offset + each.bytes;
    auto const record = from.unread.find(storage.data());
    if (record == from.unread.end()) {
      parts.push_back({each.offset, each.bytes, 0, storage});
      continue;
    }
    ++unread;
    holds_all_unread_ = holds_all_unread_ && record->second.bytes == each.bytes;
    parts.push_back({each.offset, each.bytes, record->second.offset, {}});
  }
  holds_all_unread_ = from.unread.empty() || (holds_all_unread_ && unread == from.unread.size());
  image_.emplace(std::move(parts), std::move(file), device_);
}

void torch_weights::empty_tensors() {
  at::NoGradGuard const no_gradients;
  for (auto& each : weights_) {
    each.tensor.set_data(at::empty({0}, each.tensor.options().device(at::kCPU)));
  }
}

/// Neighbours in the image that are neighbours in memory go in one copy; where it may be called off, in several, each of which is waited
/// for.
void torch_weights::copy_image(std::stop_token const& called_off) const {
  constexpr std::uint64_t piece_of_many = std::uint64_t{64} << 20U;
  auto const copy = [&](std::uint64_t offset, std::uint64_t bytes, std::byte* to) {
    auto const most = called_off.stop_possible() ? piece_of_many : bytes;
    for (std::uint64_t done = 0; done < bytes; done += most) {
      refuse_if(called_off);
      image_->copy(offset + done, std::min(bytes - done, most), to + done);
      if (called_off.stop_possible()) {
        wait_for(device_);
      }
    }
  };
  for (std::size_t first = 0; first < in_image_.size();) {
    auto const& from = regions_[in_image_[first]];
    auto* const to = memory_[in_image_[first]];
    auto bytes = from.bytes;
    auto next = first + 1;
    for (; next < in_image_.size(); ++next) {
      auto const& neighbour = regions_[in_image_[next]];
      if (memory_[in_image_[next]] != to + (neighbour.offset - from.offset)) {
        break;
      }
      bytes = neighbour.offset - from.offset + neighbour.bytes;
    }
    copy(from.offset, bytes, to);
    first = next;
  }
}

void torch_weights::point_at_memory(weight& which, at::Tensor const& region_bytes) const {
  auto const view = at::empty({0}, which.tensor.options().device(device_));
  view.set_(region_bytes.storage(), which.storage_offset, which.sizes, which.strides);
  which.tensor.set_data(view);
  which.version = static_cast<std::uint32_t>(which.tensor._version());
}

void torch_weights::bind(std::span<std::byte* const> memory, std::stop_token const& called_off) {
  at::NoGradGuard const no_gradients;
  memory_.assign(memory.begin(), memory.end());
  while (image_->ready_bytes() < image_->bytes()) {
    refuse_if(called_off);
    image_->extend();
  }
  copy_image(called_off);
  wait_for(device_);
  point_all();
}

void torch_weights::attach(std::span<std::byte* const> memory) {
  at::NoGradGuard const no_gradients;
  memory_.assign(memory.begin(), memory.end());
  point_all();
}

void torch_weights::point_all() {
  for (std::size_t number = 0; number < regions_.size(); ++number) {
    views_->fetch_add(1);
    bound_.push_back(at::from_blob(
        memory_[number], {static_cast<std::int64_t>(regions_[number].bytes)},
        [views = views_](void*) { views->fetch_sub(1); },
        at::TensorOptions{}.dtype(at::kByte).device(device_), device_));
  }
  for (auto& each : weights_) {
    point_at_memory(each, bound_[each.region]);
  }
}

void torch_weights::undo_changes() {
  at::NoGradGuard const no_gradients;
  for (auto& each : attributes_) {
    for (std::size_t slot = 0; slot < each.original.size(); ++slot) {
      if (!each.object->getSlot(slot).is(each.original[slot])) {
        each.object->setSlot(slot, each.original[slot]);
      }
    }
  }
  bool copied = false;
  for (auto& each : weights_) {
    if (each.tensor._version() != each.version) {
      auto const& from = regions_[each.region];
      image_->copy(from.offset, from.bytes, memory_[each.region]);
      point_at_memory(each, bound_[each.region]);
      copied = true;
    }
  }
  if (copied) {
    wait_for(device_);
  }
}

void torch_weights::unbind() {
  wait_for(device_);
  std::vector<bool> changed;
  changed.reserve(weights_.size());
  for (auto const& each : weights_) {
    changed.push_back(each.tensor._version() != each.version);
  }
  empty_tensors();
  bound_.clear();
  auto const memory = std::exchange(memory_, {});
  if (int const left = views_->load(); left != 0) {
    if (!memory.empty()) {
      attach(memory);  // it stays usable
      for (std::size_t which = 0; which < weights_.size(); ++which) {
        weights_[which].version -= changed[which] ? 1 : 0;  // still to be undone
      }
    }
    throw error{error_kind::internal, c10::str(left,
                                               " pieces of the lent memory are still referred to; "
                                               "the model keeps tensors in a list or "
                                               "dictionary attribute")};
  }
}

namespace {

void place_in(torch::jit::Block& block, at::Device device, std::uint64_t& bytes) {
  for (torch::jit::Node* node : block.nodes()) {
    for (torch::jit::Block* inner : node->blocks()) {
      place_in(*inner, device, bytes);
    }
    if (node->kind() != c10::prim::Constant || node->outputs().size() != 1) {
      continue;
    }
    auto const value = torch::jit::toIValue(node->output());
    if (!value) {
      continue;
    }
    if (value->isTensor() && value->toTensor().defined()) {
      auto const& tensor = value->toTensor();
      bytes += tensor.has_storage() ? tensor.nbytes() : 0;
      if (!device.is_cpu() && node->hasAttribute(c10::attr::value) &&
          node->kindOf(c10::attr::value) == torch::jit::AttributeKind::t) {
        node->t_(c10::attr::value, tensor.to(device));
      }
    } else if (value->isDevice() && value->toDevice().is_cpu() && !device.is_cpu()) {
      torch::jit::WithInsertPoint const before{node};
      node->output()->replaceAllUsesWith(node->owningGraph()->insertConstant(device));
    } else if (value->isString() && value->toStringRef() == "cpu" && !device.is_cpu()) {
      // torch.device("cpu") in the file: a string on its way into aten::device.
      for (auto const& use : std::vector<torch::jit::Use>{node->output()->uses()}) {
        if (use.user->kind() == c10::Symbol::fromQualString("aten::device")) {
          torch::jit::WithInsertPoint const before{use.user};
          use.user->replaceInput(use.offset, use.user->owningGraph()->insertConstant(device.str()));
        }
      }
    }
  }
}

}  // namespace

std::uint64_t place_constants(torch::jit::Module const& module, at::Device device) {
  std::uint64_t bytes = 0;
  auto const unit = module._ivalue()->compilation_unit();
  // Code of a file is compiled when it is first needed, which can add functions: until none is new.
  for (std::size_t next = 0; next < unit->get_functions().size(); ++next) {
    auto* const function = unit->get_functions()[next];
    function->ensure_defined();
    if (auto* const graph_function = torch::jit::tryToGraphFunction(*function)) {
      place_in(*graph_function->graph()->block(), device, bytes);
    }
  }
  return bytes;
}

}  // namespace sluice::server::detail
