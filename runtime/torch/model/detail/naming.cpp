#include "runtime/torch/model/detail/naming.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"

namespace sluice::server::detail {
namespace {

/// What follows the first two underscores, if these are digits alone.
std::optional<std::size_t> index_in(std::string_view name) {
  auto const underscores = name.find("__");
  if (underscores == std::string_view::npos) {
    return std::nullopt;
  }
  return parse_number<std::size_t>(name.substr(underscores + 2));
}

[[noreturn]] void refuse(std::string const& why) {
  throw error{error_kind::invalid_argument, why};
}

std::string names_text(char const* what, std::vector<std::string> const& names) {
  return std::string{"its configuration names the "} + what + (names.size() == 1 ? " " : "s ") +
         quoted_list(names);
}

std::vector<std::string> names_of(std::vector<argument_name> const& arguments) {
  std::vector<std::string> names;
  std::transform(arguments.begin(), arguments.end(), std::back_inserter(names),
                 [](argument_name const& each) { return each.name; });
  return names;
}

std::string forward_text(std::vector<argument_name> const& arguments) {
  return arguments.empty() ? "'forward' takes no argument"
                           : "'forward' takes " + quoted_list(names_of(arguments));
}

/// Indices from 0 to `count` - 1.
std::string range_text(std::size_t count) {
  return count <= 1 ? "the index 0" : "indices from 0 to " + std::to_string(count - 1);
}

/// Two names of one index, if there are.
std::optional<std::pair<std::string, std::string>> repeated(
    std::vector<std::string> const& names, std::vector<std::size_t> const& places) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    auto const first = std::find(places.begin(), places.end(), places[i]) - places.begin();
    if (static_cast<std::size_t>(first) != i) {
      return std::pair{names[static_cast<std::size_t>(first)], names[i]};
    }
  }
  return std::nullopt;
}

/// Of all of them, or nothing if one has none.
std::optional<std::vector<std::size_t>> indices_in(std::vector<std::string> const& names) {
  std::vector<std::size_t> found;
  for (auto const& name : names) {
    auto const index = index_in(name);
    if (!index) {
      return std::nullopt;
    }
    found.push_back(*index);
  }
  return found;
}

bool has_index(std::string const& name) {
  return index_in(name).has_value();
}

std::vector<std::size_t> in_order(std::size_t count) {
  std::vector<std::size_t> places(count);
  std::iota(places.begin(), places.end(), std::size_t{0});
  return places;
}

void check_count(std::vector<std::string> const& names,
                 std::vector<argument_name> const& arguments) {
  auto const needed = static_cast<std::size_t>(
      std::count_if(arguments.begin(), arguments.end(),
                    [](argument_name const& each) { return !each.has_default; }));
  if (names.size() < needed || names.size() > arguments.size()) {
    refuse(names_text("input", names) + ", but " + forward_text(arguments) +
           (needed == arguments.size()
                ? ""
                : ", of which the first " + std::to_string(needed) + " must be given") +
           "; name one input for each");
  }
}

std::vector<std::size_t> indexed_inputs(std::vector<std::string> const& names,
                                        std::vector<std::size_t> places,
                                        std::vector<argument_name> const& arguments) {
  auto const fault = [&](std::string const& what) {
    refuse(names_text("input", names) + ", but " + what + "; " + forward_text(arguments) +
           ", so give each input " + range_text(arguments.size()));
  };
  if (auto const twice = repeated(names, places)) {
    fault("'" + twice->first + "' and '" + twice->second + "' have the same index");
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (places[i] >= arguments.size()) {
      fault("there is no argument of the index of '" + names[i] + "'");
    }
  }
  return places;
}

void check_filled(std::vector<std::string> const& names, std::vector<std::size_t> const& places,
                  std::vector<argument_name> const& arguments) {
  for (std::size_t place = 0; place < arguments.size(); ++place) {
    bool const is_filled = std::find(places.begin(), places.end(), place) != places.end();
    if (!is_filled && !arguments[place].has_default) {
      refuse(names_text("input", names) + ", but none for the argument '" + arguments[place].name +
             "' of 'forward', index " + std::to_string(place) + ", which has no default");
    }
  }
}

}  // namespace

std::string quoted_list(std::vector<std::string> const& names) {
  std::string text;
  for (auto const& name : names) {
    text += (text.empty() ? "'" : ", '") + name + "'";
  }
  return text;
}

name_places input_places(std::vector<std::string> const& names,
                         std::vector<argument_name> const& arguments) {
  check_count(names, arguments);
  auto const known = names_of(arguments);
  auto const place_of = [&](std::string const& name) {
    return static_cast<std::size_t>(std::find(known.begin(), known.end(), name) - known.begin());
  };
  auto const is_argument = [&](std::string const& name) { return place_of(name) < known.size(); };

  name_places made;
  if (std::all_of(names.begin(), names.end(), is_argument)) {
    std::transform(names.begin(), names.end(), std::back_inserter(made.of), place_of);
  } else if (auto indices = indices_in(names)) {
    made.of = indexed_inputs(names, std::move(*indices), arguments);
  } else if (std::any_of(names.begin(), names.end(), [&](std::string const& name) {
               return is_argument(name) || has_index(name);
             })) {
    refuse(names_text("input", names) + ", but " + forward_text(arguments) +
           "; name all inputs like the arguments, or all <name>__<index> with " +
           range_text(arguments.size()));
  } else {
    made = {in_order(names.size()), names.size() > 1};
  }
  check_filled(names, made.of, arguments);
  return made;
}

name_places output_places(std::vector<std::string> const& names) {
  if (auto indices = indices_in(names)) {
    if (auto const twice = repeated(names, *indices)) {
      refuse(names_text("output", names) + ", but '" + twice->first + "' and '" + twice->second +
             "' have the same index; give each its own");
    }
    return {std::move(*indices), false};
  }
  if (std::any_of(names.begin(), names.end(), has_index)) {
    refuse(names_text("output", names) +
           ", of which some end with an index and some do not; name all <name>__<index>, or none, "
           "and then in the order of the results");
  }
  return {in_order(names.size()), false};
}

}  // namespace sluice::server::detail
