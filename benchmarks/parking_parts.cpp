/// What parking is made of, on one GPU: a plain copy of some chunks to the host, the same through the
/// ring of copies, back again, the hash of them, and a copy of each behind its hash. Writes one JSON
/// object of times in ms for each round.
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <thread>

#include "benchmarks/parking_memory.hpp"
#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/device/chunk_transfer.hpp"
#include "memhandover/device/content_hash.hpp"
#include "memhandover/device/cuda_driver.hpp"

namespace {

using namespace sluice;
using namespace sluice::memhandover;
using std::chrono::steady_clock;

struct request {
  std::size_t bytes = 16_GiB;
  std::size_t chunk_bytes = 64_MiB;
  int rounds = 5;
};

/// Time of all and until the first had ended, in ms.
struct part_time {
  double all = 0;
  double first = 0;
};

double milliseconds_since(steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - start).count();
}

class parts {
 public:
  explicit parts(request const& wanted)
      : chunk_bytes_(wanted.chunk_bytes),
        count_(wanted.bytes / wanted.chunk_bytes),
        driver_(cuda_driver::open()),
        chunks_(driver_, count_, chunk_bytes_),
        host_(driver_, chunks_.bytes()),
        ring_(open_chunk_transfer(driver_)),
        hasher_(open_content_hasher(driver_)) {
    if (!hasher_->available()) {
      throw error{error_kind::unsupported, hasher_->refusal()};
    }
    driver_->check(driver_->cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, 0),
                   "cannot create a stream");
    driver_->check(driver_->cuMemsetD8Async(device(), 5, chunks_.bytes(), stream_),
                   "cannot fill device memory");
    driver_->check(driver_->cuStreamSynchronize(stream_), "cannot fill device memory");
  }
  parts(parts const&) = delete;
  parts& operator=(parts const&) = delete;
  ~parts() { driver_->cuStreamDestroy(stream_); }

  double plain() {
    auto const start = steady_clock::now();
    driver_->check(driver_->cuMemcpyDtoHAsync(host_.data(), device(), chunks_.bytes(), stream_),
                   "cannot copy");
    driver_->check(driver_->cuStreamSynchronize(stream_), "cannot copy");
    return milliseconds_since(start);
  }

  part_time out() {
    return timed(
        [this] {
          for (std::size_t i = 0; i < count_; ++i) {
            copy_out(i);
          }
        },
        [this] { return ring_->poll(); });
  }

  part_time in() {
    return timed(
        [this] {
          for (std::size_t i = 0; i < count_; ++i) {
            ring_->in(chunks_.at(i), slot(i), chunk_bytes_);
          }
        },
        [this] { return ring_->poll(); });
  }

  part_time hash() {
    std::size_t begun = 0;
    return timed([] {},
                 [&, this] {
                   begin_hashes(begun);
                   return hasher_->poll() ? 1 : 0;
                 });
  }

  part_time hash_and_out() {
    std::size_t begun = 0;
    std::size_t hashed = 0;
    return timed([] {},
                 [&, this] {
                   begin_hashes(begun);
                   while (hasher_->poll()) {
                     copy_out(hashed++);
                   }
                   return ring_->poll();
                 });
  }

 private:
  part_time timed(std::function<void()> const& begin,
                  std::function<std::size_t()> const& ended_now) const {
    part_time result;
    auto const start = steady_clock::now();
    begin();
    for (std::size_t ended = 0; ended < count_;) {
      auto const more = ended_now();
      if (ended == 0 && more > 0) {
        result.first = milliseconds_since(start);
      }
      ended += more;
      std::this_thread::yield();
    }
    result.all = milliseconds_since(start);
    return result;
  }

  void begin_hashes(std::size_t& begun) {
    for (; begun < count_ && hasher_->room(); ++begun) {
      hasher_->begin(chunks_.at(begun), chunk_bytes_);
    }
  }
  void copy_out(std::size_t i) { ring_->out(slot(i), chunks_.at(i), chunk_bytes_); }
  [[nodiscard]] std::byte* slot(std::size_t i) const { return host_.data() + i * chunk_bytes_; }
  [[nodiscard]] CUdeviceptr device() const { return reinterpret_cast<CUdeviceptr>(chunks_.at(0)); }

  std::size_t chunk_bytes_;
  std::size_t count_;
  std::shared_ptr<cuda_driver const> driver_;
  bench::device_chunks chunks_;
  bench::pinned_pages host_;
  std::unique_ptr<chunk_transfer> ring_;
  std::unique_ptr<content_hasher> hasher_;
  CUstream stream_ = nullptr;
};

void measure(request const& wanted) {
  parts all{wanted};
  all.plain();  // the first of each is slower
  (void)all.hash();
  for (int round = 0; round < wanted.rounds; ++round) {
    auto const plain = all.plain();
    auto const out = all.out();
    auto const in = all.in();
    auto const hash = all.hash();
    auto const both = all.hash_and_out();
    std::printf(
        "{\"plain\": %f, \"out\": %f, \"out_first\": %f, \"in\": %f, \"hash\": %f, \"both\": %f, "
        "\"both_first\": %f}\n",
        plain, out.all, out.first, in.all, hash.all, both.all, both.first);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"What parking is made of, on one GPU"};
  request wanted;
  app.add_option("--bytes", wanted.bytes)->check(CLI::PositiveNumber);
  app.add_option("--chunk-bytes", wanted.chunk_bytes)->check(CLI::PositiveNumber);
  app.add_option("--rounds", wanted.rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    measure(wanted);
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice-bench-parking: %s\n", why.what());
    return 1;
  }
}
