/// Makes the steps of a simulation of tests/model/cut.pml with the code, and compares what comes of each.
///
///   spin -T -n1 -DTRACE cut.pml | cut_trace RANKS free|needed      exits with 1 at the first difference
///
/// A step is a line `@ NAME RANK MORE EPOCH GRANTED PAUSING NEEDED`: what happens, and the word after it.
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "nccl_shim/agreement/cut.hpp"
#include "nccl_shim/agreement/cut_memory.hpp"

namespace sluice::nccl_shim {
namespace {

constexpr std::int64_t at_once = 0;  // a deadline that has passed

struct step {
  std::string name;
  unsigned rank = 0;
  std::uint64_t more = 0;
  cut_word after;
};

/// Nothing for what is no step.
std::optional<step> step_in(std::string const& line) {
  std::istringstream text{line};
  std::string mark;
  step found;
  unsigned epoch = 0;
  unsigned pausing = 0;
  unsigned needed = 0;
  if (!(text >> mark >> found.name >> found.rank >> found.more >> epoch >> found.after.granted >>
        pausing >> needed) ||
      mark != "@") {
    return std::nullopt;
  }
  found.after.epoch = static_cast<std::uint16_t>(epoch);
  found.after.pausing = static_cast<std::uint8_t>(pausing);
  found.after.needed = static_cast<std::uint8_t>(needed);
  return found;
}

class replay {
 public:
  /// `always`: all ranks need it all the time.
  replay(unsigned ranks, bool always) : free_(ranks), cuts_(ranks) {
    for (unsigned rank = 0; rank < ranks; ++rank) {
      words_.push_back(std::make_unique<words_in_memory>(*shared_, rank, ranks));
      all_.push_back(std::make_unique<cut>(*words_.back(), rank, ranks));
      if (always) {
        all_.back()->need(true);
      }
    }
  }

  /// What is different, or nothing.
  [[nodiscard]] std::string make(step const& next) {
    if (!happens(next)) {
      return next.name + " did not happen";
    }
    auto const word = cut_word::unpack(shared_->word.load());
    if (word == next.after) {
      return {};
    }
    std::ostringstream text;
    text << "the word is {" << word.epoch << ' ' << word.granted << ' ' << +word.pausing << ' '
         << +word.needed << (word.catching_up ? ", catching up}" : "}");
    return text.str();
  }

 private:
  /// Makes it. False if the code would have done something else.
  [[nodiscard]] bool happens(step const& next) {
    cut& of = *all_.at(next.rank);
    if (next.name == "arrive") {
      numbered_call const what{.operation = next.more, .type = 0, .count = 0, .root = 0};
      // Passed in one step where that can be, every other time: what comes after must be the same.
      bool const may_pass = next.more % 2 == 0 && of.epoch() == next.after.epoch;
      if (!may_pass || of.pass(what) == passing::refused) {
        of.arrive(what);
      }
      return true;
    }
    if (next.name == "free") {
      free_[next.rank] = of.await(at_once) == outcome::granted;
      return free_[next.rank];
    }
    if (next.name == "launch") {
      bool const may = free_[next.rank] || of.await(at_once) == outcome::granted;
      free_[next.rank] = false;
      of.launched();
      return may && of.number() == next.more;
    }
    if (next.name == "drop") {
      return of.await(at_once) == outcome::dropped;
    }
    if (next.name == "need" || next.name == "unneed") {
      of.need(next.name == "need");
      return true;
    }
    if (next.name == "resolve") {
      return of.resolve(at_once) == outcome::granted;
    }
    if (next.name == "pause") {
      cuts_[next.rank] = of.pause(next.more != 0);
      return cuts_[next.rank] == next.after.granted;
    }
    if (next.name == "rest") {
      return cuts_[next.rank] == next.more &&
             of.await_debts(next.more, at_once) == outcome::granted;
    }
    if (next.name == "resume") {
      of.resume();
      return true;
    }
    return false;
  }

  std::unique_ptr<cut_memory> shared_ = std::make_unique<cut_memory>();
  std::vector<std::unique_ptr<cut_words>> words_;
  std::vector<std::unique_ptr<cut>> all_;
  std::vector<bool> free_;  ///< nobody needed it when this rank looked
  std::vector<std::uint64_t> cuts_;
};

}  // namespace
}  // namespace sluice::nccl_shim

int main(int argc, char** argv) {
  using namespace sluice::nccl_shim;
  if (argc != 3) {
    return 2;
  }
  replay all{static_cast<unsigned>(std::atoi(argv[1])), std::string{argv[2]} == "needed"};
  int steps = 0;
  for (std::string line; std::getline(std::cin, line);) {
    auto const next = step_in(line);
    if (!next) {
      continue;
    }
    ++steps;
    if (auto const different = all.make(*next); !different.empty()) {
      std::cout << "step " << steps << ", " << line << ": " << different << '\n';
      return 1;
    }
  }
  std::cout << steps << " steps\n";
  return 0;
}
