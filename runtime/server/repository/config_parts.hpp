/// Parts of a model's configuration that are read and checked each by itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/server/inference/batching.hpp"
#include "runtime/server/inference/computing_rules.hpp"
#include "runtime/server/inference/warmup.hpp"
#include "runtime/server/repository/config_text.hpp"

namespace sluice::server {

namespace pbtxt {
class Model;  // NOLINT(readability-identifier-naming): of model_config.proto
}

/// Fields of a file that have no effect, with their places.
using passed_over = std::vector<std::pair<text_position, std::string>>;

/// Of the number of an enumerator TYPE_…; nothing if it is none of a type.
[[nodiscard]] std::optional<datatype> datatype_of(int element_type) noexcept;
[[nodiscard]] std::string const& element_type_name(datatype type);

/// Of `max_batch_size` and `dynamic_batching`.
[[nodiscard]] batching_rules read_batching(pbtxt::Model const& model, field_places const& at,
                                           passed_over& without_effect);

/// Of `instance_group` and `optimization`.
[[nodiscard]] computing_rules read_computing(pbtxt::Model const& model, field_places const& at,
                                             passed_over& without_effect);

/// Of `model_warmup`, held against the model's inputs as a configuration describes them. The files
/// are named as the configuration names them.
[[nodiscard]] std::vector<warmup_sample> read_warmup(pbtxt::Model const& model,
                                                     field_places const& at,
                                                     std::vector<tensor_spec> const& inputs,
                                                     passed_over& without_effect);

}  // namespace sluice::server
