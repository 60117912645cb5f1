#include "tests/runtime/step/parker_role.hpp"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/client/tenant_client.hpp"

namespace sluice::test {
namespace {

using namespace sluice::literals;
using memhandover::copy_state;

void report(std::string const& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

int pattern_of(memhandover::held_copy const& copy) {
  return static_cast<int>(
      (static_cast<std::uint64_t>(::getpid()) + copy.slot + copy.generation) % 255 + 1);
}

bool is_on_disk(memhandover::host_copy_share const& share, memhandover::held_copy const& copy) {
  return share.shape().is_on_disk(copy.slot);
}

/// Its bytes, or where those go that lie on the disk.
std::span<std::byte> room_for(memhandover::host_copy_share& share,
                              memhandover::held_copy const& copy) {
  return is_on_disk(share, copy) ? share.staging().first(share.shape().slot_bytes)
                                 : share.at(copy.slot);
}

void write_pattern(memhandover::host_copy_share& share, memhandover::held_copy const& copy) {
  auto const where = room_for(share, copy);
  std::memset(where.data(), pattern_of(copy), where.size());
  if (is_on_disk(share, copy)) {
    share.disk()->write(share.disk_offset(copy.slot), where);
  }
}

bool holds_pattern(memhandover::host_copy_share& share, memhandover::held_copy const& copy) {
  constexpr std::size_t apart = 997;
  auto const bytes = room_for(share, copy);
  if (is_on_disk(share, copy)) {
    share.disk()->read(share.disk_offset(copy.slot), bytes);
  }
  for (std::size_t i = 0; i < bytes.size(); i += apart) {
    if (bytes[i] != static_cast<std::byte>(pattern_of(copy))) {
      return false;
    }
  }
  return true;
}

std::unique_ptr<memhandover::tenant_client> join(std::string const& folder, int device) {
  spdlog::set_level(spdlog::level::info);  // it tells of brokers that are found
  memhandover::broker_options options;
  options.runtime_dir = folder;
  options.backend = "cuda";
  options.pool_bytes = 64_MiB;
  options.chunk_bytes = 2_MiB;
  if (device >= 0) {
    options.device = device;
  }
  return memhandover::tenant_client::join(
      options, memhandover::client_kind::training, "parker",
      [](memhandover::demand const&) { return memhandover::demand_answer{}; });
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
    if (!holds_pattern(share, each)) {
      return "lost the bytes of slot " + std::to_string(each.slot);
    }
  }
  return "intact";
}

/// Whatever any client can write there.
void damage(memhandover::host_copy_share& share, bool places_alone) {
  memhandover::host_copy_table table{share.files()};
  auto& header = table.header();
  for (auto& place : header.pools) {
    place.store(0);
  }
  if (places_alone) {
    return;
  }
  for (auto* const each : {&header.magic, &header.slot_bytes, &header.budget, &header.populated}) {
    each->store(~0ULL);
  }
  header.version.store(0);
  header.slots.store(~0U);
  auto words = memhandover::host_copies_words({table.segment().data(), table.segment().bytes()},
                                              table.shape());
  for (auto& word : words) {
    auto const said = memhandover::copy_word::unpack(word.load());
    if (said && said->state == copy_state::free) {
      word.store(~0ULL);
    }
  }
}

void exchange(memhandover::host_copy_share const& share) {
  auto const others =
      memhandover::create_host_copies(share.shape().bytes(), share.shape().slot_bytes);
  if (::dup2(others.bytes.get(), share.files().bytes.get()) < 0 ||
      ::dup2(others.table.get(), share.files().table.get()) < 0) {
    throw std::runtime_error{"cannot exchange descriptors"};
  }
}

}  // namespace

int parker_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping,
                std::atomic<bool>& asked) {
  auto const mischief = arguments.size() > 2 ? arguments[2] : std::string{};
  auto const tenant = join(arguments.at(0), arguments.size() > 3 ? std::stoi(arguments[3]) : -1);
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
    write_pattern(*share, each);
    if (each.slot % 2 == 1 && !share->copies().keep(each)) {
      report("a slot was not its own");
      return 4;
    }
  }
  if (!held.empty() && !child_faults_at(room_for(*share, held.front()).data())) {
    report("a forked child reaches the copies");
    return 5;
  }
  if (mischief == "damage" || mischief == "places") {
    damage(*share, mischief == "places");
  } else if (mischief == "exchange") {
    exchange(*share);
  }
  report("joined");
  while (!stopping) {
    if (asked.exchange(false)) {
      report(look_at(*share, held) + (tenant->copies() == nullptr ? ", refused" : ""));
    }
    ::poll(nullptr, 0, 5);
  }
  for (auto const& each : held) {
    share->copies().give_back(each);
  }
  return 0;
}

