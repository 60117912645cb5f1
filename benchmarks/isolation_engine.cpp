#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include "benchmarks/isolation_roles.hpp"
#include "benchmarks/isolation_watch.hpp"
#include "benchmarks/pool_device.hpp"
#include "benchmarks/pool_engine.hpp"
#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/unique_fd.hpp"

namespace sluice::bench {
namespace {

using memhandover::backend_kind;
using memhandover::unique_fd;

/// Reads memory without harm where there is none: on a GPU by a copy, on the host by a system call.
class prober {
 public:
  prober(pool_device& device, bool on_gpu)
      : device_(device), on_gpu_(on_gpu), file_(::memfd_create("probe", MFD_CLOEXEC)) {}

  [[nodiscard]] bool reads(std::byte const* where) {
    std::vector<std::uint8_t> seen(512);
    return on_gpu_
               ? device_.read(where, seen)
               : ::pwrite(file_.get(), where, seen.size(), 0) == static_cast<ssize_t>(seen.size());
  }

 private:
  pool_device& device_;
  bool on_gpu_;
  unique_fd file_;
};

class isolated_engine {
 public:
  isolated_engine(isolation_options const& how, role_watch& watch)
      : how_(how),
        counts_(map_counts(how.counts)),
        watch_(watch),
        device_(open_pool_device(backend(), how.broker.device.value_or(0))),
        engine_(how.broker, role_names.at(engine_number), device_->driver()),
        prober_(*device_, backend() == backend_kind::cuda),
        seen_(engine_.chunk_bytes()) {
    watch_.explain_by(
        [this] { return "it holds " + format_bytes(engine_.held() * engine_.chunk_bytes()); });
  }
  isolated_engine(isolated_engine const&) = delete;
  isolated_engine& operator=(isolated_engine const&) = delete;
  ~isolated_engine() {
    watch_.doing(activity::leaving);
    watch_.explain_by(nullptr);
  }

  /// Grows as far as it may, looks at what it has and at what it has lost, and gives some back.
  void turn() {
    auto const most = static_cast<std::uint32_t>(how_.bytes / engine_.chunk_bytes());
    watch_.doing(activity::acquiring);
    if (engine_.held() < most) {
      (void)engine_.grow(1 + random() % (most - engine_.held()),
                         std::chrono::steady_clock::now() + std::chrono::seconds{5}, "model",
                         [this](std::byte* where) { look_at_grant(where); });
    }
    watch_.doing(activity::using_memory);
    engine_.visit([this](std::byte* where) { look_again(where); });
    engine_.visit_lost([this](std::byte* where) { probe(where); });
    counts_.engine_parked = engine_.parked();
    ::poll(nullptr, 0, static_cast<int>(random() % 8));  // demands come meanwhile
    if (random() % 8 == 0) {
      engine_.shrink(random() % (most + 1));
    }
  }

 private:
  [[nodiscard]] backend_kind backend() const {
    return how_.broker.backend == "cuda" ? backend_kind::cuda : backend_kind::host;
  }
  [[nodiscard]] std::uint32_t random() { return static_cast<std::uint32_t>(random_()); }

  void read(std::byte const* where) {
    if (!device_->read(where, seen_)) {
      throw error{error_kind::internal, "the engine cannot read its own memory"};
    }
  }
  void fill(std::byte* where) {
    if (!device_->fill(where, seen_.size(), value_)) {
      throw error{error_kind::internal, "the engine cannot write its own memory"};
    }
  }

  /// What comes from the pool is zero.
  void look_at_grant(std::byte* where) {
    read(where);
    counts_.engine_granted_bytes += seen_.size();
    counts_.engine_leaked_bytes += others(0);
    fill(where);
  }

  /// What it has holds what it has written, and nothing else.
  void look_again(std::byte* where) {
    read(where);
    counts_.engine_checked_bytes += seen_.size();
    counts_.engine_foreign_bytes += others(value_);
    if (!prober_.reads(where)) {
      throw error{error_kind::internal, "the engine's own memory cannot be probed"};
    }
  }

  void probe(std::byte const* where) {
    ++counts_.engine_probes;
    counts_.engine_refused += prober_.reads(where) ? 0 : 1;
  }

  [[nodiscard]] std::uint64_t others(std::uint8_t expected) const {
    return seen_.size() -
           static_cast<std::uint64_t>(std::count(seen_.begin(), seen_.end(), expected));
  }

  isolation_options how_;
  isolation_counts& counts_;
  role_watch& watch_;
  std::mt19937 random_{std::random_device{}()};
  std::uint8_t value_ = first_value(engine_number);
  std::unique_ptr<pool_device> device_;
  pool_engine engine_;
  prober prober_;
  std::vector<std::uint8_t> seen_;
};

}  // namespace

int isolation_engine(isolation_options const& options) {
  auto& counts = map_counts(options.counts);
  role_watch watch{role_names.at(engine_number), counts.doing.at(engine_number), options.patience};
  isolated_engine engine{options, watch};
  while (counts.done == 0) {
    engine.turn();
    watch.got_on();
  }
  return 0;
}

}  // namespace sluice::bench
