/// A model as the host sees it: tensors that must lie in pool memory before it can compute.
///
///   cold ──load(memory), attach(memory)──► warm ──unload()──► cold
///
/// Its *image* is what `load` copies from: the weights on this host, out of the model's file. It need not be there
/// before.
///
/// The host calls `load`, `load_spare`, `attach`, `extend_image`, `run`, `run_together`, `rest` and `unload` one at a time, from several
/// threads, but for `run` and `run_together`, `most_at_once` of which may run beside each other; the others may be called from anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

/// One request of several.
struct model_call {
  std::vector<tensor>& inputs;
  std::vector<std::string> const& wanted;  ///< outputs, in that order; empty: all
  std::vector<tensor> outputs{};
};

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
  /// The same by pieces that must each be contiguous, in bytes; none for a model without weights.
  [[nodiscard]] virtual std::span<std::uint64_t const> pieces() const noexcept = 0;

  /// How much of `bytes()` the image holds.
  [[nodiscard]] virtual std::uint64_t image_bytes() const noexcept { return bytes(); }
  /// Brings a further part of the weights into the image, in some milliseconds; to be called only while it is not
  /// complete, which `load` makes it otherwise. Throws `unavailable` if the file has been written to since it was
  /// opened, `out_of_memory` if there is no room.
  virtual void extend_image() {}
  /// How much of the model's file has been read.
  [[nodiscard]] virtual std::uint64_t read_bytes() const noexcept { return 0; }

  /// Puts the weights into `pieces()[i]` bytes from `memory[i]` on, aligned to `weight_alignment`,
  /// which stay the model's until `unload`. After an exception the model is cold and holds nothing of
  /// that memory.
  virtual void load(std::span<std::byte* const> memory) = 0;
  /// As `load`, of a model that nobody waits for: where that takes long it ends with `cancelled` soon after it is `called_off`.
  virtual void load_spare(std::span<std::byte* const> memory, std::stop_token const& called_off) {
    (void)called_off;
    load(memory);
  }

  /// Which bytes `load` writes, in a few words: two models whose words are equal, and whose pieces are, fill
  /// their memory alike. Empty: not known, so that no other process may take them over.
  [[nodiscard]] virtual std::string fingerprint() const { return {}; }
  /// As `load`, of memory that holds already what `load` would write there.
  virtual void attach(std::span<std::byte* const> memory) { load(memory); }

  /// Whether what computations have changed in the memory has been undone. To be asked while it is warm and
  /// nothing else is called.
  [[nodiscard]] virtual bool is_intact() const noexcept { return true; }

  /// Lets go of the memory. Throws `internal` if the model still reaches into it: then it must not
  /// be released.
  virtual void unload() = 0;

  /// Computes the outputs named in `wanted`, in that order; all if it is empty. Only while warm.
  /// What the computation changed in the model is undone before this returns, so that answers do
  /// not depend on earlier requests. Throws `invalid_argument` for inputs that the model cannot
  /// take, `model_error` where it is the model that fails.
  [[nodiscard]] virtual std::vector<tensor> run(std::vector<tensor>& inputs,
                                                std::vector<std::string> const& wanted) = 0;

  /// Computations that may run beside each other: more than one only if none ever changes the memory.
  [[nodiscard]] virtual std::size_t most_at_once() const noexcept { return 1; }

  /// Whether several requests can be computed together.
  [[nodiscard]] virtual bool can_batch() const noexcept { return false; }
  /// As `run` for each of them, but computed once, of inputs that are put together along their first dimension, which
  /// may differ; all else of their shapes and types is equal. Each gets its part of the outputs. Throws as `run`; then it is
  /// not known for whose sake, and none has an answer. To be called only if it `can_batch`.
  virtual void run_together(std::span<model_call> calls) {
    for (auto& each : calls) {
      each.outputs = run(each.inputs, each.wanted);
    }
  }

  /// Lets go of what it keeps for its next computations besides the weights. Whether there was anything.
  virtual bool rest() noexcept { return false; }

  /// What a computation has needed of memory besides the weights, at most, as far as that was measured.
  [[nodiscard]] virtual std::uint64_t activation_bytes() const noexcept { return 0; }

  /// Whether the device can compute any more, to be asked when `run` has failed: after an error of a kernel on a GPU this
  /// process cannot, whatever the model.
  [[nodiscard]] virtual bool device_works() const noexcept { return true; }
};

}  // namespace sluice::server
