/// The step arena on CUDA: torch's own caching allocator, over segments from the runtime. A library
/// of its own (libsluice_torch_cuda.so), which the step opens where the model lies on a GPU.
#include <ATen/autocast_mode.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "abi/step_api.h"
#include "runtime/torch/step/detail/arena.hpp"
#include "runtime/torch/torch_compat.hpp"

namespace sluice::detail {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

std::shared_ptr<caching::CUDAAllocator> segment_provider() {
  return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
      [](std::size_t bytes, int device, cudaStream_t stream) {
        return sluice_arena_alloc(static_cast<ssize_t>(bytes), device, stream);
      },
      [](void* address, std::size_t bytes, int device, cudaStream_t stream) {
        sluice_arena_free(address, static_cast<ssize_t>(bytes), device, stream);
      });
}

/// Of what lives at once: if torch's segments come to more than a 16th beyond it, one large segment
/// does better.
constexpr std::uint64_t fragmentation = 16;

/// Torch asks for a segment where no block that is cached is large enough, and never joins blocks of
/// two: with tensors of many sizes, as in convolutional networks, much of the memory is then of no use.
/// So a micro-batch that has shown how many bytes live at once, in segments that come to much
/// more, gets one segment of that size from the next time on. Where that does not help, since tensors
/// are made on several streams or the allocator's settings keep large blocks from being split, it is
/// left to torch again.
///
/// The pool is entered for the thread that runs the step alone: what other threads allocate
/// meanwhile is never taken away. It is entered only while a micro-batch runs: an entered pool
/// keeps the out-of-memory path from emptying the cache, and blocks of side streams from being
/// reused.
class cuda_arena final : public arena {
 public:
  cuda_arena() : device_{c10::cuda::current_device()}, allocator_{segment_provider()} {
    std::lock_guard const lock{arenas_mutex};
    arenas.push_back(this);
  }
  cuda_arena(cuda_arena const&) = delete;
  cuda_arena& operator=(cuda_arena const&) = delete;
  ~cuda_arena() override {
    std::lock_guard const lock{arenas_mutex};
    std::erase(arenas, this);
  }

  void enter(std::int64_t samples) override {
    // Segments of another size of micro-batch would lie beside those that this one needs: torch
    // cannot free them while the pool is entered.
    if (samples != samples_ || lies_otherwise_ || generation_ != sluice_generation()) {
      release();
    }
    samples_ = samples;
    bool const fresh = !pool_;
    if (fresh) {
      pool_.emplace(allocator_);
      generation_ = sluice_generation();
      outside_bytes_ = allocated_bytes().current;
    }
    caching::beginAllocateToPool(device_, pool_->id(),
                                 [here = std::this_thread::get_id()](cudaStream_t) {
                                   return std::this_thread::get_id() == here;
                                 });
    entered_ = true;
    if (fresh) {
      make_whole(layouts_[samples_].whole_bytes);
    }
  }

  void leave() noexcept override {
    if (entered_) {
      // Every end is paired with a release, else a dropped pool goes on counting in reserved bytes.
      caching::endAllocateToPool(device_, pool_->id());
      caching::releasePool(device_, pool_->id());
      entered_ = false;
    }
  }

  bool outlived() override {
    if (lives()) {
      at::autocast::clear_cache();  // of an autocast that the user has entered around the step
    }
    if (!lives()) {
      choose_layout();
      return false;
    }
    if (!kept_) {
      kept_ = true;
      static_cast<void>(std::fputs(
          "sluice: tensors or library workspaces made in a micro-batch live on after it. They stay "
          "as they are, in memory that is not handed over any more; better copy what you need: "
          ".item(), or .cpu()\n",
          stderr));
    }
    return true;
  }

  [[nodiscard]] needed_bytes needed() override {
    return {sluice_arena_peak(), std::max(sluice_arena_peak(), layouts_[samples_].most_bytes)};
  }

  void release() override {
    lies_otherwise_ = false;
    if (pool_) {
      synchronize();  // nothing may read its segments any more
      pool_.reset();
      if (kept_) {
        empty_cache();  // what lived on earlier may have gone; only this frees its segments
      }
    }
  }

