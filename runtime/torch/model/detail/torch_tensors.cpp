#include "runtime/torch/model/detail/torch_tensors.hpp"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server::detail {
namespace {

/// All but BYTES.
constexpr auto types = std::to_array<std::pair<datatype, at::ScalarType>>({
    {datatype::boolean, at::kBool},
    {datatype::uint8, at::kByte},
    {datatype::uint16, at::kUInt16},
    {datatype::uint32, at::kUInt32},
    {datatype::uint64, at::kUInt64},
    {datatype::int8, at::kChar},
    {datatype::int16, at::kShort},
    {datatype::int32, at::kInt},
    {datatype::int64, at::kLong},
    {datatype::fp16, at::kHalf},
    {datatype::bf16, at::kBFloat16},
    {datatype::fp32, at::kFloat},
    {datatype::fp64, at::kDouble},
});

bool fits(std::vector<std::int64_t> const& shape, std::vector<std::int64_t> const& wanted) {
  return std::equal(
      shape.begin(), shape.end(), wanted.begin(), wanted.end(),
      [](std::int64_t is, std::int64_t should) { return should < 0 || is == should; });
}

/// What `to` says of a shape that fits `from`: its free dimensions are the same, in their order.
std::vector<std::int64_t> reshaped(std::vector<std::int64_t> const& shape,
                                   std::vector<std::int64_t> const& from,
                                   std::vector<std::int64_t> to) {
  std::size_t place = 0;
  for (auto& extent : to) {
    if (extent < 0) {
      while (from.at(place) >= 0) ++place;
      extent = shape.at(place++);
    }
  }
  return to;
}

/// Copies of fewer bytes go with their launch; for more the memory that is kept pinned would be too much.
constexpr std::size_t least_staged = std::size_t{64} << 10U, most_staged = std::size_t{64} << 20U;

/// That the model sees. Throws unless the request's bytes fit it and the specification.
std::vector<std::int64_t> checked_shape(tensor const& from, tensor_spec const& spec) {
  if (from.type != spec.type) {
    throw error{error_kind::invalid_argument,
                c10::str("input '", from.name, "' is ", datatype_name(from.type),
                         "; the model takes ", datatype_name(spec.type))};
  }
  std::int64_t count = 1;
  for (auto const dimension : from.shape) {
    if (dimension < 0 || __builtin_mul_overflow(count, dimension, &count)) {
      throw error{error_kind::invalid_argument,
                  c10::str("input '", from.name, "' has the shape ", shape_text(from.shape),
                           ", which no tensor can have")};
    }
  }
  if (static_cast<std::uint64_t>(count) * element_size(from.type) != from.data.size()) {
    throw error{error_kind::invalid_argument,
                c10::str("input '", from.name, "' of shape ", shape_text(from.shape), " brings ",
                         from.data.size(), " bytes; its shape needs ",
                         static_cast<std::uint64_t>(count) * element_size(from.type))};
  }
  return spec.model_shape ? reshaped(from.shape, spec.shape, *spec.model_shape) : from.shape;
}

tensor& input_of(model_call const& call, tensor_spec const& spec) {
  auto const found = std::find_if(call.inputs.begin(), call.inputs.end(),
                                  [&](tensor const& each) { return each.name == spec.name; });
  if (found == call.inputs.end()) {
    throw error{error_kind::invalid_argument, c10::str("input '", spec.name, "' is missing")};
  }
  if (!fits(found->shape, spec.shape)) {
    throw error{error_kind::invalid_argument,
                c10::str("input '", spec.name, "' has the shape ", shape_text(found->shape),
                         "; the model takes ", shape_text(spec.shape))};
  }
  return *found;
}

bool is_number(c10::Argument const& argument) {
  auto const& type = argument.type();
  return type->isSubtypeOf(*c10::IntType::get()) || type->isSubtypeOf(*c10::FloatType::get()) ||
         type->isSubtypeOf(*c10::BoolType::get());
}

c10::IValue to_number(at::Tensor const& value, std::string const& name,
                      c10::Argument const& argument) {
  if (value.numel() != 1) {
    throw error{error_kind::invalid_argument,
                c10::str("input '", name, "' has ", value.numel(),
                         " elements; the model takes one number there")};
  }
  auto const& type = argument.type();
  if (type->isSubtypeOf(*c10::IntType::get())) {
    return value.item().toLong();
  }
  if (type->isSubtypeOf(*c10::BoolType::get())) {
    return value.item().toBool();
  }
  return value.item().toDouble();
}

/// One input of all requests.
struct input_parts {
  std::vector<tensor*> from;
  std::vector<std::vector<std::int64_t>> shapes;  ///< that the model sees
  at::ScalarType type;

