/// The language in which the policy's keys are described. One description, two readers of it: the
/// one that takes values from YAML, and the one that writes the JSON Schema.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/policy/policy.hpp"

namespace sluice::policy::detail {

struct key {
  std::string_view name;
  std::string_view meaning;  ///< a sentence for the schema
  std::string_view example;  ///< a right value, for messages
  bool required = false;
};

template <class T>
struct limits {
  T least;
  T most;
};

/// What a text must look like: an ECMAScript pattern for the whole text, and the same in words
/// ("must be …").
struct text_rule {
  std::string_view pattern;
  std::string_view words;
};

/// Whether a percentage may be written without its sign.
enum class percent_sign { required, optional };

/// Each function describes one key. The value passed in is the default, and takes what the file
/// says.
class key_visitor {
 public:
  key_visitor() = default;
  key_visitor(key_visitor const&) = delete;
  key_visitor& operator=(key_visitor const&) = delete;
  key_visitor(key_visitor&&) = delete;
  key_visitor& operator=(key_visitor&&) = delete;
  virtual ~key_visitor() = default;

  virtual void boolean(key const& what, bool& value) = 0;
  virtual void whole_number(key const& what, std::int64_t& value, limits<std::int64_t> allowed) = 0;
  virtual void text(key const& what, std::string& value, text_rule const& rule) = 0;
  /// A list of at least one text.
  virtual void texts(key const& what, std::vector<std::string>& value, text_rule const& rule) = 0;
  /// Texts by names, of which `names` says what they look like.
  virtual void named_texts(key const& what, std::map<std::string, std::string>& value,
                           text_rule const& names) = 0;
  virtual void bytes(key const& what, std::uint64_t& value, limits<std::uint64_t> allowed) = 0;
  virtual void bytes_or_auto(key const& what, std::optional<std::uint64_t>& value,
                             limits<std::uint64_t> allowed) = 0;
  virtual void memory(key const& what, std::optional<memory_amount>& value,
                      limits<std::uint64_t> allowed) = 0;
  virtual void duration(key const& what, microseconds& value, limits<microseconds> allowed) = 0;
  virtual void duration_or_auto(key const& what, std::optional<microseconds>& value,
                                limits<microseconds> allowed) = 0;
  virtual void percentage(key const& what, double& value, limits<double> allowed,
                          percent_sign sign) = 0;
  /// One of `names`; the value is its index.
  virtual void choice(key const& what, std::size_t& value,
                      std::span<std::string_view const> names) = 0;
  virtual void section(key const& what, std::function<void(key_visitor&)> const& body) = 0;
  /// A list of at least one section; `element` is called for each.
  virtual void list(key const& what, std::function<void(key_visitor&)> const& element) = 0;
};

}  // namespace sluice::policy::detail
