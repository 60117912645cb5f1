/// Many clients and a server at one ledger. SLUICE_TEST_OPERATIONS sets how many operations all of
/// them do.
#include "ledger_members.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <iostream>
#include <random>
#include <thread>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/ledger_writer.hpp"
#include "random_runs.hpp"
#include "tests/from_environment.hpp"

namespace sluice::memhandover::trials {
namespace {

using namespace sluice::literals;
using std::chrono::steady_clock;

/// The ledger, the record and the bells; what a broker does with them is the test's.
class members_test : public ::testing::Test {
 protected:
  static unique_fd make_bell() { return unique_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)}; }

  void SetUp() override {
    ASSERT_NE(static_cast<void*>(record_), MAP_FAILED);
    for (std::uint32_t slot = 0; slot <= server_slot; ++slot) {
      view_.clients()[slot].kind.store(static_cast<std::uint32_t>(kind_in(slot).kind));
      set_status(slot, client_status::live);
    }
    for (std::uint32_t slot = 0; slot < member_clients; ++slot) {
      bells_.push_back(make_bell());
      place_.bells.push_back(bells_.back().get());
    }
  }
  void TearDown() override { ::munmap(record_, sizeof *record_); }

  void set_status(std::uint32_t slot, client_status status) {
    view_.clients()[slot].status.store(static_cast<std::uint32_t>(status));
  }

  /// Waits until `done`, and says no if somebody has failed or nothing happens any more.
  bool await(std::function<bool()> const& done) {
    auto const deadline = steady_clock::now() + std::chrono::seconds{60};
    while (!done()) {
      pollfd polled{progress_.get(), POLLIN, 0};
      ::poll(&polled, 1, 10);
      eventfd_t count = 0;
      (void)::eventfd_read(progress_.get(), &count);
      if (record_->failed.load() == 2 || steady_clock::now() > deadline) {
        return false;
      }
    }
    return true;
  }
  bool await_operations(std::uint64_t count) {
    return await([&] { return record_->operations.load() >= count; });
  }
  bool await_parked(std::uint32_t first, std::uint32_t end) {
    return await([&] {
      for (auto slot = first; slot < end; ++slot) {
        if (record_->parked[slot].load() != record_->round.load()) {
          return false;
        }
      }
      return true;
    });
  }
  void enter(phase next) {
    record_->now.store(next);
    (void)::eventfd_write(files_.doorbell.get(), 1);
    for (auto const bell : place_.bells) {
      (void)::eventfd_write(bell, 1);
    }
  }

  /// Everybody stands still for a moment, and ledger and members are compared.
  [[nodiscard]] std::string compare() {
    record_->round.fetch_add(1);
    enter(phase::clients_park);
    if (!await_parked(0, member_clients)) {
      return "the clients do not come to rest";
    }
    enter(phase::server_parks);
    if (!await_parked(server_slot, server_slot + 1)) {
      return "the server does not come to rest";
    }
    auto const result = disagreement(place_);
    enter(phase::run);
    return result;
  }

  [[nodiscard]] std::string failure() const {
    return record_->failed.load() == 2 ? record_->failure : "nothing was heard for a minute";
  }

