#include "runtime/server/http/request_checks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "memhandover/base/error.hpp"
#include "runtime/server/http/elements.hpp"
#include "runtime/server/inference/datatypes.hpp"

namespace sluice::server {
namespace {

template <typename... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw error{error_kind::invalid_argument, fmt::format(format, std::forward<Args>(args)...)};
}

template <typename... Args>
[[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw error{error_kind::unsupported, fmt::format(format, std::forward<Args>(args)...)};
}

std::string names_of(std::vector<tensor_spec> const& specs) {
  std::string result;
  for (auto const& spec : specs) {
    result += fmt::format("{}'{}'", result.empty() ? "" : ", ", spec.name);
  }
  return result;
}

std::vector<std::int64_t> read_shape(raw_tensor const& raw) {
  if (!raw.shape) invalid("{} has no shape; give \"shape\": [ … ]", raw.label);
  if (raw.shape->rank > max_rank) {
    invalid("{} has a shape of {} dimensions; at most {} are possible", raw.label, raw.shape->rank,
            max_rank);
  }
  std::vector<std::int64_t> shape;
  for (auto const& extent : raw.shape->extents) {
    bool const is_natural = extent.is_number_integer() &&
                            (extent.is_number_unsigned() || extent.get<std::int64_t>() >= 0);
    if (!is_natural || extent.get<std::uint64_t>() >
                           static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      invalid("{} has {} in its shape; a dimension is an integer of at least 0", raw.label,
              text_of_scalar(extent));
    }
    shape.push_back(extent.get<std::int64_t>());
  }
  return shape;
}

datatype read_type(raw_tensor const& raw) {
  if (!raw.type) invalid("{} has no datatype; it takes one of {}", raw.label, datatype_names());
  auto const type = datatype_from_name(*raw.type);
  if (!type) {
    invalid("{} has the unknown datatype '{}'; it takes one of {}", raw.label, *raw.type,
            datatype_names());
  }
  return *type;
}

void check_against_model(raw_tensor const& raw, tensor const& given, tensor_spec const& wanted) {
  if (given.type != wanted.type) {
    invalid("{} has datatype {}; the model takes {}", raw.label, datatype_name(given.type),
            datatype_name(wanted.type));
  }
  auto const& shape = given.shape;
  if (shape.size() != wanted.shape.size()) {
    invalid("{} has shape [{}] with {} dimensions; the model takes {}: [{}]", raw.label,
            fmt::join(shape, ","), shape.size(), wanted.shape.size(), fmt::join(wanted.shape, ","));
  }
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (wanted.shape[i] != -1 && shape[i] != wanted.shape[i]) {
      invalid("{} has shape [{}]; the model takes [{}]: dimension {} must be {}, not {}", raw.label,
              fmt::join(shape, ","), fmt::join(wanted.shape, ","), i, wanted.shape[i], shape[i]);
    }
  }
}

std::uint64_t counted(raw_tensor const& raw, std::vector<std::int64_t> const& shape) {
  auto const count = element_count(shape);
  if (!count) {
    invalid("{} has shape [{}]: more elements than 64 bits can count", raw.label,
            fmt::join(shape, ","));
  }
  return *count;
}

/// Nested data must spell the shape; a flat list only needs the right number of elements.
void check_layout(raw_tensor const& raw, list_nesting const& data,
                  std::vector<std::int64_t> const& shape, std::uint64_t count) {
  if (!data.problem().empty()) invalid("the data of {} {}", raw.label, data.problem());
  auto const nesting = data.extents();
  if (nesting.size() > 1) {
    // Lists behind an empty one cannot be written, so the nesting may end at the first dimension of
    // 0.
    bool fits =
        nesting.size() <= shape.size() && (nesting.size() == shape.size() || nesting.back() == 0);
    for (std::size_t i = 0; fits && i < nesting.size(); ++i) {
      fits = nesting[i] == static_cast<std::uint64_t>(shape[i]);
    }
    if (!fits) {
      invalid(
          "the data of {} is nested as [{}], but its shape is [{}]; nest it like the shape, or "
          "make it flat",
          raw.label, fmt::join(nesting, ","), fmt::join(shape, ","));
    }
  }
  if (data.size() != count) {
    invalid("the data of {} has {} elements; shape [{}] needs {}", raw.label, data.size(),
            fmt::join(shape, ","), count);
  }
}

void refuse_extensions(raw_tensor const& raw) {
  for (auto const* const name : {"shared_memory_region", "classification"}) {
    if (raw.parameters.count(name) != 0) {
      unsupported(
          "{} has the parameter '{}', an extension that this server does not have; send and take "
          "tensors in the body",
          raw.label, name);
    }
  }
}

/// None if it is not given.
std::optional<bool> read_switch(raw_parameters const& parameters, std::string const& name,
                                std::string_view of) {
  auto const found = parameters.find(name);
  if (found == parameters.end()) return std::nullopt;
  if (!found->second.is_boolean()) {
    invalid("the parameter '{}' of {} is {}; it takes true or false", name, of,
            found->second.dump());
  }
  return found->second.get<bool>();
}

tensor read_tensor(json_document const& document, raw_tensor const& raw, tensor_spec const& wanted,
                   std::optional<tensor_bytes> const& binary) {
  refuse_extensions(raw);
  if (read_switch(raw.parameters, "binary_data", raw.label).value_or(false)) {
    invalid("{} has the parameter 'binary_data', which is for outputs; give 'binary_data_size'",
            raw.label);
  }
  tensor result;
  result.name = *raw.name;
  result.type = read_type(raw);
  result.shape = read_shape(raw);
  check_against_model(raw, result, wanted);
  if (binary) {
    auto const count = counted(raw, result.shape);
    if (auto const fault = binary_fault(binary->span(), result.type, count)) {
      invalid("{} has data with a size of {} bytes and shape [{}]: {}", raw.label, binary->size(),
              fmt::join(result.shape, ","), *fault);
    }
    result.data = *binary;
    return result;
  }
  if (!raw.data) {
    invalid("{} has no data; give \"data\": [ … ], or its bytes and their binary_data_size",
            raw.label);
  }
  auto const count = counted(raw, result.shape);
  auto read = read_list(document, *raw.data, result.type, count, raw.label);
  check_layout(raw, read.nesting, result.shape, count);
  if (!read.fault.empty()) throw error{error_kind::invalid_argument, read.fault};
  result.data = std::move(read.bytes);
  return result;
}

std::vector<tensor> read_inputs(raw_request const& raw, model_metadata const& metadata,
                                byte_source const& bytes) {
  if (!raw.inputs) {
    invalid("the request has no inputs; model '{}' takes {}", metadata.name,
            names_of(metadata.inputs));
  }
  struct given_input {
    raw_tensor const* raw;
    std::optional<tensor_bytes> binary;
  };
  std::map<std::string_view, given_input> given;
  for (auto const& each : *raw.inputs) {
    if (!each.name) {
      invalid("{} has no name; model '{}' takes {}", each.label, metadata.name,
              names_of(metadata.inputs));
    }
    bool const known =
        std::any_of(metadata.inputs.begin(), metadata.inputs.end(),
                    [&](tensor_spec const& spec) { return spec.name == *each.name; });
    if (!known) {
      invalid("model '{}' has no {}; it takes {}", metadata.name, each.label,
              names_of(metadata.inputs));
    }
    if (!given.try_emplace(*each.name, given_input{&each, bytes.take(each)}).second) {
      invalid("{} is given twice; give it once", each.label);
    }
  }
  for (auto const& spec : metadata.inputs) {
    if (given.count(spec.name) == 0) {
      invalid("input '{}' is missing; model '{}' takes {}", spec.name, metadata.name,
              names_of(metadata.inputs));
    }
  }
  std::vector<tensor> inputs;
  inputs.reserve(metadata.inputs.size());
  for (auto const& spec : metadata.inputs) {
    auto const& input = given.at(spec.name);
    inputs.push_back(read_tensor(raw.document, *input.raw, spec, input.binary));
  }
  bytes.expect_end();
  return inputs;
}

void read_wanted_outputs(raw_request const& raw, model_metadata const& metadata,
                         decoded_request& into) {
  into.form.binary =
      read_switch(raw.parameters, "binary_data_output", "the request").value_or(false);
  if (!raw.outputs) return;
  std::set<std::string_view> seen;
  for (auto const& each : *raw.outputs) {
    if (!each.name) {
      invalid("{} has no name; model '{}' gives {}", each.label, metadata.name,
              names_of(metadata.outputs));
    }
    bool const known =
        std::any_of(metadata.outputs.begin(), metadata.outputs.end(),
                    [&](tensor_spec const& spec) { return spec.name == *each.name; });
    if (!known) {
      invalid("model '{}' has no {}; it gives {}", metadata.name, each.label,
              names_of(metadata.outputs));
    }
    if (!seen.insert(*each.name).second) invalid("{} is asked for twice; ask once", each.label);
    refuse_extensions(each);
    if (each.parameters.count("binary_data_size") != 0) {
      invalid("{} has the parameter 'binary_data_size', which is for inputs; give 'binary_data'",
              each.label);
    }
    if (auto const binary = read_switch(each.parameters, "binary_data", each.label)) {
      into.form.by_output.emplace(*each.name, *binary);
    }
    into.outputs.push_back(*each.name);
  }
}

std::optional<std::chrono::microseconds> read_timeout(raw_parameters const& parameters) {
  auto const found = parameters.find("timeout");
  if (found == parameters.end()) return std::nullopt;
  // also keeps a deadline computed from it within the clock's range
  constexpr std::chrono::microseconds longest = std::chrono::hours{24 * 365};
  auto const& value = found->second;
  if (!value.is_number_unsigned()) {
    invalid("the parameter 'timeout' is {}; it takes a number of microseconds, 0 for none",
            value.dump());
  }
  auto const microseconds = value.get<std::uint64_t>();
  if (microseconds == 0) return std::nullopt;
  return std::chrono::microseconds{
      std::min(microseconds, static_cast<std::uint64_t>(longest.count()))};
}

std::uint64_t read_priority(raw_parameters const& parameters) {
  auto const found = parameters.find("priority");
  if (found == parameters.end()) return 0;
  if (!found->second.is_number_unsigned()) {
    invalid(
        "the parameter 'priority' is {}; it takes an integer of at least 0, 0 for the usual one",
        found->second.dump());
  }
  return found->second.get<std::uint64_t>();
}

}  // namespace

decoded_request check_request(raw_request const& raw, model_metadata const& metadata,
                              byte_source const& bytes) {
  decoded_request request;
  request.model = metadata.name;
  request.id = raw.id.value_or("");
  request.timeout = read_timeout(raw.parameters);
  request.priority = read_priority(raw.parameters);
  read_wanted_outputs(raw, metadata, request);
  request.inputs = read_inputs(raw, metadata, bytes);
  return request;
}

}  // namespace sluice::server
