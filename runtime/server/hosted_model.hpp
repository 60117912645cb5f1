/// A model as the host sees it: a number of bytes that must lie in pool memory before it can
/// compute.
///
///   cold ──load(memory)──► warm ──unload()──► cold
///
/// The host calls `load`, `run` and `unload` from its one executor thread; `bytes` may be called
/// from anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/server/inference_service.hpp"

namespace sluice::server {

class hosted_model {
 public:
  hosted_model() = default;
  hosted_model(hosted_model const&) = delete;
  hosted_model& operator=(hosted_model const&) = delete;
  hosted_model(hosted_model&&) = delete;
  hosted_model& operator=(hosted_model&&) = delete;
  virtual ~hosted_model() = default;

  /// Pool memory that `load` fills: constant, and 0 for a model without weights.
  [[nodiscard]] virtual std::uint64_t bytes() const noexcept = 0;

  /// Puts the weights into `bytes()` bytes from `memory` on, which stay the model's until `unload`.
  /// After an exception the model is cold and holds nothing of `memory`. `memory` may be null if
  /// `bytes()` is 0.
  virtual void load(std::byte* memory) = 0;

  /// Lets go of the memory. Throws `internal` if the model still reaches into it: then it must not
  /// be released.
  virtual void unload() = 0;

  /// Computes the outputs named in `wanted`, in that order; all if it is empty. Only while warm.
  /// What the computation changed in the model is undone before this returns, so that answers do
  /// not depend on earlier requests. Throws `invalid_argument` for inputs that the model cannot
  /// take.
  [[nodiscard]] virtual std::vector<tensor> run(std::vector<tensor>& inputs,
                                                std::vector<std::string> const& wanted) = 0;
};

}  // namespace sluice::server
