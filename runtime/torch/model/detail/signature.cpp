#include "runtime/torch/model/detail/signature.hpp"

#include <ATen/core/jit_type.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <string>

#include "memhandover/base/error.hpp"
#include "runtime/server/inference/datatypes.hpp"
#include "runtime/torch/model/detail/naming.hpp"
#include "runtime/torch/model/detail/torch_tensors.hpp"

namespace sluice::server::detail {
namespace {

std::vector<std::string> names_of(std::vector<tensor_spec> const& specs) {
  std::vector<std::string> names;
  std::transform(specs.begin(), specs.end(), std::back_inserter(names),
                 [](tensor_spec const& each) { return each.name; });
  return names;
}

/// What the code returns, each for itself; nothing where only a run shows how many these are.
std::optional<std::vector<c10::TypePtr>> results_of(c10::TypePtr const& returned) {
  if (auto const tuple = returned->cast<c10::TupleType>()) {
    return tuple->elements().vec();
  }
  constexpr std::array of_any_number{c10::TypeKind::ListType, c10::TypeKind::AnyType,
                                     c10::TypeKind::UnionType, c10::TypeKind::OptionalType};
  if (std::find(of_any_number.begin(), of_any_number.end(), returned->kind()) !=
      of_any_number.end()) {
    return std::nullopt;
  }
  return std::vector{returned};
}

bool can_be_answered(c10::TypePtr const& type) {
  constexpr std::array kinds{c10::TypeKind::TensorType, c10::TypeKind::IntType,
                             c10::TypeKind::FloatType,  c10::TypeKind::BoolType,
                             c10::TypeKind::NumberType, c10::TypeKind::AnyType,
                             c10::TypeKind::UnionType,  c10::TypeKind::OptionalType};
  return std::find(kinds.begin(), kinds.end(), type->kind()) != kinds.end();
}

/// Nothing where the code leaves it open.
std::optional<at::ScalarType> element_type(c10::TypePtr const& type) {
  switch (type->kind()) {
    case c10::TypeKind::IntType:
      return at::kLong;
    case c10::TypeKind::FloatType:
      return at::kDouble;
    case c10::TypeKind::BoolType:
      return at::kBool;
    case c10::TypeKind::TensorType:
      return type->expectRef<c10::TensorType>().scalarType();
    default:
      return std::nullopt;
  }
}

void check_result(tensor_spec const& output, c10::TypePtr const& type) {
  auto const fault = [&](std::string const& what) {
    throw error{error_kind::invalid_argument,
                c10::str("its configuration says that output '", output.name, "' is ",
                         datatype_name(output.type), ", but 'forward' returns ", what)};
  };
  if (!can_be_answered(type)) {
    fault(c10::str(type->annotation_str(), " there; only tensors and numbers can be answered"));
  }
  if (auto const element = element_type(type); element && *element != torch_type(output.type)) {
    fault(c10::str(type_text(*element), " there; put this into the configuration"));
  }
}

void check_results(std::vector<tensor_spec> const& outputs, std::vector<std::size_t> const& places,
                   std::vector<c10::TypePtr> const& results) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (places[i] >= results.size()) {
      throw error{error_kind::invalid_argument,
                  c10::str("its configuration names the outputs ", quoted_list(names_of(outputs)),
                           ", but 'forward' returns ", results.size(), ", so that there is no '",
                           outputs[i].name, "', index ", places[i])};
    }
    check_result(outputs[i], results[places[i]]);
  }
}

}  // namespace

call_signature signature_of(c10::FunctionSchema const& forward,
                            std::vector<tensor_spec> const& inputs,
                            std::vector<tensor_spec> const& outputs) {
  call_signature made;
  auto const& all = forward.arguments();
  made.arguments.assign(all.begin() + 1, all.end());
  made.takes_dictionary = made.arguments.size() == 1 &&
                          made.arguments.front().type()->kind() == c10::TypeKind::DictType;
  if (!made.takes_dictionary) {
    std::vector<argument_name> known;
    known.reserve(made.arguments.size());
    for (auto const& each : made.arguments) {
      known.push_back({each.name(), each.default_value().has_value()});
    }
    auto places = input_places(names_of(inputs), known);
    made.input_places = std::move(places.of);
    made.is_guess = places.is_guess;
  }
  auto const returned = forward.returns().at(0).type();
  if (returned->kind() == c10::TypeKind::DictType) {
    return made;
  }
  made.output_places = output_places(names_of(outputs)).of;
  if (auto const results = results_of(returned)) {
    check_results(outputs, made.output_places, *results);
  }
  return made;
}

}  // namespace sluice::server::detail
