/// What a training process has of the pool: one state, shared by all functions of the C boundary.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "abi/gate_api.h"
#include "abi/step_api.h"
#include "memhandover/base/error.hpp"
#include "memhandover/client/work_report.hpp"
#include "memhandover/device/cuda_driver.hpp"
#include "runtime/step/driver_gate.hpp"
#include "runtime/step/operator_watch.hpp"
#include "runtime/step/rank_agreement.hpp"
#include "runtime/step/training_memory.hpp"
#include "scheduler/recomputation.hpp"

namespace sluice::step {

/// What this process has of the pool. Set once, then constant; never destroyed, since threads use
/// it until the end.
struct process_state {
  memhandover::backend_kind backend = memhandover::backend_kind::host;
  int device = -1;
  sluice_gate_api const* gate_table = nullptr;
  std::uint32_t samples_in_commit = 0;  // of the thread that commits alone
  std::unique_ptr<driver_gate> gate;
  std::shared_ptr<memhandover::cuda_driver const> driver;
  std::unique_ptr<training_memory> memory;
  std::atomic<rank_agreement*> ranks{nullptr};     ///< of the host; stays once it is there
  std::atomic<bool> makes_granted{false};          ///< what other ranks have agreed to
  std::unique_ptr<memhandover::work_report> work;  ///< of an engine
  operator_watch* operators_watch = nullptr;       ///< of one on the host
  std::mutex planner_mutex;
  std::uint64_t kept_when_planned = 0;  ///< bytes of the pool; guarded by `planner_mutex`
  std::unique_ptr<scheduler::recomputing_planner> planner;
  std::mutex run_ahead_mutex;
  std::chrono::nanoseconds run_ahead{};  ///< as the gate has it; guarded by run_ahead_mutex
  std::uint32_t refused_logged = 0;      ///< of the control thread alone
};

/// Null without a pool, and in a forked child, which has the memory but no thread and no place in the pool.
[[nodiscard]] process_state* sharing() noexcept;
/// In a forked child what its parent shares; else null.
[[nodiscard]] process_state* inherited() noexcept;
/// Throws in a forked child of a process that shares.
void refuse_child();
/// From now on this process shares that. Once.
void share(std::unique_ptr<process_state> state);

/// A short queue on the device is what makes a pause short: follows the server's wish and the job's.
void bound_run_ahead(process_state& state);

/// An engine is no job: the server's work holds it as little as its own; rather training is held for what it has the device do.
[[nodiscard]] bool is_engine(process_state const& state) noexcept;

/// Throws `invalid_argument` if another GPU is named to be shared than the process uses.
void refuse_other_gpu(memhandover::broker_options const& broker, int device);
/// What the environment says of this job: its broker and its name. Sets up logging before anything of ours can log,
/// because standard output belongs to the user's program.
[[nodiscard]] training_memory::options options_of_job(char const* backend);
/// Whether that variable is `word`, and not what is `usual`; another one is logged.
[[nodiscard]] bool environment_says(char const* name, char const* word, char const* usual);
/// A line for the user, on standard error.
void say(std::string const& text);

/// The sentence that sluice_last_error() gives this thread.
[[nodiscard]] std::string& last_error() noexcept;

/// Runs `work`; an exception becomes a status and a sentence.
template <typename Work>
int guarded(Work&& work) noexcept {
  try {
    work();
    return SLUICE_OK;
  } catch (error const& why) {
    last_error() = why.what();
    switch (why.kind()) {
      case error_kind::cancelled:
        return SLUICE_CANCELLED;
      case error_kind::out_of_memory:
        return SLUICE_OUT_OF_MEMORY;
      default:
        return SLUICE_FAILED;
    }
  } catch (std::exception const& why) {
    last_error() = why.what();
    return SLUICE_FAILED;
  }
}

}  // namespace sluice::step