  [[nodiscard]] std::size_t bytes() const {
    return std::accumulate(
        from.begin(), from.end(), std::size_t{0},
        [](std::size_t sum, auto const* each) { return sum + each->data.size(); });
  }
  /// Of several one behind the other.
  [[nodiscard]] std::vector<std::int64_t> shape() const {
    auto all = shapes.front();
    for (std::size_t i = 1; i < shapes.size(); ++i) {
      all.front() += shapes[i].front();
    }
    return all;
  }
  /// Of a request's bytes.
  [[nodiscard]] at::Tensor view(std::size_t which) const {
    return at::from_blob(from[which]->data.data(), shapes[which], at::TensorOptions{}.dtype(type));
  }
};

input_parts parts_of(std::span<model_call> calls, tensor_spec const& spec) {
  input_parts parts{{}, {}, torch_type(spec.type)};
  for (auto const& each : calls) {
    parts.from.push_back(&input_of(each, spec));
    parts.shapes.push_back(checked_shape(*parts.from.back(), spec));
  }
  return parts;
}

/// As they came, without gaps.
at::Tensor in_pinned_memory(input_parts const& parts) {
  auto all = at::empty(parts.shape(), at::TensorOptions{}.dtype(parts.type).pinned_memory(true));
  auto* to = static_cast<std::byte*>(all.data_ptr());
  for (auto const* const each : parts.from) {
    each->data.copy_to(to);
    to += each->data.size();
  }
  return all;
}

/// One behind the other, in new memory of the device unless it is one that lies there. What they refer to is needed until
/// the device has done what comes next. A GPU fetches what is not small out of pinned memory, while this thread goes on.
at::Tensor put_together(input_parts const& parts, at::Device device) {
  at::TensorOptions const there{device};
  if (device.is_cuda() && parts.bytes() > least_staged && parts.bytes() <= most_staged) {
    return in_pinned_memory(parts).to(there, /*non_blocking=*/true);
  }
  if (parts.from.size() == 1) {
    return parts.view(0).to(there, /*non_blocking=*/true);
  }
  auto all = at::empty(parts.shape(), there.dtype(parts.type));
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < parts.from.size(); ++i) {
    auto const samples = parts.shapes[i].front();
    all.narrow(0, begin, samples).copy_(parts.view(i), /*non_blocking=*/true);
    begin += samples;
  }
  return all;
}

/// A result that contradicts the configuration.
[[noreturn]] void misfit(std::string const& what) {
  throw error{error_kind::misconfigured,
              c10::str(what, "; put into the model's config.pbtxt what 'forward' returns")};
}

tensor to_protocol(at::Tensor const& from, tensor_spec const& spec) {
  auto const& wanted = spec.model_shape ? *spec.model_shape : spec.shape;
  if (from.scalar_type() != torch_type(spec.type) || !fits(from.sizes().vec(), wanted)) {
    misfit(c10::str("output '", spec.name, "' is ", type_text(from.scalar_type()), " of shape ",
                    shape_text(from.sizes().vec()), ", but the model's configuration says ",
                    datatype_name(spec.type), " of shape ", shape_text(wanted)));
  }
  auto const dense = from.to(at::kCPU).contiguous().resolve_conj().resolve_neg();
  auto const sizes = dense.sizes().vec();
  tensor to{spec.name, spec.type, spec.model_shape ? reshaped(sizes, wanted, spec.shape) : sizes,
            tensor_bytes::unwritten(dense.nbytes())};
  if (!to.data.empty()) {
    std::memcpy(to.data.data(), dense.const_data_ptr(), to.data.size());
  }
  return to;
}

at::Tensor as_tensor(c10::IValue const& value, std::string const& name) {
  if (value.isTensor() && value.toTensor().defined()) {
    return value.toTensor();
  }
  if (value.isScalar()) {
    return at::scalar_tensor(value.toScalar(), value.isInt()    ? at::kLong
                                               : value.isBool() ? at::kBool
                                                                : at::kDouble);
  }
  misfit(c10::str("output '", name, "' is a ", value.tagKind(),
                  ", and only tensors and numbers can be answered"));
}

/// By output.
std::vector<c10::IValue> values_of(c10::IValue const& result, std::vector<tensor_spec> const& specs,
                                   std::vector<std::size_t> const& places) {
  std::vector<c10::IValue> values;
  if (result.isGenericDict()) {
    auto const by_name = result.toGenericDict();
    for (auto const& spec : specs) {
      auto const found = by_name.find(spec.name);
      if (found == by_name.end()) {
        misfit(c10::str("the model's result has no '", spec.name,
                        "', which its configuration names as output"));
      }
      values.push_back(found->value());
    }
    return values;
  }
  std::vector<c10::IValue> all{result};
  if (result.isTuple()) {
    all = result.toTupleRef().elements().vec();
  } else if (result.isList()) {
    all = result.toListRef().vec();
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (places.at(i) >= all.size()) {
      misfit(c10::str("there is no output '", specs[i].name, "', index ", places[i],
                      ": the model returns ", all.size(), " outputs, its configuration names ",
                      specs.size()));
    }
    values.push_back(all[places[i]]);
  }
  return values;
}

