/// The fields of Triton's ModelConfig, and what becomes of each here.
///
/// Source: Triton, common/protobuf/model_config.proto.
#pragma once

#include <array>
#include <string_view>

#include "runtime/server/inference/inference_service.hpp"

namespace sluice::server {

struct type_name {
  std::string_view name;
  datatype type;
};
inline constexpr auto type_names = std::to_array<type_name>({
    {"TYPE_BOOL", datatype::boolean},
    {"TYPE_UINT8", datatype::uint8},
    {"TYPE_UINT16", datatype::uint16},
    {"TYPE_UINT32", datatype::uint32},
    {"TYPE_UINT64", datatype::uint64},
    {"TYPE_INT8", datatype::int8},
    {"TYPE_INT16", datatype::int16},
    {"TYPE_INT32", datatype::int32},
    {"TYPE_INT64", datatype::int64},
    {"TYPE_FP16", datatype::fp16},
    {"TYPE_BF16", datatype::bf16},
    {"TYPE_FP32", datatype::fp32},
    {"TYPE_FP64", datatype::fp64},
    {"TYPE_STRING", datatype::bytes},
});

/// How a field of Triton's is treated.
enum class treatment {
  taken,
  without_effect,  ///< tunes what Sluice decides itself
  unsupported,     ///< passing it over would change what a request means
  unsupported_if_true,
};
struct known_field {
  std::string_view name;
  treatment how;
};

inline constexpr auto model_fields = std::to_array<known_field>({
    {"name", treatment::taken},
    {"platform", treatment::taken},
    {"backend", treatment::taken},
    {"max_batch_size", treatment::taken},
    {"input", treatment::taken},
    {"output", treatment::taken},
    {"default_model_filename", treatment::taken},
    {"version_policy", treatment::taken},
    {"runtime", treatment::without_effect},
    {"optimization", treatment::without_effect},
    {"dynamic_batching", treatment::without_effect},
    {"instance_group", treatment::without_effect},
    {"metric_tags", treatment::without_effect},
    {"parameters", treatment::without_effect},
    {"model_warmup", treatment::without_effect},
    {"model_metrics", treatment::without_effect},
    {"response_cache", treatment::without_effect},
    {"cc_model_filenames", treatment::unsupported},
    {"model_operations", treatment::unsupported},
    {"model_transaction_policy", treatment::unsupported},
    {"model_repository_agents", treatment::unsupported},
    {"batch_input", treatment::unsupported},
    {"batch_output", treatment::unsupported},
    {"sequence_batching", treatment::unsupported},
    {"ensemble_scheduling", treatment::unsupported},
});
inline constexpr auto input_fields = std::to_array<known_field>({
    {"name", treatment::taken},
    {"data_type", treatment::taken},
    {"dims", treatment::taken},
    {"format", treatment::without_effect},
    {"reshape", treatment::unsupported},
    {"is_shape_tensor", treatment::unsupported_if_true},
    {"allow_ragged_batch", treatment::unsupported_if_true},
    {"optional", treatment::unsupported_if_true},
    {"is_non_linear_format_io", treatment::unsupported_if_true},
});
inline constexpr auto output_fields = std::to_array<known_field>({
    {"name", treatment::taken},
    {"data_type", treatment::taken},
    {"dims", treatment::taken},
    {"label_filename", treatment::without_effect},
    {"reshape", treatment::unsupported},
    {"is_shape_tensor", treatment::unsupported_if_true},
    {"is_non_linear_format_io", treatment::unsupported_if_true},
});

}  // namespace sluice::server
