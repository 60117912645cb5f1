#include "tests/nccl_shim/pausing.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <thread>

#include "tests/backoff.hpp"

namespace sluice::nccl_shim::testing {

using namespace std::chrono_literals;

std::int64_t in(std::chrono::nanoseconds span) {
  return (std::chrono::steady_clock::now().time_since_epoch() + span).count();
}

int number_in(char const* name, int otherwise) {
  char const* const text = std::getenv(name);
  return text != nullptr ? std::atoi(text) : otherwise;
}

std::chrono::milliseconds patience() {
  return std::chrono::milliseconds{number_in("PATIENCE_MS", 60'000)};
}

rank_that_pauses::rank_that_pauses(sluice_gate_api const& gate, int rank, int ranks,
                                   std::string const& file)
    : gate_{gate}, rank_{rank}, ranks_{ranks} {
  int const shared = ::open(file.c_str(), O_RDWR | O_CREAT, 0600);
  if (shared < 0 || ::ftruncate(shared, sizeof(*came_)) != 0) {
    throw std::runtime_error{"no file to meet in"};
  }
  came_ = static_cast<std::atomic<std::uint32_t>*>(
      ::mmap(nullptr, sizeof(*came_), PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0));
  ::close(shared);
}

void rank_that_pauses::may_pause(bool may) const {
  if (auto const* const agreement = gate_.agreement(); agreement != nullptr) {
    agreement->may_pause(may ? 1 : 0);
    if (agreement->resolve(in(patience())) == 0) {
      std::printf("rank %d does not catch up\n", rank_);
    }
  }
}

bool rank_that_pauses::meet_others(std::uint32_t round) const {
  come();
  std::int64_t const until = in(2 * patience());
  for (backoff until_all_have; came() < round * static_cast<std::uint32_t>(ranks_);
       until_all_have.wait()) {
    if (in(0s) > until) {
      return false;
    }
  }
  return true;
}

void rank_that_pauses::now_and_then(int times) const {
  bool const fickle = number_in("FICKLE", 0) != 0;
  bool const alone = number_in("ALONE", 0) != 0;
  std::minstd_rand random{static_cast<unsigned>(rank_ + 1)};
  for (int i = 0; i < times; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds{random() % 2000});
    if (fickle) {
      may_pause(true);
    }
    if (gate_.close(in(patience())) != 0 || gate_.wait_idle(in(patience())) != 0) {
      std::printf("rank %d does not come to rest\n", rank_);
      std::fflush(stdout);
      ::_exit(3);
    }
    std::uint64_t const launches = gate_.launches();
    bool const met = alone || meet_others(static_cast<std::uint32_t>(i) + 1);
    if (!met || gate_.launches() != launches) {
      std::printf("%s\n", met ? "launched in a pause" : "a rank is missing");
      std::fflush(stdout);
      ::_exit(4);
    }
    gate_.open();
    if (fickle) {
      may_pause(false);
    }
  }
}

}  // namespace sluice::nccl_shim::testing