std::vector<std::size_t> wanted_places(std::vector<tensor_spec> const& specs,
                                       std::vector<std::string> const& wanted) {
  std::vector<std::size_t> places(wanted.empty() ? specs.size() : 0);
  std::iota(places.begin(), places.end(), std::size_t{0});
  for (auto const& name : wanted) {
    auto const found = std::find_if(specs.begin(), specs.end(),
                                    [&](tensor_spec const& each) { return each.name == name; });
    if (found == specs.end()) {
      throw error{error_kind::invalid_argument, c10::str("the model has no output '", name, "'")};
    }
    places.push_back(static_cast<std::size_t>(found - specs.begin()));
  }
  return places;
}

/// Of a call that is one of several.
std::int64_t samples_of(model_call const& call) {
  return call.inputs.front().shape.front();
}

/// Of an output for all `samples` together, what belongs to a call that others with so many samples come before.
tensor part_of(tensor const& whole, std::int64_t before, model_call const& call,
               std::int64_t samples) {
  if (whole.shape.empty() || whole.shape.front() != samples) {
    misfit(c10::str("output '", whole.name, "' has the shape ", shape_text(whole.shape), " for ",
                    samples, " samples, which are to be its first dimension"));
  }
  auto part = whole;
  part.shape.front() = samples_of(call);
  auto const bytes = whole.data.size() / static_cast<std::size_t>(samples);
  part.data = whole.data.part(static_cast<std::size_t>(before) * bytes,
                              static_cast<std::size_t>(part.shape.front()) * bytes);
  return part;
}

}  // namespace

at::ScalarType torch_type(datatype type) {
  auto const* const found = std::find_if(types.begin(), types.end(),
                                         [&](auto const& each) { return each.first == type; });
  if (found == types.end()) {
    throw error{error_kind::unsupported,
                "TorchScript models take numbers; BYTES tensors are not supported"};
  }
  return found->second;
}

std::string type_text(at::ScalarType type) {
  auto const* const found = std::find_if(types.begin(), types.end(),
                                         [&](auto const& each) { return each.second == type; });
  return found == types.end() ? c10::toString(type) : std::string{datatype_name(found->first)};
}

std::string shape_text(std::vector<std::int64_t> const& shape) {
  return c10::str("[", c10::Join(", ", shape), "]");
}

bool takes_numbers(call_signature const& signature) {
  return !signature.takes_dictionary &&
         std::any_of(signature.input_places.begin(), signature.input_places.end(),
                     [&](std::size_t place) { return is_number(signature.arguments[place]); });
}

bool takes_batches(call_signature const& signature, std::vector<tensor_spec> const& inputs) {
  bool const has_dimension = std::all_of(inputs.begin(), inputs.end(), [](tensor_spec const& each) {
    return !each.shape.empty() && each.shape.front() < 0;
  });
  return has_dimension && !inputs.empty() && !takes_numbers(signature);
}

std::vector<c10::IValue> to_arguments(std::span<model_call> calls,
                                      std::vector<tensor_spec> const& specs,
                                      call_signature const& signature, at::Device device) {
  auto const& arguments = signature.arguments;
  std::vector<c10::IValue> values;
  values.reserve(arguments.size());
  for (auto const& each : arguments) {
    values.push_back(each.default_value().value_or(c10::IValue{}));
  }
  c10::Dict<std::string, at::Tensor> dictionary;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    auto const& spec = specs[i];
    auto const parts = parts_of(calls, spec);
    if (signature.takes_dictionary) {
      dictionary.insert(spec.name, put_together(parts, device));
    } else {
      auto const place = signature.input_places.at(i);
      values[place] = is_number(arguments[place])
                          ? to_number(parts.view(0), spec.name, arguments[place])
                          : c10::IValue{put_together(parts, device)};
    }
  }
  for (auto const& each : calls) {
    if (each.inputs.size() != specs.size()) {
      throw error{error_kind::invalid_argument,
                  c10::str("the request has ", each.inputs.size(), " inputs; the model takes ",
                           specs.size())};
    }
  }
  if (signature.takes_dictionary) {
    values.front() = dictionary;
  }
  return values;
}

void from_result(c10::IValue const& result, std::vector<tensor_spec> const& specs,
                 std::vector<std::size_t> const& places, std::span<model_call> calls) {
  auto const values = values_of(result, specs, places);
  std::vector<std::optional<tensor>> whole(specs.size());
  bool const is_batch = calls.size() > 1;
  std::int64_t samples = 0, before = 0;
  for (auto const& each : calls) {
    samples += is_batch ? samples_of(each) : 0;
  }
  for (auto& each : calls) {
    std::vector<tensor> outputs;
    for (auto const place : wanted_places(specs, each.wanted)) {
      auto& is = whole[place];
      if (!is) {
        is = to_protocol(as_tensor(values[place], specs[place].name), specs[place]);
      }
      outputs.push_back(is_batch ? part_of(*is, before, each, samples) : *is);
    }
    before += is_batch ? samples_of(each) : 0;
    each.outputs = std::move(outputs);
  }
}

}  // namespace sluice::server::detail
