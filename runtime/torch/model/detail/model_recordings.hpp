/// The recordings of one model, each thread's its own. Includes torch; only for the files that torch_model.hpp hides.
///
///   model_recordings all{"resnet"};
///   all.begin();                                    // else nothing is recorded
///   auto result = all.run(arguments, compute);      // by any thread; as compute(arguments)
///
/// The log says once that launches are recorded, or why they are not.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/torch/model/detail/recordings.hpp"

namespace sluice::server::detail {

class model_recordings {
 public:
  explicit model_recordings(std::string model) : model_{std::move(model)} {}

  /// For models of which recordings.hpp speaks.
  void begin() noexcept { records_ = true; }
  /// What it returns is to be read before this thread's next call. Throws what `compute` throws.
  [[nodiscard]] c10::IValue run(std::vector<c10::IValue> arguments,
                                recordings::forward const& compute);
  /// While nobody runs. Whether there was anything.
  bool clear() noexcept;

 private:
  [[nodiscard]] recordings* of_this_thread();
  void refuse(std::string const& why);

  std::string const model_;
  std::atomic<bool> records_ = false, is_noted_ = false;
  std::mutex mutex_;  ///< guards the map, of which each thread uses its own entry
  std::map<std::thread::id, recordings> by_thread_;
};

}  // namespace sluice::server::detail