  pool_files files_ = create_ledger({backend_kind::host, -1, 2_MiB, member_chunks});
  ledger_view view_{files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write};
  unique_fd progress_ = make_bell();
  std::vector<unique_fd> bells_;
  members_record* record_ = static_cast<members_record*>(::mmap(
      nullptr, sizeof(members_record), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  members_place place_{*record_, view_, files_.doorbell.get(), {}, progress_.get()};
};

/// A pool whose members are processes, which are killed and replaced.
class member_processes : public members_test {
 protected:
  void TearDown() override {
    for (auto const pid : pids_) {
      if (pid > 0) {
        ::kill(pid, SIGKILL);
        ::waitpid(pid, nullptr, 0);
      }
    }
    members_test::TearDown();
  }

  pid_t start(std::function<void(members_place const&)> const& what) {
    auto const pid = ::fork();
    if (pid == 0) {
      run_member(place_, what);
      ::_exit(record_->failed.load() == 0 ? 0 : 1);
    }
    return pid;
  }
  void start_client(std::uint32_t slot) {
    pids_.at(slot) = start([slot, seed = random_()](auto const& at) { be_client(at, slot, seed); });
  }
  void start_server() {
    pids_.at(server_slot) = start([seed = random_()](auto const& at) { be_server(at, seed); });
  }

  /// Kills a member wherever it is just then; true if it was alive until now.
  bool kill_member(std::uint32_t slot) {
    auto const pid = std::exchange(pids_.at(slot), 0);
    ::kill(pid, SIGKILL);
    int status = 0;
    ::waitpid(pid, &status, 0);
    for (auto& mark : record_->mark) {
      if (mark == slot + 1) {  // the others write theirs meanwhile
        mark = 0;
      }
    }
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  }

  /// The writer dies; the next one knows nothing but the shared memory.
  bool replace_server() {
    bool const was_alive = kill_member(server_slot);
    {
      ledger_writer broker{view_};
      broker.pump();
      broker.reclaim(server_slot);
      if (auto const slot = record_->to_reclaim.exchange(0); slot != 0) {
        broker.reclaim(slot - 1);
      }
    }
    start_server();
    return was_alive;
  }

  bool replace_client(std::uint32_t slot) {
    bool const was_alive = kill_member(slot);
    set_status(slot, client_status::gone);
    record_->to_reclaim.store(slot + 1);
    (void)::eventfd_write(files_.doorbell.get(), 1);
    if (random_() % 4 == 0) {
      replace_server();  // which may have got halfway
    }
    if (!await([&] { return record_->to_reclaim.load() == 0; })) {
      return false;
    }
    set_status(slot, client_status::live);
    start_client(slot);
    return was_alive;
  }

  std::mt19937_64 random_;
  std::array<pid_t, member_clients + 2> pids_{};
};

TEST_F(member_processes, never_have_a_chunk_twice_and_lose_none_though_they_are_killed) {
  auto const all = seeds();
  auto const operations = from_environment("SLUICE_TEST_OPERATIONS", 60'000) / all.size();
  auto const start_time = steady_clock::now();
  std::uint64_t kills = 0;
  std::uint64_t comparisons = 0;
  for (std::uint32_t slot = 0; slot < member_clients; ++slot) {
    start_client(slot);
  }
  start_server();
  pids_.back() = start(be_observer);
  std::uint64_t done = 0;
  for (auto const seed : all) {
    random_.seed(seed);
    for (auto const end = done + operations; done < end;) {
      done = record_->operations.load() + 200 + below(random_, 800);
      ASSERT_TRUE(await_operations(done)) << failure() << ", SLUICE_TEST_SEED=" << seed;
      for (auto wait = random_() % 20'000; wait > 0; --wait) {
        (void)record_->operations.load();  // so that the kill finds them anywhere
      }
      if (random_() % 4 != 0) {
        ASSERT_TRUE(replace_server()) << failure() << ", SLUICE_TEST_SEED=" << seed;
      } else {
        ASSERT_TRUE(replace_client(below(random_, member_clients)))
            << failure() << ", SLUICE_TEST_SEED=" << seed;
      }
      ++kills;
      if (random_() % 4 == 0) {
        auto const found = compare();
        ASSERT_EQ(found, "") << failure() << ", SLUICE_TEST_SEED=" << seed;
        ++comparisons;
      }
    }
  }
  enter(phase::end);
  for (auto& pid : pids_) {
    int status = 0;
    ASSERT_EQ(::waitpid(std::exchange(pid, 0), &status, 0) > 0 && status == 0, true) << failure();
  }
  std::chrono::duration<double> const took = steady_clock::now() - start_time;
  std::cout << record_->operations.load() << " operations, " << kills << " kills, " << comparisons
            << " comparisons in " << took.count() << " s\n";
}

TEST_F(members_test, as_threads_order_all_that_they_hand_over) {
  auto const seed = seeds().back();
  auto const operations = from_environment("SLUICE_TEST_OPERATIONS", 60'000);
  auto const start_time = steady_clock::now();
  std::vector<std::thread> threads;
  auto start = [&](std::function<void(members_place const&)> what) {
    return std::thread{[this, what = std::move(what)] { run_member(place_, what); }};
  };
  for (std::uint32_t slot = 0; slot < member_clients; ++slot) {
    threads.push_back(start([=](auto const& at) { be_client(at, slot, seed + slot); }));
  }
  threads.push_back(start(be_observer));
  auto make_server = [&, next = seed]() mutable {
    return start([server_seed = ++next](auto const& at) { be_server(at, server_seed + 100); });
  };
  auto server = make_server();
  bool moved = true;
  std::string found;
  for (std::uint64_t done = 0; moved && found.empty() && done < operations;) {
    done = record_->operations.load() + 1000;
    moved = await_operations(done);
    record_->server_leaves.store(1);
    (void)::eventfd_write(files_.doorbell.get(), 1);
    server.join();
    record_->server_leaves.store(0);
    server = make_server();
    found = compare();
  }
  enter(phase::end);
  server.join();
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_TRUE(moved && record_->failed.load() == 0) << failure() << ", SLUICE_TEST_SEED=" << seed;
  EXPECT_EQ(found, "") << "SLUICE_TEST_SEED=" << seed;
  std::chrono::duration<double> const took = steady_clock::now() - start_time;
  std::cout << record_->operations.load() << " operations in " << took.count() << " s\n";
}

}  // namespace
}  // namespace sluice::memhandover::trials
