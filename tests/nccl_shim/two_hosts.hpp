/// Two hosts that are joined by a cable: network namespaces with a veth pair between them. Making them takes
/// root and iproute2.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <vector>

namespace sluice::nccl_shim::testing {

class two_hosts {
 public:
  two_hosts();
  two_hosts(two_hosts const&) = delete;
  two_hosts& operator=(two_hosts const&) = delete;
  ~two_hosts();

  /// Why there are none; empty if there are.
  [[nodiscard]] std::string const& problem() const noexcept { return problem_; }
  [[nodiscard]] std::string const& name(std::size_t host) const { return names_.at(host); }
  /// As the other one reaches it.
  [[nodiscard]] static std::string address(std::size_t host);
  /// What runs a command on that host, in words; it knows its own name and the other's.
  [[nodiscard]] std::vector<std::string> command(std::size_t host) const;
  void pull_cable() const;
  void plug_cable() const;

 private:
  std::array<std::string, 2> names_;
  std::string name_table_;  // a file
  std::string problem_;
};

/// The words as a shell takes them.
[[nodiscard]] std::string to_shell(std::vector<std::string> const& words);

}  // namespace sluice::nccl_shim::testing
