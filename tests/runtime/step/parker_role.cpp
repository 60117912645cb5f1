#include "tests/runtime/step/parker_role.hpp"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>

#include "memhandover/base/error.hpp"
#include "memhandover/client/tenant_client.hpp"

namespace sluice::test {
namespace {

using memhandover::copy_state;

void report(std::string const& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

int pattern_of(memhandover::held_copy const& copy) {
  return static_cast<int>((static_cast<std::uint32_t>(::getpid()) + copy.slot) % 255 + 1);
}

bool child_faults_at(std::byte const volatile* where) {
  auto const child = ::fork();
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);
    (void)*where;
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

std::string look_at(memhandover::host_copy_share& share,
                    std::vector<memhandover::held_copy> const& held) {
  for (auto const& each : held) {
    auto const word = share.copies().at(each.slot);
    if (word.holder != each.holder || word.generation != each.generation ||
        word.state == copy_state::free) {
      return "lost slot " + std::to_string(each.slot);
    }
    constexpr std::size_t apart = 997;
    auto const bytes = share.at(each.slot);
    for (std::size_t i = 0; i < bytes.size(); i += apart) {
      if (bytes[i] != static_cast<std::byte>(pattern_of(each))) {
        return "lost the bytes of slot " + std::to_string(each.slot);
      }
    }
  }
  return "intact";
}

}  // namespace

int parker_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping,
                std::atomic<bool>& asked) {
  memhandover::broker_options options;
  options.runtime_dir = arguments.at(0);
  options.backend = "cuda";
  auto const tenant = memhandover::tenant_client::join(
      options, memhandover::client_kind::training, "parker",
      [](memhandover::demand const&) { return memhandover::demand_answer{}; });
  auto* const share = tenant->copies();
  if (share == nullptr) {
    report("none");
    return 0;
  }
  auto const wanted = static_cast<std::uint32_t>(std::stoul(arguments.at(1)));
  auto const held = share->copies().hold(wanted, share->holder());
  if (held.size() != wanted) {
    report("too few slots are free");
    return 3;
  }
  for (auto const& each : held) {
    auto const where = share->at(each.slot);
    std::memset(where.data(), pattern_of(each), where.size());
    if (each.slot % 2 == 1 && !share->copies().keep(each)) {
      report("a slot was not its own");
      return 4;
    }
  }
  if (!held.empty() && !child_faults_at(share->at(held.front().slot).data())) {
    report("a forked child reaches the copies");
    return 5;
  }
  report("joined");
  while (!stopping) {
    if (asked.exchange(false)) {
      report(look_at(*share, held));
    }
    ::poll(nullptr, 0, 5);
  }
  for (auto const& each : held) {
    share->copies().give_back(each);
  }
  return 0;
}

}  // namespace sluice::test
