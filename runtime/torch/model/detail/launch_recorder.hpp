/// What a thread launches on a GPU, recorded as CUDA graphs. Behind it stands a library of its own
/// (libsluice_torch_graph.so), which is opened where models lie on a GPU. Includes torch; only for the files that
/// torch_model.hpp hides, and that library.
#pragma once

#include <functional>
#include <memory>

namespace sluice::server::detail {

/// What has been launched once, to be launched again, at the same addresses.
class recording {
 public:
  recording() = default;
  recording(recording const&) = delete;
  recording& operator=(recording const&) = delete;
  /// Not while what it has launched is computed.
  virtual ~recording() = default;
  /// Launches it on the stream that it was recorded on. Throws `c10::Error`.
  virtual void replay() = 0;
};

/// Of one thread, which alone may call it, and of one stream, that thread's current one. What is allocated while it records
/// stays reserved for its recordings, which share that memory: one is replayed at a time, and what it has computed is
/// read before the next one.
class launch_recorder {
 public:
  launch_recorder() = default;
  launch_recorder(launch_recorder const&) = delete;
  launch_recorder& operator=(launch_recorder const&) = delete;
  /// After its recordings.
  virtual ~launch_recorder() = default;
  /// Calls `compute`, which launches nothing meanwhile. Throws what it throws, and `std::runtime_error` where
  /// what it does cannot be repeated by launches alone: it waits for the device, or copies from or to the host.
  [[nodiscard]] virtual std::unique_ptr<recording> record(std::function<void()> const& compute) = 0;
};

/// Of the calling thread and its current stream, which is not the default one. Throws `unsupported` if the library cannot be
/// opened.
[[nodiscard]] std::unique_ptr<launch_recorder> recorder_of_this_thread();

}  // namespace sluice::server::detail
