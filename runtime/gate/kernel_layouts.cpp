#include "runtime/gate/kernel_layouts.hpp"

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace sluice::gate {
namespace {

struct layout_table {
  std::mutex lock;
  std::unordered_map<CUfunction, std::shared_ptr<kernel_layout const>> by_function;
};

layout_table& layouts() {
  // Never destroyed: threads launch until the process is gone.
  static layout_table& one = *std::make_unique<layout_table>().release();
  return one;
}

/// A CUkernel may stand where a CUfunction is asked for; each has a question of its own.
CUresult ask(CUfunction function, bool as_kernel, std::size_t index,
             kernel_layout::parameter& answer) {
  if (as_kernel) {
    using question = CUresult (*)(CUkernel, std::size_t, std::size_t*, std::size_t*);
    return real<question>(symbol::of_cuKernelGetParamInfo)(reinterpret_cast<CUkernel>(function),
                                                           index, &answer.offset, &answer.bytes);
  }
  using question = CUresult (*)(CUfunction, std::size_t, std::size_t*, std::size_t*);
  return real<question>(symbol::of_cuFuncGetParamInfo)(function, index, &answer.offset,
                                                       &answer.bytes);
}

kernel_layout read_layout(CUfunction function) {
  kernel_layout found;
  for (bool const as_kernel : {false, true}) {
    kernel_layout::parameter next{};
    while (ask(function, as_kernel, found.parameters.size(), next) == CUDA_SUCCESS) {
      found.parameters.push_back(next);
      found.bytes = std::max(found.bytes, next.offset + next.bytes);
      // A kernel without parameters cannot be told from one that the driver does not describe.
      found.known = true;
    }
    if (found.known) {
      break;
    }
  }
  return found;
}

}  // namespace

std::shared_ptr<kernel_layout const> layout_of(CUfunction function) {
  layout_table& table = layouts();
  {
    std::lock_guard const guard{table.lock};
    if (auto const known = table.by_function.find(function); known != table.by_function.end()) {
      return known->second;
    }
  }
  auto read = std::make_shared<kernel_layout const>(read_layout(function));
  std::lock_guard const guard{table.lock};
  return table.by_function.try_emplace(function, std::move(read)).first->second;
}

void forget_layouts() {
  layout_table& table = layouts();
  std::lock_guard const guard{table.lock};
  table.by_function.clear();
}

}  // namespace sluice::gate
