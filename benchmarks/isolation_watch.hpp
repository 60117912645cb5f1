/// What a role of the benchmark `isolation` is doing, and the end of one that gets nowhere.
///
///   role_watch watch{"server", counts.doing[0], 60s};
///   watch.doing(activity::acquiring);   // shown to whoever asks, and named if it takes too long
///   watch.got_on();                     // the time begins anew
///
/// Thread-safety: all functions from any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace sluice::bench {

enum class activity : std::uint64_t {
  nothing,
  joining,
  persistent,
  allocating,
  using_memory,
  own_turn,
  committing,
  freeing,
  growth,
  acquiring,
  kernel,
  leaving,
};

/// As the end of a sentence that begins with "it waits for".
[[nodiscard]] char const* to_string(activity what) noexcept;

/// Ends the process, with a sentence on why, if `got_on` is not called for `patience`.
class role_watch {
 public:
  /// `shown` is where others read what this role does; it must outlive this object.
  role_watch(std::string role, std::atomic<std::uint64_t>& shown, std::chrono::seconds patience);
  role_watch(role_watch const&) = delete;
  role_watch& operator=(role_watch const&) = delete;
  ~role_watch();

  void doing(activity what) noexcept { shown_.store(static_cast<std::uint64_t>(what)); }
  void got_on();
  /// What else to say at that end; called by a thread of this object. Null: nothing.
  void explain_by(std::function<std::string()> words);

 private:
  void run();

  std::string const role_;
  std::chrono::seconds const patience_;
  std::atomic<std::uint64_t>& shown_;
  std::mutex mutex_;  ///< guards what follows
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point got_on_;
  std::function<std::string()> words_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace sluice::bench
