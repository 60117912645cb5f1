/// The pool's server as a library, for a program in Python that serves inference: it claims the
/// device for each request, as `sluice serve` does. Loaded by beside_server.py.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>

#include "memhandover/client/serving_pool.hpp"

namespace {

using sluice::memhandover::compute_claim;
using sluice::memhandover::serving_pool;

struct claimer {
  std::shared_ptr<serving_pool> pool;
  std::optional<compute_claim> claim;
};

}  // namespace

extern "C" {

/// Null, after a line on standard error, if there is no pool.
__attribute__((visibility("default"))) claimer* sluice_bench_join(char const* runtime_dir,
                                                                  std::int64_t run_ahead_ns) {
  try {
    auto pool = serving_pool::join({.name = "beside", .runtime_dir = runtime_dir});
    pool->set_run_ahead(std::chrono::nanoseconds{run_ahead_ns});
    return new claimer{std::move(pool), std::nullopt};
  } catch (std::exception const& why) {
    std::fprintf(stderr, "the pool's server: %s\n", why.what());
    return nullptr;
  }
}

/// Holds training's launches until `release`, for `most_ns` at most.
__attribute__((visibility("default"))) void sluice_bench_claim(claimer* of, std::int64_t most_ns) {
  of->claim =
      of->pool->claim_compute(std::chrono::steady_clock::now() + std::chrono::nanoseconds{most_ns});
}

__attribute__((visibility("default"))) void sluice_bench_release(claimer* of) {
  of->claim.reset();
}

__attribute__((visibility("default"))) void sluice_bench_leave(claimer* of) {
  delete of;
}
}
