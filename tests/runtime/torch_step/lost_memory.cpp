#include "tests/runtime/torch_step/lost_memory.hpp"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/runtime/torch_step/scripted_runtime.hpp"

namespace sluice::testing {
namespace {

struct block {
  std::size_t bytes;
  int micro_batch;
};

std::map<void*, block> blocks;
int micro_batches = 0;

/// Torch's own, which remembers what a micro-batch has.
class watching_allocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    auto memory = c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* const address = memory.get();
    if (!the_script().inside || address == nullptr) {
      return memory;
    }
    blocks[address] = {bytes, micro_batches};
    auto owner = std::make_unique<at::DataPtr>(std::move(memory));
    return {address, owner.release(), &end, at::Device{at::kCPU}};
  }
  void copy_data(void* to, void const* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void end(void* context) {
    std::unique_ptr<at::DataPtr> const owner{static_cast<at::DataPtr*>(context)};
    blocks.erase(owner->get());
  }
};

std::set<void*> dropped;
constexpr auto dropping = c10::DispatchKey::TESTING_ONLY_GenericMode;

bool has_dimensions(at::Tensor const& tensor) {
  return tensor.defined() && tensor.dim() > 0;
}

/// The tensors that an operator writes into, if one of them has dimensions.
std::vector<at::Tensor> written_by(c10::FunctionSchema const& schema, c10::Stack const& stack) {
  std::vector<at::Tensor> found;
  auto const first = stack.size() - schema.arguments().size();
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    auto const* const alias = schema.arguments()[i].alias_info();
    auto const& value = stack[first + i];
    if (alias == nullptr || !alias->isWrite()) {
      continue;
    }
    auto const tensors =
        value.isTensorList() ? value.toTensorVector() : std::vector{value.toTensor()};
    found.insert(found.end(), tensors.begin(), tensors.end());
  }
  return std::ranges::any_of(found, has_dimensions) ? found : std::vector<at::Tensor>{};
}

void leave_out(c10::OperatorHandle const& which, c10::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard const below{dropping};
  auto const written = written_by(which.schema(), *stack);
  if (written.empty()) {
    which.callBoxed(stack);
    return;
  }
  for (auto const& tensor : written) {
    dropped.insert(tensor.data_ptr());
  }
  stack->resize(stack->size() - which.schema().arguments().size());
  if (!which.schema().returns().empty()) {
    stack->emplace_back(written[0]);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&leave_out>());
}

}  // namespace

void watch_memory() {
  static watching_allocator one;
  c10::SetCPUAllocator(&one, 1);
}

void forget_memory() {
  ++micro_batches;
}

void overwrite_memory() {
  for (auto const& [address, of] : blocks) {
    if (of.micro_batch == micro_batches) {
      std::memset(address, 0xA5, of.bytes);
    }
  }
}

std::uint64_t living_allocations() {
  return static_cast<std::uint64_t>(std::ranges::count_if(
      blocks, [](auto const& each) { return each.second.micro_batch == micro_batches; }));
}

void drop_launches(bool drop) {
  c10::impl::tls_set_dispatch_key_included(dropping, drop);
}

std::set<void*> dropped_writes() {
  return std::exchange(dropped, {});
}

}  // namespace sluice::testing