namespace {

/// What a taker has, and how it comes to have more and less.
class takings {
 public:
  explicit takings(memhandover::host_copy_share& share) : share_(share) {}

  void step() {
    switch (random_() % 5) {
      case 0:
      case 1:
        take(copies().hold(1 + static_cast<std::uint32_t>(random_() % 3), share_.holder()));
        break;
      case 2:
        if (!held_.empty()) {
          auto const each = pick(held_);
          expect(copies().keep(each), "kept");
          kept_.push_back(each);
        }
        break;
      case 3:
        take_back();
        break;
      default:
        if (!held_.empty()) {
          auto const each = pick(held_);
          expect(holds_pattern(share_, each), "found whole");
          expect(copies().give_back(each), "given back");
        } else {
          take(copies().steal(1, share_.holder()));
        }
    }
  }
  /// How many, with those whose copy is only kept.
  std::size_t count() {
    while (!kept_.empty()) {
      take_back();
    }
    for (auto const& each : held_) {
      expect(holds_pattern(share_, each), "found whole");
      auto const word = copies().at(each.slot);
      expect(word == memhandover::copy_word{copy_state::held, each.holder, each.generation},
             "held");
    }
    return held_.size();
  }

 private:
  using list = std::vector<memhandover::held_copy>;

  [[nodiscard]] memhandover::host_copies& copies() { return share_.copies(); }
  memhandover::held_copy pick(list& from) {
    std::swap(from[random_() % from.size()], from.back());
    auto const each = from.back();
    from.pop_back();
    return each;
  }
  void take(list const& taken) {
    for (auto const& each : taken) {
      auto const where = share_.at(each.slot);
      std::memset(where.data(), pattern_of(each), where.size());
      held_.push_back(each);
    }
  }
  /// Unless somebody has stolen it meanwhile.
  void take_back() {
    if (kept_.empty()) {
      return;
    }
    auto const each = pick(kept_);
    if (copies().hold_again(each)) {
      expect(holds_pattern(share_, each), "found whole");
      held_.push_back(each);
    }
  }
  static void expect(bool holds, char const* what) {
    if (!holds) {
      throw std::runtime_error{std::string{"a slot could not be "} + what};
    }
  }

  memhandover::host_copy_share& share_;
  std::mt19937 random_{static_cast<std::uint32_t>(::getpid())};
  list held_;
  list kept_;
};

}  // namespace

int taker_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping,
               std::atomic<bool>& asked) {
  auto const tenant = join(arguments.at(0), -1);
  auto* const share = tenant->copies();
  if (share == nullptr) {
    report("none");
    return 0;
  }
  takings mine{*share};
  report("joined");
  try {
    while (!stopping) {
      mine.step();
      if (asked.exchange(false)) {
        report("has " + std::to_string(mine.count()));
        while (!stopping && !asked.exchange(false)) {
          ::poll(nullptr, 0, 1);
        }
      }
    }
  } catch (std::exception const& why) {
    report(why.what());
    return 3;
  }
  return 0;
}

}  // namespace sluice::test
