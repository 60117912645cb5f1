#include "runtime/server/repository/model_config.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <span>
#include <utility>

#include "runtime/server/repository/config_fields.hpp"
#include "runtime/server/repository/config_json.hpp"
#include "runtime/server/repository/config_parts.hpp"
#include "runtime/server/repository/config_text.hpp"
#include "runtime/server/repository/model_config.pb.h"

namespace sluice::server {
namespace {

namespace pb = google::protobuf;

constexpr auto element_types = std::to_array<std::pair<pbtxt::ElementType, datatype>>({
    {pbtxt::TYPE_BOOL, datatype::boolean},
    {pbtxt::TYPE_UINT8, datatype::uint8},
    {pbtxt::TYPE_UINT16, datatype::uint16},
    {pbtxt::TYPE_UINT32, datatype::uint32},
    {pbtxt::TYPE_UINT64, datatype::uint64},
    {pbtxt::TYPE_INT8, datatype::int8},
    {pbtxt::TYPE_INT16, datatype::int16},
    {pbtxt::TYPE_INT32, datatype::int32},
    {pbtxt::TYPE_INT64, datatype::int64},
    {pbtxt::TYPE_FP16, datatype::fp16},
    {pbtxt::TYPE_BF16, datatype::bf16},
    {pbtxt::TYPE_FP32, datatype::fp32},
    {pbtxt::TYPE_FP64, datatype::fp64},
    {pbtxt::TYPE_STRING, datatype::bytes},
});

/// What becomes of the fields of a message that are not simply taken.
void treat(pb::Message const& message, field_places const& at,
           std::span<treated_field const> fields, passed_over& without_effect) {
  auto const& type = *message.GetDescriptor();
  for (auto const& [name, how] : fields) {
    auto const& field = *type.FindFieldByName(std::string{name});
    auto const number = field.number();
    if (!at.mentions(number)) {
      continue;
    }
    if (how == treatment::without_effect) {
      for (int i = 0; i < at.mention_count(number); ++i) {
        without_effect.emplace_back(at.mention(number, i), name);
      }
      continue;
    }
    auto const& reflection = *message.GetReflection();
    bool const is_message = field.message_type() != nullptr;
    if (how == treatment::unsupported_if_set &&
        (is_message ? reflection.GetMessage(message, &field).ByteSizeLong() == 0
                    : !reflection.GetBool(message, &field))) {
      continue;
    }
    at.fail(
        number,
        fmt::format("'{}' is not supported here, and leaving it out would change answers", name),
        error_kind::unsupported);
  }
}

std::vector<std::int64_t> shape_of(pb::RepeatedField<std::int64_t> const& dims,
                                   field_places const& at, int field, std::string const& named,
                                   bool batched) {
  std::vector<std::int64_t> shape;
  if (batched) shape.push_back(-1);
  for (int i = 0; i < dims.size(); ++i) {
    if (dims[i] < 1 && dims[i] != -1) {
      at.fail_at(
          at.of(field, i),
          fmt::format("{} has a dimension of {}; it must be at least 1, or -1 where it varies",
                      named, dims[i]));
    }
    shape.push_back(dims[i]);
  }
  return shape;
}

/// How many elements are between the free dimensions; nothing if they are too many for any machine.
std::optional<std::vector<std::int64_t>> between_free(pb::RepeatedField<std::int64_t> const& dims) {
  std::vector<std::int64_t> counts{1};
  for (auto const extent : dims) {
    if (extent < 0) {
      counts.push_back(1);
    } else if (__builtin_mul_overflow(counts.back(), extent, &counts.back())) {
      return std::nullopt;
    }
  }
  return counts;
}

template <typename Tensor>
std::optional<std::vector<std::int64_t>> model_shape_of(Tensor const& from, field_places const& at,
                                                        std::string const& named, bool batched) {
  if (!from.has_reshape()) {
    return std::nullopt;
  }
  constexpr int field = pbtxt::Reshape::kShapeFieldNumber;
  auto const inside = at.within(Tensor::kReshapeFieldNumber);
  auto const& shape = from.reshape().shape();
  auto result = shape_of(shape, inside, field, "the reshape of " + named, batched);
  auto const counts = between_free(from.dims());
  if (!counts || counts != between_free(shape)) {
    inside.fail(
        fmt::format("the reshape of {} to [{}] does not fit its dims, [{}]; it must have as "
                    "many dimensions of -1, and between them as many elements",
                    named, fmt::join(shape, ", "), fmt::join(from.dims(), ", ")));
  }
  return result;
}

/// An input or an output; `Tensor` is its message.
template <typename Tensor>
tensor_spec tensor_of(Tensor const& from, field_places const& at, std::string_view what,
                      bool batched) {
  if (from.name().empty()) at.fail(fmt::format("this {} needs a name: \"…\"", what));
  auto const named = fmt::format("{} '{}'", what, from.name());
  auto const type = datatype_of(from.data_type());
  if (!type) {
    std::vector<std::string> names;
    names.reserve(element_types.size());
    for (auto const& each : element_types) names.push_back(pbtxt::ElementType_Name(each.first));
    at.fail(Tensor::kDataTypeFieldNumber,
            fmt::format("{} needs a data_type; take one of {}", named, fmt::join(names, ", ")));
  }
  if (!at.mentions(Tensor::kDimsFieldNumber)) {
    at.fail(fmt::format("{} needs dims: [ … ]; dims: [ ] means a scalar", named));
  }
  return {from.name(), *type, shape_of(from.dims(), at, Tensor::kDimsFieldNumber, named, batched),
          model_shape_of(from, at, named, batched)};
}

/// All inputs, or all outputs; `field` is theirs.
template <typename Tensors>
std::vector<tensor_spec> tensors_of(Tensors const& from, field_places const& model, int field,
                                    std::string_view what, bool batched,
                                    std::span<treated_field const> treated,
                                    passed_over& without_effect) {
  std::vector<tensor_spec> result;
  std::set<std::string> names;
  for (int i = 0; i < from.size(); ++i) {
    auto const at = model.within(field, i);
    treat(from[i], at, treated, without_effect);
    result.push_back(tensor_of(from[i], at, what, batched));
    if (!names.insert(result.back().name).second) {
      at.fail(fmt::format("there are two {}s named '{}'", what, result.back().name));
    }
  }
  if (result.empty()) {
    model.fail(fmt::format(
        "the model has no {0}; describe each by {0} {{ name: \"…\" data_type: TYPE_FP32 "
        "dims: [ … ] }}",
        what));
  }
  return result;
}

version_policy versions_of(pbtxt::Model const& model, field_places const& at) {
  using pbtxt::Versions;
  constexpr int field = pbtxt::Model::kVersionPolicyFieldNumber;
  version_policy result;
  if (!model.has_version_policy()) {
    return result;
  }
  auto const& from = model.version_policy();
  auto const inside = at.within(field);
  switch (from.choice_case()) {
    case Versions::kLatest: {
      constexpr int count = Versions::Latest::kNumVersionsFieldNumber;
      auto const there = inside.within(Versions::kLatestFieldNumber);
      if (there.mentions(count) && from.latest().num_versions() == 0) {
        there.fail(count, "'num_versions' is 0; it must be at least 1");
      }
      result.latest = std::max<std::uint64_t>(from.latest().num_versions(), 1);
      break;
    }
    case Versions::kAll:
      result.kind = version_policy::kind_t::all;
      break;
    case Versions::kSpecific: {
      auto const there = inside.within(Versions::kSpecificFieldNumber);
      result.kind = version_policy::kind_t::specific;
      for (int i = 0; i < from.specific().versions_size(); ++i) {
        auto const version = from.specific().versions(i);
        if (version < 1) {
          there.fail_at(there.of(Versions::Specific::kVersionsFieldNumber, i),
                        fmt::format("'versions' has {}; it must be at least 1", version));
        }
        result.specific.push_back(static_cast<std::uint64_t>(version));
      }
      if (result.specific.empty()) {
        there.fail("specific needs at least one of versions: [ … ]");
      }
      break;
    }
    case Versions::CHOICE_NOT_SET:
      inside.fail(
          "version_policy takes exactly one of latest { num_versions: 1 }, all { }, "
          "specific { versions: [ 1, 3 ] }");
  }
  return result;
}

void check_platform(pbtxt::Model const& model, field_places const& at) {
  if (!model.platform().empty() && model.platform() != "pytorch_libtorch") {
    at.fail(
        pbtxt::Model::kPlatformFieldNumber,
        fmt::format("platform '{}' is not supported; only \"pytorch_libtorch\" (TorchScript) is",
                    model.platform()),
        error_kind::unsupported);
  }
  if (!model.backend().empty() && model.backend() != "pytorch") {
    at.fail(pbtxt::Model::kBackendFieldNumber,
            fmt::format("backend '{}' is not supported; only \"pytorch\" (TorchScript) is",
                        model.backend()),
            error_kind::unsupported);
  }
  if (model.platform().empty() && model.backend().empty()) {
    at.fail("the file must say platform: \"pytorch_libtorch\" or backend: \"pytorch\"");
  }
}

void check_filename(pbtxt::Model const& model, field_places const& at) {
  auto const& name = model.default_model_filename();
  if (name.find('/') != std::string::npos || name.find('\0') != std::string::npos || name == "." ||
      name == "..") {
    at.fail(pbtxt::Model::kDefaultModelFilenameFieldNumber,
            "default_model_filename must be a file's name without folders");
  }
}

/// As Triton fills them in.
void fill_defaults(pbtxt::Model& model, std::string const& filename) {
  model.set_platform("pytorch_libtorch");
  model.set_backend("pytorch");
  model.set_default_model_filename(filename);
  if (!model.has_version_policy()) {
    model.mutable_version_policy()->mutable_latest()->set_num_versions(1);
  }
  if (model.has_dynamic_batching() && model.max_batch_size() > 0 &&
      model.dynamic_batching().preferred_batch_size().empty()) {
    model.mutable_dynamic_batching()->add_preferred_batch_size(model.max_batch_size());
  }
}

std::vector<std::string> listed(passed_over fields) {
  auto const place = [](auto const& each) { return std::pair{each.first.line, each.first.column}; };
  std::stable_sort(fields.begin(), fields.end(),
                   [&](auto const& a, auto const& b) { return place(a) < place(b); });
  std::vector<std::string> result;
  result.reserve(fields.size());
  for (auto const& [where, name] : fields) {
    result.push_back(fmt::format("line {}: {}", where.line, name));
  }
  return result;
}

}  // namespace

std::optional<datatype> datatype_of(int element_type) noexcept {
  auto const* const found =
      std::find_if(element_types.begin(), element_types.end(),
                   [&](auto const& each) { return each.first == element_type; });
  return found == element_types.end() ? std::nullopt : std::optional{found->second};
}

std::string const& element_type_name(datatype type) {
  auto const* const found = std::find_if(element_types.begin(), element_types.end(),
                                         [&](auto const& each) { return each.second == type; });
  return pbtxt::ElementType_Name(found->first);
}

model_config read_model_config(std::string_view text, std::string const& file) {
  using pbtxt::Model;
  Model model;
  config_text const source{text, file, model};
  auto const at = source.places();
  passed_over without_effect;
  treat(model, at, model_fields, without_effect);
  check_platform(model, at);
  check_filename(model, at);
  model_config config;
  config.name = model.name();
  config.max_batch_size = model.max_batch_size();
  if (config.max_batch_size < 0) {
    at.fail(Model::kMaxBatchSizeFieldNumber,
            "max_batch_size must be 0 (no batching) or a positive 32-bit number");
  }
  bool const batched = config.max_batch_size > 0;
  config.inputs = tensors_of(model.input(), at, Model::kInputFieldNumber, "input", batched,
                             input_fields, without_effect);
  config.outputs = tensors_of(model.output(), at, Model::kOutputFieldNumber, "output", batched,
                              output_fields, without_effect);
  config.versions = versions_of(model, at);
  config.batching = read_batching(model, at, without_effect);
  config.computing = read_computing(model, at, without_effect);
  config.warmup = read_warmup(model, at, config.inputs, without_effect);
  if (!model.default_model_filename().empty()) {
    config.model_filename = model.default_model_filename();
  }
  fill_defaults(model, config.model_filename);
  config.json = config_to_json(model);
  config.without_effect = listed(std::move(without_effect));
  return config;
}

}  // namespace sluice::server
