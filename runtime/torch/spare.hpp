/// What an executor does before it has orders: as a spare it loads and makes what takes long, and takes nothing of a model's or
/// of the pool's.
#pragma once

#include <nlohmann/json.hpp>

#include "runtime/torch/model/torch_model.hpp"

namespace sluice::server {

/// What a spare is to be told by the server, of an executor that computes there.
[[nodiscard]] nlohmann::json preparation_for(torch_device device, int threads);

/// Throws `invalid_argument` if that is no such word, else as `start_torch` and `rehearse`.
void prepare_spare(nlohmann::json const& wanted);

}  // namespace sluice::server
