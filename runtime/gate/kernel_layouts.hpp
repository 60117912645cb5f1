/// Where the parameters of a kernel lie and how long they are, so that a launch can be copied.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "runtime/gate/driver.hpp"

namespace sluice::gate {

struct kernel_layout {
  struct parameter {
    std::size_t offset;
    std::size_t bytes;
  };
  std::vector<parameter> parameters;
  std::size_t bytes = 0;  ///< of all, with the gaps between them
  bool known = false;     ///< the driver has told
};

/// What the driver says of a kernel, asked once. Needs a current context. Any thread.
[[nodiscard]] std::shared_ptr<kernel_layout const> layout_of(CUfunction function);

/// Modules have gone: their handles may come again for other kernels.
void forget_layouts();

}  // namespace sluice::gate
