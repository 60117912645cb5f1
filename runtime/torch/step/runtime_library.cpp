#include "runtime/torch/step/detail/runtime_library.hpp"

#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

namespace sluice::detail {
namespace {

#define SLUICE_TEXT_OF(number) #number
#define SLUICE_TEXT(number) SLUICE_TEXT_OF(number)
/// Beside the runtime: what is built against this version of torch.
constexpr char const* torch_part =
    "_torch/" SLUICE_TEXT(TORCH_VERSION_MAJOR) "." SLUICE_TEXT(TORCH_VERSION_MINOR);

constexpr int none = 0;  // what sluice_backend() answers
constexpr int cuda = 2;

std::mutex attaching;
std::optional<runtime_library> attached;  ///< once, then constant
void* cuda_library = nullptr;             ///< guarded by `attaching`

using make_cuda_arena = arena*();
using find_memory_outside = char const*();

void* opened(std::filesystem::path const& library, int visibility) {
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | visibility);
  if (handle == nullptr) {
    throw std::runtime_error{"cannot open " + library.string() + ": " + ::dlerror()};
  }
  return handle;
}

template <typename Function>
void find(void* library, char const* name, Function*& into) {
  into = reinterpret_cast<Function*>(::dlsym(library, name));
  if (into == nullptr) {
    throw std::runtime_error{std::string{"the training runtime has no "} + name};
  }
}

runtime_library functions_of(void* library) {
  runtime_library found{};
  find(library, "sluice_last_error", found.last_error);
  find(library, "sluice_join_host", found.join_host);
  find(library, "sluice_backend", found.backend);
  find(library, "sluice_begin", found.begin);
  find(library, "sluice_arena_state", found.arena_state);
  find(library, "sluice_commit_begin", found.commit_begin);
  find(library, "sluice_commit_end", found.commit_end);
  find(library, "sluice_commit_resolve", found.commit_resolve);
  find(library, "sluice_commit_made", found.commit_made);
  find(library, "sluice_discard", found.discard);
  find(library, "sluice_discarded_ns", found.discarded_ns);
  find(library, "sluice_survivors", found.survivors);
  find(library, "sluice_enter", found.enter);
  find(library, "sluice_arena_peak", found.arena_peak);
  find(library, "sluice_pool_bytes", found.pool_bytes);
  find(library, "sluice_reachable_bytes", found.reachable_bytes);
  find(library, "sluice_shortage", found.shortage);
  find(library, "sluice_wait_memory", found.wait_memory);
  find(library, "sluice_plan_start", found.plan_start);
  find(library, "sluice_plan_next", found.plan_next);
  find(library, "sluice_plan_committed", found.plan_committed);
  find(library, "sluice_plan_discarded", found.plan_discarded);
  return found;
}

/// Throws if the process cannot share.
void join_host(runtime_library const& runtime, std::filesystem::path const& folder) {
  void* const glue = opened(folder / "libsluice_torch_host.so", RTLD_LOCAL);
  int (*install)() = nullptr;
  find(glue, "sluice_torch_host_install", install);
  if (runtime.join_host() != SLUICE_OK) {
    throw std::runtime_error{runtime.last_error()};
  }
  if (install() != 0) {
    throw std::runtime_error{"another CPU allocator is already in place"};
  }
}

/// Whether the gate has joined. Throws if the process's memory would lie outside of the pool.
bool join_cuda(runtime_library const& runtime, std::filesystem::path const& folder) {
  cuda_library = opened(folder / "libsluice_torch_cuda.so", RTLD_LOCAL);
  find_memory_outside* memory_outside = nullptr;
  find(cuda_library, "sluice_torch_cuda_memory_outside", memory_outside);
  if (char const* const setting = memory_outside()) {
    throw std::runtime_error{
        std::string{setting} +
        "; its memory lies outside the pool. Remove the setting, or do without `sluice run`"};
  }
  static_cast<void>(at::empty({1}, at::kCUDA));  // the gate joins at the first allocation
  return runtime.backend() == cuda;              // if not, the gate has said why
}

/// Each sentence once. A job that is never to train without sharing ends with it.
void warn(std::string const& reason) {
  constexpr int exit_code = 125;  // of `sluice run` without a pool
  char const* const required = std::getenv("SLUICE_REQUIRE_POOL");
  if (required != nullptr && std::string{required} == "1") {
    static_cast<void>(std::fprintf(stderr,
                                   "sluice: this process ends, since --require-pool does not let "
                                   "it train without sharing: %s\n",
                                   reason.c_str()));
    std::_Exit(exit_code);
  }
  static std::set<std::string> said;
  if (said.insert(reason).second) {
    static_cast<void>(
        std::fprintf(stderr, "sluice: this process trains without sharing: %s\n", reason.c_str()));
  }
}

}  // namespace

bool runtime_library::is_inherited() const {
  return backend() == none;
}

runtime_library const* attach(bool uses_cuda) {
  std::lock_guard const lock{attaching};
  if (attached) {
    if (attached->is_inherited()) {
      warn("a forked child of a training process cannot train in the pool; have it started anew");
      return nullptr;
    }
    if (uses_cuda == (attached->backend() == cuda)) {
      return &*attached;
    }
    warn(uses_cuda ? "its pool is the host's, and a model lies on the GPU"
                   : "its pool is the GPU's, and a model lies on the host");
    return nullptr;
  }
  char const* const run = std::getenv("SLUICE_RUN");
  char const* const path = std::getenv("SLUICE_RUNTIME_LIBRARY");
  if (run == nullptr || std::string{run} != "1" || path == nullptr || *path == '\0') {
    return nullptr;
  }
  try {
    auto const runtime = functions_of(opened(path, RTLD_GLOBAL));
    auto const folder = std::filesystem::path{path}.parent_path() / torch_part;
    if (uses_cuda && !join_cuda(runtime, folder)) {
      return nullptr;
    }
    if (!uses_cuda) {
      join_host(runtime, folder);
    }
    attached = runtime;
  } catch (std::runtime_error const& why) {
    warn(why.what());
    return nullptr;
  }
  return &*attached;
}

namespace {

/// On the host the runtime's own allocator answers, for the thread that has entered.
class host_arena final : public arena {
 public:
  explicit host_arena(runtime_library const& runtime) : runtime_{runtime} {}

  void enter(std::int64_t /*samples*/) override { runtime_.enter(1); }
  void leave() noexcept override { runtime_.enter(0); }
  bool outlived() override { return false; }
  [[nodiscard]] needed_bytes needed() override {
    return {runtime_.arena_peak(), runtime_.arena_peak()};
  }
  void release() override {}
  void release_all() override {}
  void synchronize() override {}
  void empty_cache() override {}
  void clear_workspaces() override {}

 private:
  runtime_library const& runtime_;
};

}  // namespace

std::unique_ptr<arena> make_arena(runtime_library const& runtime, bool uses_cuda) {
  if (!uses_cuda) {
    return std::make_unique<host_arena>(runtime);
  }
  std::lock_guard const lock{attaching};
  make_cuda_arena* make = nullptr;
  find(cuda_library, "sluice_torch_cuda_arena", make);
  return std::unique_ptr<arena>{make()};
}

}  // namespace sluice::detail
