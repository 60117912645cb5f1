/// What parking is made of, on one GPU: a plain copy of some memory to the host, the same through the
/// ring of copies, back again, and the hash of it. Writes one JSON object for each round.
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/device/chunk_transfer.hpp"
#include "memhandover/device/content_hash.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace {

using namespace sluice;
using namespace sluice::memhandover;
using std::chrono::steady_clock;

double milliseconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - start).count();
}

/// Time of all copies and until the first had ended, in ms.
struct ring_time {
  double all = 0;
  double first = 0;
};

template <typename Begin>
ring_time through_ring(chunk_transfer& ring, std::size_t chunks, Begin&& begin) {
  ring_time result;
  auto const start = steady_clock::now();
  std::size_t ended = 0;
  for (std::size_t begun = 0; ended < chunks;) {
    while (begun < chunks && ring.room()) {
      begin(begun++);
    }
    auto const more = ring.poll();
    if (ended == 0 && more > 0) {
      result.first = milliseconds_since(start);
    }
    ended += more;
    std::this_thread::yield();
  }
  result.all = milliseconds_since(start);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"What parking is made of, on one GPU"};
  std::size_t gib = 16;
  int rounds = 5;
  app.add_option("--gib", gib);
  app.add_option("--rounds", rounds);
  CLI11_PARSE(app, argc, argv);

  auto const driver = cuda_driver::open();
  CUdevice device = 0;
  CUcontext context = nullptr;
  driver->check(driver->cuDeviceGet(&device, 0), "cannot use the GPU");
  driver->check(driver->cuDevicePrimaryCtxRetain(&context, device), "cannot start the GPU");
  driver->check(driver->cuCtxSetCurrent(context), "cannot start the GPU");
  std::size_t const chunk_bytes = 64_MiB;
  std::size_t const bytes = gib * 1_GiB;
  CUdeviceptr memory = 0;
  driver->check(driver->cuMemAlloc(&memory, bytes), "cannot allocate device memory");
  void* pinned = nullptr;
  driver->check(driver->cuMemHostAlloc(&pinned, bytes, 0), "cannot allocate pinned memory");
  CUstream stream = nullptr;
  driver->check(driver->cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0),
                "cannot create a stream");
  driver->check(driver->cuMemsetD8Async(memory, 5, bytes, stream), "cannot fill device memory");
  driver->check(driver->cuStreamSynchronize(stream), "cannot fill device memory");

  auto* const host = static_cast<std::byte*>(pinned);
  auto* const chunks = reinterpret_cast<std::byte*>(memory);
  auto const ring = open_chunk_transfer(driver);
  content_hasher hasher{driver};
  auto const plain = [&] {
    auto const start = steady_clock::now();
    driver->check(driver->cuMemcpyDtoHAsync(pinned, memory, bytes, stream), "cannot copy");
    driver->check(driver->cuStreamSynchronize(stream), "cannot copy");
    return milliseconds_since(start);
  };
  plain();  // the first is slower
  (void)hasher.hash(chunks, chunk_bytes);
  for (int round = 0; round < rounds; ++round) {
    auto const one = plain();
    auto const out = through_ring(*ring, bytes / chunk_bytes, [&](std::size_t i) {
      ring->out(host + i * chunk_bytes, chunks + i * chunk_bytes, chunk_bytes);
    });
    auto const in = through_ring(*ring, bytes / chunk_bytes, [&](std::size_t i) {
      ring->in(chunks + i * chunk_bytes, host + i * chunk_bytes, chunk_bytes);
    });
    auto const start = steady_clock::now();
    for (std::size_t i = 0; i < bytes / chunk_bytes; ++i) {
      (void)hasher.hash(chunks + i * chunk_bytes, chunk_bytes);
    }
    auto const hashed = milliseconds_since(start);
    std::printf(
        "{\"plain_ms\": %f, \"out_ms\": %f, \"first_ms\": %f, \"in_ms\": %f, \"hash_ms\": %f}\n",
        one, out.all, out.first, in.all, hashed);
  }
  return 0;
}
