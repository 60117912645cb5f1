#include <fmt/format.h>

#include <algorithm>

#include "runtime/server/inference/datatypes.hpp"
#include "runtime/server/repository/config_parts.hpp"
#include "runtime/server/repository/model_config.pb.h"

namespace sluice::server {
namespace {

using pbtxt::Warmup;

/// Nothing if they are too many for any machine.
std::optional<std::uint64_t> bytes_of(std::vector<std::int64_t> const& shape, datatype type) {
  constexpr std::uint64_t most = std::uint64_t{1} << 48U;
  std::uint64_t count = 1;
  for (auto const extent : shape) {
    if (extent < 1 || static_cast<std::uint64_t>(extent) > most / count) {
      return std::nullopt;
    }
    count *= static_cast<std::uint64_t>(extent);
  }
  return count * element_size(type);
}

std::filesystem::path file_of(std::string const& name, field_places const& at) {
  std::filesystem::path const path{name};
  bool const leaves =
      path.is_absolute() ||
      std::any_of(path.begin(), path.end(), [](auto const& each) { return each == ".."; });
  if (name.empty() || name.find('\0') != std::string::npos || leaves) {
    at.fail(Warmup::Input::kInputDataFileFieldNumber,
            "'input_data_file' must be a file's name in the model's folder 'warmup'");
  }
  return path;
}

warmup_input input_of(Warmup::Input const& from, tensor_spec const& spec, bool batched,
                      field_places const& at) {
  warmup_input result;
  result.name = spec.name;
  auto const type = datatype_of(from.data_type());
  if (type != spec.type) {
    at.fail(Warmup::Input::kDataTypeFieldNumber,
            fmt::format("the warm-up of input '{}' needs data_type: {}, the input's own", spec.name,
                        element_type_name(spec.type)));
  }
  result.type = spec.type;
  result.shape.assign(from.dims().begin(), from.dims().end());
  std::vector<std::int64_t> const wanted{spec.shape.begin() + (batched ? 1 : 0), spec.shape.end()};
  bool const fits =
      std::equal(result.shape.begin(), result.shape.end(), wanted.begin(), wanted.end(),
                 [](auto given, auto is) { return given > 0 && (is < 0 || given == is); });
  auto const bytes = bytes_of(result.shape, result.type);
  if (!fits || !bytes) {
    at.fail(Warmup::Input::kDimsFieldNumber,
            fmt::format("the warm-up of input '{}' has dims: [{}]; the input's are [{}], and each "
                        "must be a number of at least 1",
                        spec.name, fmt::join(result.shape, ", "), fmt::join(wanted, ", ")));
  }
  result.bytes = *bytes;
  switch (from.data_case()) {
    case Warmup::Input::kZeroData:
      result.data = warmup_input::source::zeros;
      break;
    case Warmup::Input::kRandomData:
      result.data = warmup_input::source::random;
      break;
    case Warmup::Input::kInputDataFile:
      result.data = warmup_input::source::file;
      result.file = file_of(from.input_data_file(), at);
      break;
    case Warmup::Input::DATA_NOT_SET:
      at.fail(
          fmt::format("the warm-up of input '{}' needs one of zero_data: true, random_data: "
                      "true, input_data_file: \"…\"",
                      spec.name));
  }
  return result;
}

warmup_sample sample_of(Warmup const& from, std::vector<tensor_spec> const& inputs,
                        std::int64_t max_batch_size, field_places const& at) {
  warmup_sample result;
  result.name = from.name();
  result.batch_size = from.batch_size();
  result.count = std::max(from.count(), 1U);
  auto const most = std::max(max_batch_size, std::int64_t{1});
  if (result.batch_size > most) {
    at.fail(Warmup::kBatchSizeFieldNumber,
            fmt::format("the warm-up '{}' has batch_size: {}; with max_batch_size: {} it must be "
                        "at most {}",
                        result.name, result.batch_size, max_batch_size, most));
  }
  for (auto const& spec : inputs) {
    auto const found = from.inputs().find(spec.name);
    if (found == from.inputs().end()) {
      at.fail(
          fmt::format("the warm-up '{}' lacks input '{}'; describe it by inputs {{ key: \"{}\" "
                      "value {{ … }} }}",
                      result.name, spec.name, spec.name));
    }
    result.inputs.push_back(input_of(found->second, spec, max_batch_size > 0,
                                     at.within_key(Warmup::kInputsFieldNumber, spec.name)));
  }
  for (auto const& given : from.inputs()) {
    if (std::none_of(inputs.begin(), inputs.end(),
                     [&](tensor_spec const& spec) { return spec.name == given.first; })) {
      at.within_key(Warmup::kInputsFieldNumber, given.first)
          .fail(fmt::format("the model has no input '{}', which the warm-up '{}' gives",
                            given.first, result.name));
    }
  }
  return result;
}

}  // namespace

std::vector<warmup_sample> read_warmup(pbtxt::Model const& model, field_places const& at,
                                       std::vector<tensor_spec> const& inputs,
                                       passed_over& without_effect) {
  constexpr int field = pbtxt::Model::kModelWarmupFieldNumber;
  std::vector<warmup_sample> samples;
  for (int i = 0; i < model.model_warmup_size(); ++i) {
    auto const inside = at.within(field, i);
    if (model.model_warmup(i).batch_size() == 0) {  // as in Triton
      without_effect.emplace_back(inside.own(), "model_warmup, as its batch_size is 0");
      continue;
    }
    samples.push_back(sample_of(model.model_warmup(i), inputs, model.max_batch_size(), inside));
  }
  return samples;
}

}  // namespace sluice::server
