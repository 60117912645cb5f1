/// The C boundary of an engine's memory that comes and goes by the chunk.
#include "abi/elastic_api.h"

#include <unistd.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "memhandover/client/elastic_space.hpp"
#include "runtime/step/process_state.hpp"

struct sluice_elastic {
  sluice_elastic(sluice::memhandover::broker_options const& broker, std::string const& name,
                 std::shared_ptr<sluice::memhandover::cuda_driver const> driver)
      : space(broker, name, std::move(driver)) {}
  sluice::memhandover::elastic_space space;
  pid_t const owner = ::getpid();
};

namespace sluice::step {
namespace {

std::chrono::steady_clock::time_point after_ms(std::uint32_t time) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds{time};
}

/// A forked child has its parent's mappings, and no thread that speaks for them.
memhandover::elastic_space& own(sluice_elastic& of) {
  if (of.owner != ::getpid()) {
    throw error{error_kind::unsupported,
                "the memory is the process's that this one was forked from (pid " +
                    std::to_string(of.owner) + "); have this one started anew"};
  }
  return of.space;
}

/// Where the gate is, what it answers is not the driver.
std::shared_ptr<memhandover::cuda_driver const> driver_here() {
  auto const* const state = sharing();
  return state != nullptr && state->driver != nullptr ? state->driver
                                                      : memhandover::cuda_driver::open();
}

/// The pool of that GPU, or of the host.
memhandover::broker_options broker_of(int device) {
  bool const on_host = device == SLUICE_ELASTIC_HOST;
  auto broker = options_of_job(on_host ? "host" : "cuda").broker;
  if (!on_host) {
    refuse_other_gpu(broker, device);
    broker.device = device;
  }
  return broker;
}

}  // namespace
}  // namespace sluice::step

using namespace sluice::step;

extern "C" {

sluice_elastic* sluice_elastic_join(char const* name, int device) {
  std::unique_ptr<sluice_elastic> made;
  (void)guarded([&] {
    made =
        std::make_unique<sluice_elastic>(broker_of(device), name == nullptr ? "engine" : name,
                                         device == SLUICE_ELASTIC_HOST ? nullptr : driver_here());
  });
  return made.release();
}

void sluice_elastic_leave(sluice_elastic* space) {
  if (space != nullptr && space->owner == ::getpid()) {
    std::unique_ptr<sluice_elastic> const gone{space};
  }
}

std::uint64_t sluice_elastic_chunk_bytes(sluice_elastic const* space) {
  return space->space.shape().chunk_bytes;
}

std::uint32_t sluice_elastic_pool_chunks(sluice_elastic const* space) {
  return space->space.shape().chunk_count;
}

int sluice_elastic_reserve(sluice_elastic* space, std::uint32_t chunks) {
  return guarded([&] { own(*space).reserve(chunks); });
}

void* sluice_elastic_base(sluice_elastic const* space) {
  return space->space.base();
}

int sluice_elastic_back(sluice_elastic* space, std::uint32_t const* chunks, std::uint32_t count,
                        std::uint32_t patience_ms) {
  return guarded([&] {
    auto& of = own(*space);
    if (!of.back({chunks, count}, after_ms(patience_ms))) {
      throw sluice::error{
          sluice::error_kind::out_of_memory,
          "the pool does not grant " + std::to_string(count) + " more chunks at present"};
    }
  });
}

int sluice_elastic_give_back(sluice_elastic* space, std::uint32_t const* chunks,
                             std::uint32_t count) {
  return guarded([&] { own(*space).give_back({chunks, count}); });
}

int sluice_elastic_answer(sluice_elastic* space, std::uint32_t kept) {
  return guarded(
      [&] { own(*space).answer(kept, !environment_says("SLUICE_PARK", "never", "if_needed")); });
}

std::uint32_t sluice_elastic_demanded(sluice_elastic const* space) {
  return space->space.demanded();
}

std::uint32_t sluice_elastic_await_demand(sluice_elastic* space, std::uint32_t timeout_ms) {
  std::uint32_t demanded = 0;
  (void)guarded([&] { demanded = own(*space).await_demand(after_ms(timeout_ms)); });
  return demanded;
}

void sluice_elastic_rouse(sluice_elastic* space) {
  (void)guarded([&] { own(*space).rouse(); });
}

void sluice_elastic_refuse_rest(sluice_elastic* space) {
  (void)guarded([&] { own(*space).refuse_rest(); });
}

void sluice_elastic_show_used(sluice_elastic* space, std::uint64_t bytes) {
  (void)guarded([&] { own(*space).show_used(bytes); });
}

int sluice_elastic_ordered_away(sluice_elastic const* space) {
  return space->space.is_ordered_away() ? 1 : 0;
}

int sluice_elastic_rest(sluice_elastic* space, std::uint32_t needed) {
  return guarded([&] { own(*space).rest(needed); });
}
}
