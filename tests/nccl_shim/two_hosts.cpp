#include "tests/nccl_shim/two_hosts.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

namespace sluice::nccl_shim::testing {
namespace {

/// What a command says that fails; empty if it does not.
std::string failure_of(std::string const& command) {
  std::string said;
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) {
    return "no process";
  }
  std::array<char, 256> buffer{};
  while (std::fgets(buffer.data(), static_cast<int>(buffer.size()), pipe) != nullptr) {
    said += buffer.data();
  }
  int const status = ::pclose(pipe);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "" : "`" + command + "` failed: " + said;
}

}  // namespace

two_hosts::two_hosts() {
  std::string const own = "sluice" + std::to_string(::getpid());
  names_ = {own + "a", own + "b"};
  name_table_ = ::testing::TempDir() + own + ".names";
  std::ofstream table{name_table_};
  table << "127.0.0.1 localhost\n";
  for (std::size_t host = 0; host < names_.size(); ++host) {
    // Else torch asks the network for the name of each address that it connects to, in either form.
    table << address(host) << ' ' << name(host) << "\n::ffff:" << address(host) << ' ' << name(host)
          << '\n';
  }
  if (::geteuid() != 0) {
    problem_ = "only root can make network namespaces";
    return;
  }
  for (auto const& command :
       {"ip netns add " + names_[0], "ip netns add " + names_[1],
        "ip -n " + names_[0] + " link add cable type veth peer name cable netns " + names_[1]}) {
    problem_ = problem_.empty() ? failure_of(command) : problem_;
  }
  for (std::size_t host = 0; host < names_.size(); ++host) {
    std::string const on = "ip -n " + names_.at(host);
    for (auto const& command : {on + " addr add " + address(host) + "/24 dev cable",
                                on + " link set lo up", on + " link set cable up"}) {
      problem_ = problem_.empty() ? failure_of(command) : problem_;
    }
  }
}

two_hosts::~two_hosts() {
  for (auto const& name : names_) {
    static_cast<void>(failure_of("ip netns del " + name));
  }
  std::filesystem::remove(name_table_);
}

std::string two_hosts::address(std::size_t host) {
  return "10.213.7." + std::to_string(host + 1);
}

std::vector<std::string> two_hosts::command(std::size_t host) const {
  std::string const& own = name(host);
  return {"ip",
          "netns",
          "exec",
          own,
          "unshare",
          "--uts",
          "sh",
          "-c",
          "echo " + own + " > /proc/sys/kernel/hostname && mount --bind " + name_table_ +
              " /etc/hosts && exec \"$0\" \"$@\""};
}

void two_hosts::pull_cable() const {
  static_cast<void>(failure_of("ip -n " + names_[0] + " link set cable down"));
}

void two_hosts::plug_cable() const {
  static_cast<void>(failure_of("ip -n " + names_[0] + " link set cable up"));
}

std::string to_shell(std::vector<std::string> const& words) {
  std::string text;
  for (auto const& word : words) {
    text += (text.empty() ? "'" : " '") + word + '\'';
  }
  return text;
}

}  // namespace sluice::nccl_shim::testing
