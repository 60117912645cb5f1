/// What torch.amp.GradScaler is for Python, which libtorch has not: losses are scaled, so that
/// gradients of half precision do not vanish, and steps whose gradients overflow are left out.
///
///   sluice::grad_scaler scaler;
///   sluice::step step{model, optimizer, {.scaler = scaler}};
///   step(loss_of, {x, y});
///   return scaler.get_scale();   // 65536 at first
///
/// Names, defaults and arithmetic are torch's (torch/amp/grad_scaler.py), to the bit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace sluice {

struct grad_scaler_options {
  double init_scale = 65536.0;
  double growth_factor = 2.0;           ///< after `growth_interval` steps without overflow
  double backoff_factor = 0.5;          ///< after one with it
  std::int64_t growth_interval = 2000;  ///< steps in a row
  /// How many of them have been made: to go on from a checkpoint, with its scale as `init_scale`.
  std::int64_t growth_tracker = 0;
};

/// A handle, as at::Generator is: copies have one scale.
///
/// Where a step has it, all but the numbers that it has come to is the step's to call, in the order
///
///     scale (of each slice's loss) ─► unscale ─► all_finite ─► update
///
/// Not thread-safe.
class grad_scaler {
 public:
  /// Throws std::invalid_argument for options with which the scale would not grow, shrink and stay
  /// above 0.
  explicit grad_scaler(grad_scaler_options const& options = {});

  /// The factor by which losses are multiplied. Waits for the device, as does the other.
  [[nodiscard]] double get_scale() const;
  /// Steps without overflow since the scale has changed.
  [[nodiscard]] std::int64_t get_growth_tracker() const;

  /// Makes the scale where these tensors lie, if it has not been made yet.
  void place(at::Tensor const& beside);
  /// A loss that backward is to run on.
  [[nodiscard]] at::Tensor scale(at::Tensor const& loss) const;
  /// Divides the gradients of these parameters by the scale, and looks for infinities and NaN.
  /// Throws std::invalid_argument for gradients of half precision, which have overflowed already.
  void unscale(std::vector<at::Tensor> const& params);
  /// Whether there were none. Waits for the device. Throws std::logic_error, as does `update`, if
  /// there was no gradient to look at.
  [[nodiscard]] bool all_finite() const;
  /// Once a step: the scale grows, or shrinks if there were some.
  void update();

 private:
  struct state;
  std::shared_ptr<state> state_;
};

}  // namespace sluice
