#include "tests/runtime/step/engine_role.hpp"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "benchmarks/pool_engine.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::test {
namespace {

using namespace std::chrono_literals;
using std::chrono::steady_clock;

void print_line(std::string const& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

/// Every byte that is looked at is this; the last one is looked at, too.
bool holds(std::byte const* where, std::size_t bytes, int value) {
  constexpr std::size_t apart = 997;
  for (std::size_t i = 0; i < bytes; i += apart) {
    if (where[i] != static_cast<std::byte>(value)) {
      return false;
    }
  }
  return where[bytes - 1] == static_cast<std::byte>(value);
}

class marked_engine {
 public:
  /// One that is `steady` gives nothing back of its own accord.
  marked_engine(std::string const& folder, bool steady)
      : steady_(steady), engine_(broker_of(folder), "engine") {}

  /// Grows if it has less than `most` bytes, and looks at all that it has.
  void turn(std::uint64_t most) {
    auto const bytes = engine_.chunk_bytes();
    auto const wanted = static_cast<std::uint32_t>(most / bytes);
    if (engine_.held() < wanted) {
      (void)engine_.grow(wanted - engine_.held(), steady_clock::now() + 5s, "model",
                         [&](std::byte* where) {
                           wrong_ |= !holds(where, bytes, 0);
                           std::memset(where, mark_, bytes);
                         });
    }
    engine_.visit([&](std::byte* where) { wrong_ |= !holds(where, bytes, mark_); });
    if (engine_.held() >= wanted && !std::exchange(grown_, true)) {
      print_line("grown");
    }
    if (engine_.parked() > 0 && !std::exchange(parked_, true)) {
      print_line("parked");
    }
    if (!steady_ && random_() % 8 == 0) {
      engine_.shrink(static_cast<std::uint32_t>(random_() % (wanted / 4 + 1)));
    }
  }
  [[nodiscard]] bool wrong() const noexcept { return wrong_; }

 private:
  static memhandover::broker_options broker_of(std::string const& folder) {
    memhandover::broker_options options;
    options.runtime_dir = folder;
    return options;
  }

  std::mt19937 random_{static_cast<std::uint32_t>(::getpid())};
  int mark_ = static_cast<int>(1 + random_() % 255);
  bool steady_;
  bool wrong_ = false;
  bool grown_ = false;
  bool parked_ = false;
  bench::pool_engine engine_;
};

}  // namespace

int engine_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping) {
  marked_engine engine{arguments.at(0), arguments.size() > 3 && arguments[3] == "steady"};
  auto const most = std::stoull(arguments.at(1));
  for (int i = arguments.size() > 2 ? std::stoi(arguments[2]) : 0; i > 0; --i) {
    if (::fork() == 0) {
      for (;;) {
        ::pause();
      }
    }
  }
  print_line("joined");
  while (!stopping) {
    engine.turn(most);
    if (engine.wrong()) {
      print_line("error: an engine has seen bytes that are not its own");
      return 4;
    }
    ::poll(nullptr, 0, 1);  // demands come meanwhile
  }
  return 0;
}

}  // namespace sluice::test
