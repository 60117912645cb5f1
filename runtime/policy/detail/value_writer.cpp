#include "runtime/policy/detail/value_writer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "runtime/policy/detail/description.hpp"

namespace sluice::policy {
namespace detail {

void value_writer::put(key const& what, std::string value) {
  into_[prefix_ + std::string{what.name}] = std::move(value);
}

void value_writer::boolean(key const& what, bool& value) {
  put(what, value ? "true" : "false");
}

void value_writer::whole_number(key const& what, std::int64_t& value,
                                limits<std::int64_t> /*allowed*/) {
  put(what, std::to_string(value));
}

void value_writer::text(key const& what, std::string& value, text_rule const& /*rule*/) {
  put(what, value);
}

void value_writer::texts(key const& what, std::vector<std::string>& value,
                         text_rule const& /*rule*/) {
  put(what, fmt::format("{}", fmt::join(value, " ")));
}

void value_writer::named_texts(key const& what, std::map<std::string, std::string>& value,
                               text_rule const& /*names*/) {
  std::string all;
  for (auto const& [name, text] : value) {
    all += fmt::format("{}={} ", name, text);
  }
  put(what, all);
}

void value_writer::bytes(key const& what, std::uint64_t& value, limits<std::uint64_t> /*allowed*/) {
  put(what, std::to_string(value));
}

void value_writer::bytes_or_auto(key const& what, std::optional<std::uint64_t>& value,
                                 limits<std::uint64_t> /*allowed*/) {
  put(what, value ? std::to_string(*value) : "auto");
}

void value_writer::memory(key const& what, std::optional<memory_amount>& value,
                          limits<std::uint64_t> /*allowed*/) {
  put(what, value ? fmt::format("{} {}", value->bytes, value->share) : "auto");
}

void value_writer::duration(key const& what, microseconds& value,
                            limits<microseconds> /*allowed*/) {
  put(what, std::to_string(value.count()));
}

void value_writer::duration_or_auto(key const& what, std::optional<microseconds>& value,
                                    limits<microseconds> /*allowed*/) {
  put(what, value ? std::to_string(value->count()) : "auto");
}

void value_writer::percentage(key const& what, double& value, limits<double> /*allowed*/,
                              percent_sign /*sign*/) {
  put(what, fmt::format("{}", value));
}

void value_writer::choice(key const& what, std::size_t& value,
                          std::span<std::string_view const> names) {
  put(what, std::string{names[value]});
}

void value_writer::section(key const& what, std::function<void(key_visitor&)> const& body) {
  value_writer inner{into_, fmt::format("{}{}.", prefix_, what.name)};
  body(inner);
}

}  // namespace detail

std::vector<std::string> differing_keys(policy const& one, policy const& other) {
  auto const values_of = [](policy of) {
    detail::value_writer::values values;
    detail::value_writer writer{values};
    detail::describe(writer, of);
    return values;
  };
  auto const seen = values_of(one);
  std::vector<std::string> keys;
  for (auto const& [path, value] : values_of(other)) {
    if (seen.at(path) != value) {
      keys.push_back(path);
    }
  }
  return keys;
}

}  // namespace sluice::policy
