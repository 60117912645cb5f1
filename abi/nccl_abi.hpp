/// What NCCL's public interface looks like from outside, as far as the shim needs it: nccl.h is not
/// needed to build. Source: nccl.h of 2.18 to 2.28; the values are part of its binary interface.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

extern "C" {
struct ncclComm;
struct CUstream_st;
}

namespace sluice::nccl_shim {

using communicator = ncclComm*;
using stream = CUstream_st*;

/// ncclResult_t.
enum result : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7
};

/// ncclUniqueId, passed by value.
struct unique_id {
  std::array<char, 128> bytes;
};

/// What an ncclConfig_t begins with; it grows at its end.
struct config_start {
  std::size_t size;  ///< of all of it
  unsigned magic;
  unsigned version;
  int blocking;
};
inline constexpr unsigned config_magic = 0xcafebeef;

/// ncclRedOp_t below this are the same for all communicators; others are made for one.
inline constexpr int usual_reductions = 5;
/// Colour of a rank that gets no communicator from ncclCommSplit.
inline constexpr int no_colour = -1;

/// NCCL's own function of that name; nullptr if there is no NCCL in this process, or it is too old. Goes through the
/// names of all libraries of the process, PyTorch's some hundreds of them, under the loader's lock.
[[nodiscard]] void* real_function(char const* name) noexcept;

/// A function's name, as a template's argument.
template <std::size_t Size>
struct function_name {
  std::array<char, Size> text{};
  consteval function_name(char const (&of)[Size]) {  // NOLINT: a literal is one
    std::copy_n(of, Size, text.begin());
  }
};

/// The same, looked for until it has been found.
template <function_name Name, typename Function>
[[nodiscard]] Function* real() noexcept {
  static constinit std::atomic<void*> known{nullptr};
  void* found = known.load(std::memory_order_acquire);
  if (found == nullptr) {
    found = real_function(Name.text.data());
    known.store(found, std::memory_order_release);
  }
  return reinterpret_cast<Function*>(found);
}

}  // namespace sluice::nccl_shim
