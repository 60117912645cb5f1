/// The examples in the headers of runtime/policy/, word for word: compiled, never run.
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <string>

#include "runtime/policy/detail/description.hpp"
#include "runtime/policy/detail/value_writer.hpp"
#include "runtime/policy/policy.hpp"
#include "runtime/policy/units.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"

namespace sluice::examples_of_policy {

void of_policy(std::function<void(std::string const&, std::uint16_t)> const& listen) {
  try {
    auto const wanted = policy::load("policy.yaml");
    listen(wanted.server.host, wanted.server.port);
  } catch (policy::policy_error const& wrong) {
    std::cerr << wrong.what() << '\n';
  }
}

void of_value_writer(policy::policy wanted) {
  using namespace policy::detail;
  std::map<std::string, std::string> values;
  value_writer writer{values};
  describe(writer, wanted);
  values["server.port"];
}

void of_units() {
  using namespace policy;
  parse_bytes("1.5GiB");
  parse_duration("150ms");
  parse_percentage("99.9%");
}

}  // namespace sluice::examples_of_policy

#pragma GCC diagnostic pop
