/// Writes what a policy says as text, key by key: the third reader of the keys' description.
///
///   std::map<std::string, std::string> values;
///   value_writer writer{values};
///   describe(writer, wanted);
///   values["server.port"];   // "8000"
#pragma once

#include <map>
#include <string>

#include "runtime/policy/detail/key_visitor.hpp"

namespace sluice::policy::detail {

class value_writer final : public key_visitor {
 public:
  using values = std::map<std::string, std::string>;  ///< by path

  explicit value_writer(values& into, std::string prefix = {})
      : into_(into), prefix_(std::move(prefix)) {}

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
  /// Passed over.
  void list(key const& /*what*/, std::function<void(key_visitor&)> const& /*element*/) override {}

 private:
  void put(key const& what, std::string value);

  values& into_;
  std::string prefix_;
};

}  // namespace sluice::policy::detail
