#include "runtime/torch/spare.hpp"

#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <thread>

#include "memhandover/base/error.hpp"
#include "runtime/torch/device_memory.hpp"
#include "runtime/torch/model/activations.hpp"
#include "runtime/torch/model/rehearsal.hpp"

namespace sluice::server {
namespace {

constexpr std::int64_t most_ordinals = 64, most_threads = 1024;

int number_in(nlohmann::json const& from, char const* key, std::int64_t least, std::int64_t most) {
  auto const found = from.value(key, nlohmann::json{});
  // One beyond what has a sign is no smaller one.
  bool const fits = found.is_number_integer() &&
                    (!found.is_number_unsigned() || found.get<std::uint64_t>() <= INT64_MAX) &&
                    found.get<std::int64_t>() >= least && found.get<std::int64_t>() <= most;
  if (!fits) {
    throw error{error_kind::invalid_argument,
                "a spare executor is prepared for a device and a number of threads"};
  }
  return found.get<int>();
}

/// On a thread that ends: what it has of the device's libraries is then had by the one that will compute.
void rehearse_elsewhere(torch_device device, int threads) {
  std::exception_ptr failure;
  std::thread{[&] {
    try {
      set_torch_threads(threads);
      rehearse(device);
    } catch (...) {
      failure = std::current_exception();
    }
  }}.join();
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace

nlohmann::json preparation_for(torch_device device, int threads) {
  return {{"device", device.cuda_ordinal}, {"threads", threads}};
}

void prepare_spare(nlohmann::json const& wanted) {
  auto const of = wanted.is_object() ? wanted : nlohmann::json::object();
  torch_device const where{number_in(of, "device", -1, most_ordinals - 1)};
  auto const threads = number_in(of, "threads", 1, most_threads);
  auto const began = std::chrono::steady_clock::now();
  auto const free_before = free_device_memory(where.cuda_ordinal);
  start_torch(where);
  rehearse_elsewhere(where, threads);
  empty_cache(where);  // what torch allocates later is the pool's
  auto const free_after = free_device_memory(where.cuda_ordinal);
  auto const took =
      std::chrono::duration<double, std::milli>{std::chrono::steady_clock::now() - began};
  if (!where.is_cuda()) {
    spdlog::info("ready to take an executor's place after_ms={:.0f}", took.count());
  } else if (free_before && free_after) {
    auto const taken = *free_before > *free_after ? *free_before - *free_after : 0;
    spdlog::info("ready to take an executor's place after_ms={:.0f} device_bytes={}", took.count(),
                 taken);
  } else {
    spdlog::info("ready to take an executor's place after_ms={:.0f} device_bytes=unknown",
                 took.count());
  }
}

}  // namespace sluice::server
