#include "nccl_shim/agreement/rank_group.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string_view>
#include <utility>

#include "nccl_shim/agreement/clock.hpp"
#include "nccl_shim/agreement/words_in_store.hpp"
#include "posix/byte_locks.hpp"

namespace sluice::nccl_shim {
namespace {

constexpr std::string_view file_prefix = "cut-";

void complain(std::string const& path) {
  std::fprintf(stderr,
               "sluice: the ranks of a communicator cannot meet in %s: %s. They do not agree where "
               "they pause.\n",
               path.c_str(), std::strerror(errno));
}

rank_process identity_of(meeting::member const& member) noexcept {
  auto const pid = member.pid.load(std::memory_order_acquire);
  return {pid, member.start_ticks.load(std::memory_order_relaxed),
          member.pid_namespace.load(std::memory_order_relaxed)};
}

/// Whether nobody else has it open: whoever has holds a shared lock. Not where it has been removed: then its
/// name may be that of another file, which somebody has open.
bool is_left_over(int file) {
  struct stat found {};
  return ::flock(file, LOCK_EX | LOCK_NB) == 0 && ::fstat(file, &found) == 0 && found.st_nlink > 0;
}

void remove_left_over(std::string const& folder) {
  std::unique_ptr<DIR, int (*)(DIR*)> const entries{::opendir(folder.c_str()), ::closedir};
  if (entries == nullptr) {
    return;
  }
  while (dirent const* const entry = ::readdir(entries.get())) {
    if (!std::string_view{entry->d_name}.starts_with(file_prefix)) {
      continue;
    }
    std::string const path = folder + '/' + entry->d_name;
    int const file = open_file(path, O_RDWR);
    if (file >= 0) {
      if (is_left_over(file)) {
        ::unlink(path.c_str());
      }
      ::close(file);
    }
  }
}

/// Opens the file that others open as well, under a lock that tells that it is in use; -1 if that
/// fails.
int open_shared(std::string const& path) {
  for (;;) {
    int const file = open_file(path, O_RDWR | O_CREAT);
    struct stat found {};
    if (file < 0) {
      return -1;
    }
    if (::flock(file, LOCK_SH) != 0 || ::fstat(file, &found) != 0) {
      ::close(file);
      return -1;
    }
    if (found.st_nlink > 0) {
      return file;
    }
    ::close(file);  // it was taken for left over just now
  }
}

}  // namespace

std::unique_ptr<rank_group> rank_group::join(std::string const& folder, std::string const& key,
                                             store* across, std::optional<unsigned> place) {
  remove_left_over(folder);
  std::string path = folder + '/' + std::string{file_prefix} + key;
  int const file = open_shared(path);
  void* at = MAP_FAILED;
  if (file >= 0 && ::ftruncate(file, sizeof(meeting)) == 0) {
    at = ::mmap(nullptr, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (at == MAP_FAILED) {
    complain(path);
    if (file >= 0) {
      ::close(file);
    }
    return nullptr;
  }
  std::unique_ptr<rank_group> made{
      new rank_group{std::move(path), key, file, static_cast<meeting*>(at)}};
  made->place_ = made->at_->joined.fetch_add(1, std::memory_order_seq_cst);
  if (made->place_ < max_ranks) {
    auto& self = made->at_->members[made->place_];
    static_cast<void>(posix::lock_byte(file, made->place_));
    auto const own = this_process();
    self.start_ticks.store(own.start_ticks, std::memory_order_relaxed);
    self.pid_namespace.store(own.pid_namespace, std::memory_order_relaxed);
    self.pid.store(own.pid, std::memory_order_release);
    self.place.store(place ? *place + 1 : 0, std::memory_order_release);
  }
  if (across != nullptr) {
    made->across_ = store_meeting::join(*across, key);
  }
  return made;
}

rank_group::rank_group(std::string path, std::string key, int file, meeting* at) noexcept
    : path_{std::move(path)}, key_{std::move(key)}, file_{file}, at_{at} {}

rank_group::~rank_group() {
  beat_.reset();  // it tells of what it finds by the cut
  if (place_ < max_ranks) {
    at_->members[place_].left.store(1, std::memory_order_release);
  }
  ::munmap(at_, sizeof(meeting));
  if (is_left_over(file_)) {
    ::unlink(path_.c_str());
  }
  ::close(file_);
}

unsigned rank_group::joined() const noexcept {
  return at_->joined.load(std::memory_order_seq_cst);
}

std::span<meeting::member const> rank_group::members() const noexcept {
  return std::span{at_->members}.first(std::min(joined(), max_ranks));
}

bool rank_group::is_part_of(rank_group const& whole) const noexcept {
  auto const others = whole.members();
  return std::all_of(members().begin(), members().end(), [&](meeting::member const& own) {
    return std::any_of(others.begin(), others.end(), [&](meeting::member const& other) {
      return identity_of(own) == identity_of(other);
    });
  });
}

/// Where all ranks meet; nullptr if that is nowhere.
std::unique_ptr<cut_words> rank_group::words_for(unsigned rank, unsigned ranks) {
  if (ranks > max_ranks || rank >= ranks) {
    return nullptr;
  }
  if (joined() == ranks) {
    across_.reset();
    return std::make_unique<words_in_memory>(at_->agreed, rank, ranks);
  }
  // If it is gone by now, some may know that all have joined: then it is lost to all, and not asked for less.
  if (across_ == nullptr || across_->joined().value_or(ranks) != ranks) {
    return nullptr;
  }
  across_->publish_host(rank);
  return std::make_unique<words_in_store>(across_->in(), across_->prefix(), rank, ranks);
}

bool rank_group::complete(unsigned rank, unsigned ranks) {
  words_ = words_for(rank, ranks);
  if (words_ == nullptr) {
    return false;
  }
  at_->members[place_].rank.store(rank, std::memory_order_release);
  others_.resize(joined());
  cut_.emplace(*words_, rank, ranks);
  exchanges_.emplace(at_->exchanged, rank, ranks);
  std::uint64_t places = 0;
  all_have_places_ = across_ == nullptr;
  for (unsigned each = 0; each < joined(); ++each) {
    std::uint64_t const place = std::uint64_t{1}
                                << at_->members[each].place.load(std::memory_order_acquire);
    all_have_places_ = all_have_places_ && place != 1 && (places & place) == 0;
    places |= place;
  }
  exchanges_->take_place(at_->members[place_].place.load(std::memory_order_relaxed));
  if (across_ != nullptr) {
    beat_ = std::make_unique<heartbeat>(across_->in(), across_->prefix(), rank, ranks,
                                        [this](unsigned silent) { cut_->declare_lost(silent); });
  }
  if (place_ == 0) {
    ::unlink(path_.c_str());  // all have it open
  }
  return true;
}

void rank_group::need(bool needs) noexcept {
  exchanges_resolved_.store(!needs, std::memory_order_relaxed);
  cut_->need(needs);
}

outcome rank_group::resolve(std::int64_t deadline_ns) noexcept {
  outcome const became = cut_->resolve(deadline_ns);
  if (became != outcome::granted || exchanges_resolved_.load(std::memory_order_relaxed)) {
    return became;
  }
  // In this order: what they have passed by then has been counted.
  while (exchanges_->others_are_passing() || exchanges_->lags()) {
    if (cut_->lost()) {
      return outcome::lost;
    }
    if (monotonic_ns() >= deadline_ns) {
      return outcome::late;
    }
    ::sched_yield();
  }
  exchanges_resolved_.store(true, std::memory_order_relaxed);
  return outcome::granted;
}

std::string rank_group::why_alone(unsigned ranks) const {
  std::string const of = " of a communicator's " + std::to_string(ranks) + " ranks ";
  std::string const most = " (at most " + std::to_string(max_ranks) + ')';
  if (across_ == nullptr) {
    return std::to_string(joined()) + of + "are under `sluice run` on this host" + most;
  }
  return std::to_string(across_->joined().value_or(0)) + of +
         "are under `sluice run` and have joined in " + across_->in().name() + most;
}

std::string rank_group::loss() const {
  auto const lost = cut_->lost();
  if (!lost) {
    return {};
  }
  if (across_ == nullptr) {
    return "rank " + std::to_string(*lost) + " has died";
  }
  if (*lost == the_words) {
    return across_->in().name() + " is gone";
  }
  std::string const host = across_->host_of(*lost);
  return "rank " + std::to_string(*lost) + " on " + (host.empty() ? "another host" : host) +
         " has died, or has been silent for " +
         std::to_string(
             std::chrono::duration_cast<std::chrono::seconds>(across_->in().at().patience)
                 .count()) +
         " s";
}

bool rank_group::has_died(unsigned place) noexcept {
  auto const& member = at_->members[place];
  auto const which = identity_of(member);
  if (which.pid == 0) {
    return false;
  }
  if (which.pid_namespace == identity_of(at_->members[place_]).pid_namespace) {
    return others_[place].has_died(which);
  }
  // In this order: it says that it leaves before it gives its byte up.
  return !posix::is_byte_locked(file_, place) && member.left.load(std::memory_order_acquire) == 0;
}

void rank_group::look_for_deaths() noexcept {
  std::unique_lock const looking{looking_, std::try_to_lock};
  if (!looking.owns_lock()) {
    return;  // another thread does
  }
  for (unsigned place = 0; place < others_.size(); ++place) {
    if (place != place_ && has_died(place)) {
      cut_->declare_lost(at_->members[place].rank.load(std::memory_order_acquire));
    }
  }
}

}  // namespace sluice::nccl_shim
