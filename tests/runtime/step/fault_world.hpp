/// A pool with a training job and a server in one process, so that everything that they hold can be
/// counted; the broker is a process of its own, as always.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "memhandover/base/unique_fd.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "runtime/step/training_memory.hpp"

namespace sluice::test {

/// What a process has of things that can leak.
struct holdings {
  std::size_t descriptors = 0;
  std::size_t mapped_bytes = 0;
  std::uint64_t driver_reservations = 0, driver_mappings = 0, driver_handles = 0;

  bool operator==(holdings const&) const = default;
};
[[nodiscard]] std::string to_string(holdings const& what);

/// What one life of job and server came to.
struct outcome {
  bool went_well = false;
  std::string problem;  ///< of what went wrong what must not, empty if nothing
  std::string error;    ///< the typed error that ended it, empty if none did
};

/// A gate of a job whose device never runs, so that closing it takes no waiting.
class idle_gate final : public step::launch_gate {
 public:
  bool close(std::int64_t /*deadline_ns*/) override { return true; }
  bool wait_idle(std::int64_t /*deadline_ns*/) override { return true; }
  void open() override {}
  void abort_begin() override {}
  void abort_end() override {}
  void set_urgent(bool /*urgent*/) override {}
};

class fault_world {
 public:
  explicit fault_world(std::string backend, std::uint32_t pool_chunks = 24);
  fault_world(fault_world const&) = delete;
  fault_world& operator=(fault_world const&) = delete;
  ~fault_world();

  [[nodiscard]] std::string const& folder() const noexcept { return folder_; }
  [[nodiscard]] memhandover::broker_options broker() const;
  /// For a job of this world; without a gate, which a job on the fake driver needs besides.
  [[nodiscard]] step::training_memory::options job() const;
  [[nodiscard]] std::shared_ptr<memhandover::serving_pool> join_server() const;
  /// Starts the broker if there is none. Throws as `ensure_broker`.
  void start_broker();
  void end_broker();

  /// A job trains, a server joins, takes memory from it and gives it back, in neighbouring chunks
  /// and in scattered ones, and both leave.
  [[nodiscard]] outcome live();

  /// The same in a process of its own, which ends afterwards.
  [[nodiscard]] outcome live_in_child();

  /// Waits until nobody has anything any more, and says what is wrong with the ledger otherwise. A
  /// broker that has ended is started again.
  [[nodiscard]] std::string resolve();
  [[nodiscard]] holdings count() const;

 private:
  void train_and_serve();

  std::string backend_;
  std::uint32_t pool_chunks_;
  std::string folder_;
  memhandover::unique_fd presence_;  ///< keeps the broker
};

/// Makes the fake driver this process's libcuda.so.1.
void load_fake_driver();
void fail_driver_call(std::string const& symbol, int code, unsigned skip);
[[nodiscard]] std::uint64_t driver_calls(std::string const& symbol);
/// Calls of `symbol` that failed because it was wanted.
[[nodiscard]] std::uint64_t driver_failures(std::string const& symbol);

}  // namespace sluice::test
