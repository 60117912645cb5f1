/// Writes the JSON Schema of what is described to it.
#pragma once

#include <nlohmann/json.hpp>

#include "runtime/policy/detail/key_visitor.hpp"

namespace sluice::policy::detail {

class schema_writer : public key_visitor {
 public:
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

  /// The object whose keys have been described.
  [[nodiscard]] nlohmann::ordered_json object() const;

 private:
  void put(key const& what, nlohmann::ordered_json const& entry);

  nlohmann::ordered_json properties_ = nlohmann::ordered_json::object();
  nlohmann::ordered_json required_ = nlohmann::ordered_json::array();
};

}  // namespace sluice::policy::detail
