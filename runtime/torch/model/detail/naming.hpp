/// Which argument of `forward` each input of a configuration fills, and which of its results each output is, by their names.
///
///   input_places({"INPUT__1", "INPUT__0"}, {{"a"}, {"b"}}).of;  // {1, 0}
///   input_places({"b", "a"}, {{"a"}, {"b"}}).of;                // {1, 0}
///   output_places({"OUTPUT__1"}).of;                            // {1}
///
/// As in Triton's PyTorch backend: names that all are arguments go by name; else names that all are `<name>__<index>` by index;
/// else names stand in the order of the configuration. Other than there, names of which some say their place and some do
/// not, or say one that is taken or that there is not, are refused. Outputs have no arguments to be named like. Pure.
///
/// Source: triton-inference-server/pytorch_backend, src/pt/model_instance_state.cc, GetNamingConvention and AddInputToMap.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace sluice::server::detail {

struct argument_name {
  std::string name;
  bool has_default = false;  ///< need not be filled
};

struct name_places {
  std::vector<std::size_t> of;  ///< by the place in the configuration
  bool is_guess =
      false;  ///< the names say nothing, several stand in the order of the configuration
};

/// Throws `invalid_argument`, with the names, the arguments, and what would be right.
[[nodiscard]] name_places input_places(std::vector<std::string> const& names,
                                       std::vector<argument_name> const& arguments);
/// How many results there are is not known here. Throws `invalid_argument`.
[[nodiscard]] name_places output_places(std::vector<std::string> const& names);

/// "'a', 'b'".
[[nodiscard]] std::string quoted_list(std::vector<std::string> const& names);

}  // namespace sluice::server::detail
