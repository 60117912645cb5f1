/// What running a model's code changes besides what it returns. Includes torch; only for the files that torch_model.hpp hides.
#pragma once

#include <torch/csrc/jit/api/module.h>

#include <optional>
#include <string>

namespace sluice::server::detail {

/// Why a run of `forward` may change what another one sees, as far as its code says: it assigns to an attribute, or writes into one, or calls
/// what is not known before it runs. Nothing if it changes nothing, so that several may run at once. Attributes that are numbers, texts or truth
/// values are taken for the constants that they are then.
[[nodiscard]] std::optional<std::string> lasting_effect_of(torch::jit::Module const& module);

}  // namespace sluice::server::detail
