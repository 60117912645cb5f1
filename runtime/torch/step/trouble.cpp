/// Failures whose cause may lie in the pool, told with what the pool knows: who holds the memory,
/// or where to ask.
#include <c10/util/Exception.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

#include "runtime/torch/step/detail/engine.hpp"

namespace sluice::detail {
namespace {

bool says(c10::Error const& why, char const* words) {
  return std::string{why.what_without_backtrace()}.find(words) != std::string::npos;
}

/// What CUDA says of an access to an address without memory.
bool is_fault(c10::Error const& why) {
  return says(why, "illegal memory access") || says(why, "unspecified launch failure");
}

std::string about_fault(std::int64_t discards) {
  char const* const folder = std::getenv("SLUICE_RUNTIME_DIR");
  return "sluice: " + std::to_string(discards) +
         " micro-batches of this process have lost their memory to the inference server; where the "
         "kernel log (Xid 31) or compute-sanitizer names the address, this tells what lay there "
         "and "
         "who got it: sluice pool show" +
         (folder == nullptr ? std::string{} : " --runtime-dir '" + std::string{folder} + "'") +
         " --pid " + std::to_string(::getpid()) + " --address 0x…";
}

}  // namespace

void engine::explain(c10::Error& why) const {
  if (runtime_ == nullptr || says(why, "sluice:")) {
    return;
  }
  if (dynamic_cast<c10::OutOfMemoryError const*>(&why) != nullptr) {
    why.add_context(runtime_->shortage_text());
  } else if (counts_.discards > 0 && is_fault(why)) {
    why.add_context(about_fault(counts_.discards));
  }
}

}  // namespace sluice::detail
