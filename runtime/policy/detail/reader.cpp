#include "runtime/policy/detail/reader.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <regex>

#include "runtime/policy/units.hpp"
#include "runtime/text/suggestion.hpp"

namespace sluice::policy::detail {
namespace {

[[noreturn]] void refuse(std::string const& why) {
  throw error{error_kind::invalid_argument, why};
}

bool quoted(YAML::Node const& node) {
  return node.Tag() == "!";
}

/// Whether YAML takes an unquoted scalar for something else than text.
bool reads_as_number_or_word(std::string const& scalar) {
  static std::regex const special{
      R"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)|true|True|TRUE|false|False|FALSE|null|Null|NULL|~)"};
  return std::regex_match(scalar, special);
}

std::string describe_node(YAML::Node const& node) {
  switch (node.Type()) {
    case YAML::NodeType::Map:
      return "is a section";
    case YAML::NodeType::Sequence:
      return "is a list";
    case YAML::NodeType::Scalar:
      return fmt::format("is \"{}\"", node.Scalar());
    default:
      return "is empty";
  }
}

/// The scalar's text. Lists, sections and nothing are refused.
std::string const& scalar_of(YAML::Node const& node, key const& what) {
  if (!node.IsScalar()) {
    refuse(fmt::format("{}, must be a single value; for example {}", describe_node(node),
                       what.example));
  }
  return node.Scalar();
}

template <class T, class Write>
void check_limits(T value, limits<T> allowed, key const& what, Write const& write) {
  if (value < allowed.least) {
    refuse(fmt::format("is {}, must be at least {}; for example {}", write(value),
                       write(allowed.least), what.example));
  }
  if (value > allowed.most) {
    refuse(fmt::format("is {}, must be at most {}; for example {}", write(value),
                       write(allowed.most), what.example));
  }
}

/// Longer ones are nobody's, and what matches patterns takes the stack for each character.
constexpr std::size_t longest_text = 4096;

/// A text that YAML takes for one, which the system can have as a word.
std::string const& text_of(YAML::Node const& node, key const& what) {
  auto const& scalar = scalar_of(node, what);
  if (!quoted(node) && reads_as_number_or_word(scalar)) {
    refuse(fmt::format("is {0}, which YAML does not take for text; put it in quotes: \"{0}\"",
                       scalar));
  }
  if (scalar.size() > longest_text) {
    refuse(fmt::format("has {} bytes, must have at most {}", scalar.size(), longest_text));
  }
  if (scalar.find('\0') != std::string::npos) {
    refuse("has a character NUL, which no text of the system may have");
  }
  return scalar;
}

void check_text(std::string const& text, key const& what, text_rule const& rule) {
  if (!std::regex_match(text, std::regex{std::string{rule.pattern}})) {
    refuse(fmt::format("is \"{}\", {}; for example {}", text, rule.words, what.example));
  }
}

/// Below is a fraction written for a percentage: 0.99 for 99%.
constexpr double least_memory_share = 0.01;

}  // namespace

void findings::add(YAML::Mark const& where, std::string const& path, std::string const& message) {
  // Marks count from 0, and what is missing altogether has none.
  int const line = where.is_null() ? 1 : where.line + 1;
  int const column = where.is_null() ? 1 : where.column + 1;
  problems_.push_back({file_, line, column, path, message});
}

void findings::add_at(std::string const& path, std::string const& message) {
  add_within(path, path, message);
}

void findings::add_within(std::string const& section, std::string const& path,
                          std::string const& message) {
  auto const place = places_.find(section);
  add(place == places_.end() ? YAML::Mark::null_mark() : place->second, path, message);
}

int findings::line_of(std::string const& path) const {
  auto const place = places_.find(path);
  return place == places_.end() ? 0 : place->second.line + 1;
}

std::vector<problem> findings::sorted() const {
  auto result = problems_;
  std::stable_sort(result.begin(), result.end(), [](problem const& a, problem const& b) {
    return std::pair{a.line, a.column} < std::pair{b.line, b.column};
  });
  return result;
}

reader::reader(YAML::Node const& node, std::string path, findings& found)
    : path_(std::move(path)), where_(node.Mark()), found_(found) {
  for (auto const& pair : node) {
    if (!pair.first.IsScalar()) {
      found_.add(pair.first.Mark(), path_, "has a key that is not a word; write `key: value`");
      continue;
    }
    auto const& name = pair.first.Scalar();
    auto const first = std::find_if(entries_.begin(), entries_.end(),
                                    [&name](entry const& other) { return other.name == name; });
    if (first != entries_.end()) {
      found_.add(pair.first.Mark(), path_of(name),
                 fmt::format("is given a second time, after line {}; keep one of them",
                             first->where.line + 1));
      continue;
    }
    entries_.push_back({name, pair.first.Mark(), pair.second});
  }
}

std::string reader::path_of(std::string_view name) const {
  return path_.empty() ? std::string{name} : fmt::format("{}.{}", path_, name);
}

void reader::read(key const& what, std::function<void(YAML::Node const&)> const& take) {
  described_.push_back(what.name);
  auto const path = path_of(what.name);
  auto const given = std::find_if(entries_.begin(), entries_.end(),
                                  [&what](entry const& other) { return other.name == what.name; });
  if (given == entries_.end()) {
    if (what.required) {
      found_.add(where_, path, fmt::format("is missing; add `{}: {}`", what.name, what.example));
    }
    return;
  }
  given->described = true;
  // An empty value has no place of its own worth showing; its key has.
  auto const where = given->value.IsNull() ? given->where : given->value.Mark();
  found_.remember(path, where);
  try {
    take(given->value);
  } catch (error const& wrong) {
    found_.add(where, path, wrong.what());
  }
}

void reader::boolean(key const& what, bool& value) {
  read(what, [&](YAML::Node const& node) {
    auto const& scalar = scalar_of(node, what);
    if (quoted(node) || (scalar != "true" && scalar != "false")) {
      refuse(fmt::format("is \"{}\", must be true or false, without quotes", scalar));
    }
    value = scalar == "true";
  });
}

void reader::whole_number(key const& what, std::int64_t& value, limits<std::int64_t> allowed) {
  read(what, [&](YAML::Node const& node) {
    auto const& scalar = scalar_of(node, what);
    std::int64_t given = 0;
    auto const* end = scalar.data() + scalar.size();
    auto const [stop, failed] = std::from_chars(scalar.data(), end, given);
    if (quoted(node) || stop != end || failed != std::errc{}) {
      refuse(fmt::format("is \"{}\", must be a whole number, without quotes; for example {}",
                         scalar, what.example));
    }
    if (allowed.least == allowed.most && given != allowed.least) {
      refuse(fmt::format("is {}, must be {}, the only one that this sluice knows", given,
                         allowed.least));
    }
    check_limits(given, allowed, what, [](std::int64_t n) { return std::to_string(n); });
    value = given;
  });
}

void reader::text(key const& what, std::string& value, text_rule const& rule) {
  read(what, [&](YAML::Node const& node) {
    auto const& scalar = text_of(node, what);
    check_text(scalar, what, rule);
    value = scalar;
  });
}

void reader::take_part(YAML::Node const& node, std::string const& path,
                       std::function<void()> const& take) {
  found_.remember(path, node.Mark());
  try {
    take();
  } catch (error const& wrong) {
    found_.add(node.Mark(), path, wrong.what());
  }
}

void reader::texts(key const& what, std::vector<std::string>& value, text_rule const& rule) {
  read(what, [&](YAML::Node const& node) {
    if (!node.IsSequence() || node.size() == 0) {
      refuse(fmt::format("{}, must be a list of at least one text; for example {}",
                         node.IsSequence() ? "is an empty list" : describe_node(node),
                         what.example));
    }
    value.assign(node.size(), {});  // each keeps its place, so that paths stay right
    for (std::size_t i = 0; i < node.size(); ++i) {
      auto const part = node[i];
      take_part(part, fmt::format("{}[{}]", path_of(what.name), i), [&] {
        auto const& scalar = text_of(part, what);
        check_text(scalar, what, rule);
        value[i] = scalar;
      });
    }
  });
}

void reader::named_texts(key const& what, std::map<std::string, std::string>& value,
                         text_rule const& names) {
  read(what, [&](YAML::Node const& node) {
    if (!node.IsMap()) {
      refuse(fmt::format("{}, must be a section of names with a text each; for example {}",
                         describe_node(node), what.example));
    }
    for (auto const& pair : node) {
      auto const name = pair.first.IsScalar() ? pair.first.Scalar() : std::string{};
      auto const path = fmt::format("{}.{}", path_of(what.name), name);
      take_part(pair.first, path, [&] {
        check_text(name, what, names);
        auto const& scalar = text_of(pair.second, what);
        if (!value.emplace(name, scalar).second) {
          refuse("is given a second time; keep one of them");
        }
      });
    }
  });
}

void reader::bytes(key const& what, std::uint64_t& value, limits<std::uint64_t> allowed) {
  read(what, [&](YAML::Node const& node) {
    auto const given = parse_bytes(scalar_of(node, what));
    check_limits(given, allowed, what, write_bytes);
    value = given;
  });
}

void reader::bytes_or_auto(key const& what, std::optional<std::uint64_t>& value,
                           limits<std::uint64_t> allowed) {
  read(what, [&](YAML::Node const& node) {
    if (scalar_of(node, what) == "auto") {
      value.reset();
      return;
    }
    auto const given = parse_bytes(node.Scalar());
    check_limits(given, allowed, what, write_bytes);
    value = given;
  });
}

void reader::memory(key const& what, std::optional<memory_amount>& value,
                    limits<std::uint64_t> allowed) {
  read(what, [&](YAML::Node const& node) {
    auto const& scalar = scalar_of(node, what);
    if (scalar == "auto") {
      value.reset();
    } else if (scalar.find('%') != std::string::npos) {
      auto const share = parse_percentage(scalar);
      check_limits(share, {least_memory_share, 1.0}, what, write_percentage);
      value = memory_amount{0, share};
    } else {
      auto const given = parse_bytes(scalar);
      check_limits(given, allowed, what, write_bytes);
      value = memory_amount{given, 0.0};
    }
  });
}

void reader::duration(key const& what, microseconds& value, limits<microseconds> allowed) {
  read(what, [&](YAML::Node const& node) {
    auto const given = parse_duration(scalar_of(node, what));
    check_limits(given, allowed, what, write_duration);
    value = given;
  });
}

void reader::duration_or_auto(key const& what, std::optional<microseconds>& value,
                              limits<microseconds> allowed) {
  read(what, [&](YAML::Node const& node) {
    if (scalar_of(node, what) == "auto") {
      value.reset();
      return;
    }
    auto const given = parse_duration(node.Scalar());
    check_limits(given, allowed, what, write_duration);
    value = given;
  });
}

void reader::percentage(key const& what, double& value, limits<double> allowed, percent_sign sign) {
  read(what, [&](YAML::Node const& node) {
    auto const& scalar = scalar_of(node, what);
    bool const bare = !quoted(node) && !scalar.empty() &&
                      scalar.find_first_not_of("0123456789.") == std::string::npos;
    auto const share =
        parse_percentage(sign == percent_sign::optional && bare ? scalar + "%" : scalar);
    check_limits(share, allowed, what, write_percentage);
    value = share;
  });
}

void reader::choice(key const& what, std::size_t& value, std::span<std::string_view const> names) {
  read(what, [&](YAML::Node const& node) {
    auto const& scalar = scalar_of(node, what);
    auto const name = std::find(names.begin(), names.end(), scalar);
    if (name == names.end()) {
      auto const meant = text::nearest(scalar, names);
      refuse(fmt::format("is \"{}\", must be one of {}{}", scalar, fmt::join(names, ", "),
                         meant ? fmt::format("; did you mean \"{}\"?", *meant) : ""));
    }
    value = static_cast<std::size_t>(name - names.begin());
  });
}

void reader::section(key const& what, std::function<void(key_visitor&)> const& body) {
  read(what, [&](YAML::Node const& node) {
    if (!node.IsMap()) {
      refuse(fmt::format("{}, must be a section of keys; for example {}", describe_node(node),
                         what.example));
    }
    reader inner{node, path_of(what.name), found_};
    body(inner);
    inner.finish();
  });
}

void reader::list(key const& what, std::function<void(key_visitor&)> const& element) {
  read(what, [&](YAML::Node const& node) {
    if (!node.IsSequence() || node.size() == 0) {
      refuse(fmt::format("{}, must be a list of at least one section; for example {}",
                         node.IsSequence() ? "is an empty list" : describe_node(node),
                         what.example));
    }
    for (std::size_t i = 0; i < node.size(); ++i) {
      auto const path = fmt::format("{}[{}]", path_of(what.name), i);
      if (!node[i].IsMap()) {
        found_.add(node[i].Mark(), path,
                   fmt::format("{}, must be a section of keys", describe_node(node[i])));
        findings unread{""};  // the element keeps its place in the list, so that paths stay right
        reader nothing{YAML::Node{YAML::NodeType::Map}, path, unread};
        element(nothing);
        continue;
      }
      reader inner{node[i], path, found_};
      element(inner);
      inner.finish();
    }
  });
}

void reader::finish() {
  for (auto const& other : entries_) {
    if (!other.described) {
      found_.add(other.where, path_of(other.name),
                 fmt::format("is no known key; {}", text::suggestion(other.name, described_)));
    }
  }
}

}  // namespace sluice::policy::detail
