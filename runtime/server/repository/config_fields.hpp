/// The fields of Triton's ModelConfig that are not simply taken, and what becomes of each here.
///
/// Source: Triton, common/protobuf/model_config.proto.
#pragma once

#include <array>
#include <string_view>

namespace sluice::server {

/// How a field of Triton's is treated.
enum class treatment {
  without_effect,      ///< tunes what Sluice decides itself
  unsupported,         ///< passing it over would change what a request means
  unsupported_if_set,  ///< unless it says what holds without it
};
struct treated_field {
  std::string_view name;
  treatment how;
};

inline constexpr auto model_fields = std::to_array<treated_field>({
    {"runtime", treatment::without_effect},
    {"metric_tags", treatment::without_effect},
    {"parameters", treatment::without_effect},
    {"model_metrics", treatment::without_effect},
    {"response_cache", treatment::without_effect},
    {"model_transaction_policy", treatment::unsupported_if_set},
    {"cc_model_filenames", treatment::unsupported},
    {"model_operations", treatment::unsupported},
    {"model_repository_agents", treatment::unsupported},
    {"batch_input", treatment::unsupported},
    {"batch_output", treatment::unsupported},
    {"sequence_batching", treatment::unsupported},
    {"ensemble_scheduling", treatment::unsupported},
});
inline constexpr auto input_fields = std::to_array<treated_field>({
    {"format", treatment::without_effect},
    {"is_shape_tensor", treatment::unsupported_if_set},
    {"allow_ragged_batch", treatment::unsupported_if_set},
    {"optional", treatment::unsupported_if_set},
    {"is_non_linear_format_io", treatment::unsupported_if_set},
});
inline constexpr auto output_fields = std::to_array<treated_field>({
    {"label_filename", treatment::without_effect},
    {"is_shape_tensor", treatment::unsupported_if_set},
    {"is_non_linear_format_io", treatment::unsupported_if_set},
});

}  // namespace sluice::server
