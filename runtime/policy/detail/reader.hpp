/// Takes a policy's values from YAML, and collects every mistake with its place.
#pragma once

#include <yaml-cpp/yaml.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/policy/detail/key_visitor.hpp"

namespace sluice::policy::detail {

/// The mistakes found so far, and where each value stands in the file, for checks between values.
class findings {
 public:
  explicit findings(std::string file) : file_(std::move(file)) {}

  void add(YAML::Mark const& where, std::string const& path, std::string const& message);
  /// A mistake in the value at `path`, which the file gives; at the file's start if it does not.
  void add_at(std::string const& path, std::string const& message);
  /// A mistake that is none of a value's: something that belongs at `path`, within what stands at `section`, is not there.
  void add_within(std::string const& section, std::string const& path, std::string const& message);
  void remember(std::string const& path, YAML::Mark const& where) { places_[path] = where; }
  [[nodiscard]] bool given(std::string const& path) const { return places_.count(path) != 0; }
  /// Line of the value, counted from 1; 0 if the file does not give it.
  [[nodiscard]] int line_of(std::string const& path) const;
  /// All of them in the order of the file.
  [[nodiscard]] std::vector<problem> sorted() const;

 private:
  std::string file_;
  std::vector<problem> problems_;
  std::map<std::string, YAML::Mark> places_;
};

/// Reads one section. Afterwards call `finish`, which reports keys that nobody described.
class reader : public key_visitor {
 public:
  /// `node` must be a map; `path` is empty for the root.
  reader(YAML::Node const& node, std::string path, findings& found);

  void boolean(key const& what, bool& value) override;
  void whole_number(key const& what, std::int64_t& value, limits<std::int64_t> allowed) override;
  void text(key const& what, std::string& value, text_rule const& rule) override;
  void texts(key const& what, std::vector<std::string>& value, text_rule const& rule) override;
  void named_texts(key const& what, std::map<std::string, std::string>& value,
                   text_rule const& names) override;
  void bytes(key const& what, std::uint64_t& value, limits<std::uint64_t> allowed) override;
  void bytes_or_auto(key const& what, std::optional<std::uint64_t>& value,
                     limits<std::uint64_t> allowed) override;
  void memory(key const& what, std::optional<memory_amount>& value,
              limits<std::uint64_t> allowed) override;
  void duration(key const& what, microseconds& value, limits<microseconds> allowed) override;
  void duration_or_auto(key const& what, std::optional<microseconds>& value,
                        limits<microseconds> allowed) override;
  void percentage(key const& what, double& value, limits<double> allowed,
                  percent_sign sign) override;
  void choice(key const& what, std::size_t& value,
              std::span<std::string_view const> names) override;
  void section(key const& what, std::function<void(key_visitor&)> const& body) override;
  void list(key const& what, std::function<void(key_visitor&)> const& element) override;

  void finish();

 private:
  struct entry {
    std::string name;
    YAML::Mark where;
    YAML::Node value;
    bool described = false;
  };
  /// Calls `take` with the value of that key if the file gives it; what it throws becomes a
  /// finding.
  void read(key const& what, std::function<void(YAML::Node const&)> const& take);
  /// The same of a part of a key's value.
  void take_part(YAML::Node const& node, std::string const& path,
                 std::function<void()> const& take);
  [[nodiscard]] std::string path_of(std::string_view name) const;

  std::string path_;
  YAML::Mark where_;
  findings& found_;
  std::vector<entry> entries_;
  std::vector<std::string_view> described_;
};

}  // namespace sluice::policy::detail
