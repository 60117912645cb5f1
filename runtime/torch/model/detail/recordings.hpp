/// What a model launches for arguments of one shape, recorded once that shape has come several times, and launched at once from
/// then on. Of one thread. Includes torch; only for the files that torch_model.hpp hides.
///
///   recordings mine{std::move(recorder)};
///   auto result = mine.run(arguments, compute);   // as compute(arguments)
///   // … what it holds is copied before the next run …
///
/// A shape that has come `often` is recorded after it has been computed once more; the recording is launched, too, and what comes
/// of it compared byte by byte. Where that differs, or what was done cannot be recorded, the model is computed as ever from
/// then on, and `refusal` says why; where memory is short it is tried again. The `most` shapes that were used last are kept.
///
/// Only for models whose computations change nothing, and whose arguments are tensors of the device.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/torch/model/detail/launch_recorder.hpp"

namespace sluice::server::detail {

class recordings {
 public:
  static constexpr std::size_t often = 2, most = 64;
  using forward = std::function<c10::IValue(std::vector<c10::IValue>)>;

  explicit recordings(std::unique_ptr<launch_recorder> recorder) : recorder_{std::move(recorder)} {}

  /// Throws what `compute` throws.
  [[nodiscard]] c10::IValue run(std::vector<c10::IValue> arguments, forward const& compute);
  /// Why nothing more is recorded; set once.
  [[nodiscard]] std::optional<std::string> const& refusal() const noexcept { return refusal_; }
  [[nodiscard]] std::size_t count() const noexcept;

 private:
  struct seen_shape {
    std::string shape;
    std::size_t times = 0;
    std::vector<c10::IValue> arguments;  ///< at the addresses that are recorded
    c10::IValue result;
    std::unique_ptr<recording> launches;  ///< destroyed before what it reads and writes
  };

  [[nodiscard]] seen_shape& of(std::string shape);
  void record(seen_shape& now, c10::IValue const& computed, forward const& compute);

  std::unique_ptr<launch_recorder> recorder_;  ///< outlives what it has recorded
  std::list<seen_shape> shapes_;               ///< the last used first
  std::optional<std::string> refusal_;
};

}  // namespace sluice::server::detail