  void release_all() override {
    std::lock_guard const lock{arenas_mutex};
    for (auto* const each : arenas) {
      if (each->device_ == device_ && !each->entered_) {
        each->release();
      }
    }
  }

  void synchronize() override { c10::cuda::device_synchronize(); }
  void empty_cache() override { caching::emptyCache(); }
  void clear_workspaces() override { at::cuda::clearCublasWorkspaces(); }

 private:
  /// How the segments of a micro-batch lie, for one number of samples.
  struct layout {
    std::uint64_t most_bytes = 0;   ///< of all segments, so far
    std::uint64_t whole_bytes = 0;  ///< of the one for all the rest; 0: as torch asks for them
    bool final = false;
  };

  [[nodiscard]] c10::CachingAllocator::Stat allocated_bytes() const {
    auto const all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return caching::getDeviceStats(device_).allocated_bytes.at(all);
  }

  /// Has torch cache one segment of so many bytes.
  void make_whole(std::uint64_t bytes) {
    if (bytes == 0) {
      return;
    }
    try {
      caching::raw_delete(
          caching::raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(device_)));
    } catch (c10::OutOfMemoryError const&) {
      // Then torch asks for smaller ones, and says so if it gets none.
    }
  }

  /// After a micro-batch of which nothing lives on.
  void choose_layout() {
    layout& of = layouts_[samples_];
    std::uint64_t const segments = sluice_arena_peak();
    if (of.final || segments <= of.most_bytes) {
      return;
    }
    of.most_bytes = segments;
    // If the peak was somebody else's, it is larger than this micro-batch's, and so is what is kept
    // for it.
    auto const lived = static_cast<std::uint64_t>(
        std::max<std::int64_t>(allocated_bytes().peak - outside_bytes_, 0));
    if (lived + lived / fragmentation >= segments) {
      return;
    }
    of.final = of.whole_bytes >= lived;  // it has been tried
    of.whole_bytes = of.final ? 0 : lived;
    lies_otherwise_ = true;
  }

  [[nodiscard]] bool lives() {
    return pool_ && !caching::checkPoolLiveAllocations(device_, pool_->id(), {});
  }

  static inline std::mutex arenas_mutex;
  static inline std::vector<cuda_arena*> arenas;

  c10::DeviceIndex device_;
  std::shared_ptr<caching::CUDAAllocator> allocator_;
  std::optional<at::cuda::MemPool> pool_;
  std::int64_t samples_ = 0;
  std::map<std::int64_t, layout> layouts_;  ///< by samples
  bool lies_otherwise_ = false;             ///< than the layout of these samples now says
  std::int64_t outside_bytes_ = 0;          ///< allocated when this pool was made
  std::uint64_t generation_ = 0;
  bool entered_ = false;
  bool kept_ = false;  ///< whether an arena was kept for something that outlived its micro-batch
};

/// Whether a setting of torch's allocator, a list with commas, has expandable segments.
bool expands(char const* name) {
  char const* const text = std::getenv(name);
  std::istringstream settings{text == nullptr ? "" : text};
  for (std::string setting; std::getline(settings, setting, ',');) {
    std::erase(setting, ' ');
    if (setting == "expandable_segments:True") {
      return true;
    }
  }
  return false;
}

}  // namespace
}  // namespace sluice::detail

/// A setting of torch's CUDA allocator with which memory is not the pool's, valid until the next
/// call; or null. What stands in the environment of `sluice run` is refused there.
extern "C" SLUICE_EXPORT char const* sluice_torch_cuda_memory_outside(void) {
  static std::string setting;
  if (auto const name = c10::cuda::CUDACachingAllocator::get()->name(); name != "native") {
    setting = "torch's allocator is " + name;
    return setting.c_str();
  }
  for (char const* const name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    if (sluice::detail::expands(name)) {
      setting = std::string{name} + " has expandable_segments:True";
      return setting.c_str();
    }
  }
  return nullptr;
}

/// The caller's.
extern "C" SLUICE_EXPORT sluice::detail::arena* sluice_torch_cuda_arena(void) {
  return std::make_unique<sluice::detail::cuda_arena>().release();
}
