#include "nccl_shim/agreement/board.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "nccl_shim/agreement/processes.hpp"
#include "posix/byte_locks.hpp"

namespace sluice::nccl_shim {
namespace {

constexpr unsigned version_shift = 32;
constexpr std::uint64_t one_version = std::uint64_t{1} << version_shift;

constexpr unsigned reason_shift = 32;
constexpr unsigned progress_shift = 34;

constexpr std::uint64_t waiting_for(board::reason why, std::uint32_t places,
                                    std::uint32_t progress) {
  return std::uint64_t{progress} << progress_shift |
         std::uint64_t{static_cast<std::uint8_t>(why)} << reason_shift | places;
}
constexpr board::reason reason_of(std::uint64_t waiting) {
  return static_cast<board::reason>(waiting >> reason_shift & 3U);
}
constexpr std::uint32_t places_of(std::uint64_t waiting) {
  return static_cast<std::uint32_t>(waiting);
}
constexpr std::uint32_t progress_seen(std::uint64_t waiting) {
  return static_cast<std::uint32_t>(waiting >> progress_shift);
}

/// Nobody waits there any more, nor is to be let go.
void clear(board_memory& at, unsigned place) {
  at.places[place].waiting.store(0, std::memory_order_seq_cst);
  at.word.fetch_add(one_version, std::memory_order_seq_cst);
  at.word.fetch_and(~(std::uint64_t{1} << place), std::memory_order_seq_cst);
}

/// A place for this process: nobody's, or that of one that has died.
std::optional<unsigned> find_place(board_memory& at, int file) {
  for (unsigned place = 0; place < most_places; ++place) {
    if (posix::lock_byte(file, place)) {
      clear(at, place);
      return place;
    }
  }
  return std::nullopt;
}

void unmap(board_memory* at) {
  ::munmap(at, sizeof(board_memory));
}

}  // namespace

std::unique_ptr<board> board::open(std::string const& folder) {
  std::string const path = folder + "/exchanges";
  int const file = open_file(path, O_RDWR | O_CREAT);
  void* at = MAP_FAILED;
  if (file >= 0 && ::ftruncate(file, sizeof(board_memory)) == 0) {
    at = ::mmap(nullptr, sizeof(board_memory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  if (at == MAP_FAILED) {
    int const why = errno;
    if (file >= 0) {
      ::close(file);
    }
    std::fprintf(
        stderr,
        "sluice: %s cannot be used: %s. A pause may have to wait for what other ranks send "
        "or receive.\n",
        path.c_str(), std::strerror(why));
    return nullptr;
  }
  auto* const memory = static_cast<board_memory*>(at);
  auto const place = find_place(*memory, file);
  if (!place) {
    std::fprintf(
        stderr,
        "sluice: %u processes in %s use NCCL already. A pause of this one may have to wait "
        "for what other ranks send or receive.\n",
        most_places, folder.c_str());
    unmap(memory);
    ::close(file);
    return nullptr;
  }
  return std::unique_ptr<board>{new board{memory, *place, file}};
}

board::board(board_memory* owned, unsigned place, int file) noexcept
    : shared_{*owned}, mapped_{owned, unmap}, place_{place}, file_{file} {}

board::~board() {
  if (file_ >= 0) {
    ::close(file_);
  }
}

std::uint32_t board::progress_of(std::uint32_t places) const noexcept {
  std::uint32_t sum = 0;
  for (; places != 0; places &= places - 1) {
    sum += shared_.places[static_cast<unsigned>(std::countr_zero(places))].progress.load(
        std::memory_order_seq_cst);
  }
  return sum << 2U >> 2U;  // as many bits as there is room for
}

bool board::show(void const* who, reason why, std::uint32_t places,
                 std::uint32_t progress) noexcept {
  std::lock_guard const guard{one_};
  bool const is_others = who_ != nullptr && who_ != who;
  if (is_others && (why_ == reason::exchange || why == reason::collective)) {
    return false;
  }
  who_ = who;
  why_ = why;
  shared_.places[place_].waiting.store(waiting_for(why, places, progress),
                                       std::memory_order_seq_cst);
  return true;
}

bool board::release() noexcept {
  std::uint64_t seen = shared_.word.load(std::memory_order_seq_cst);
  for (;;) {
    if ((seen & own_bit()) != 0) {
      return true;
    }
    auto const together = who_wait_for_each_other(seen);
    if (!together) {
      return false;
    }
    // Nobody has ceased to wait since, or the version is another one.
    if (shared_.word.compare_exchange_weak(seen, (seen + one_version) | *together,
                                           std::memory_order_seq_cst)) {
      return true;
    }
  }
}

/// The places in exchanges of those that wait for each other, this one among them. Nothing if one of them waits for
/// somebody who does not wait, or not for this one in the end: then others are let go before it.
std::optional<std::uint32_t> board::who_wait_for_each_other(std::uint64_t word) const noexcept {
  std::array<std::uint32_t, most_places> waits_for{};
  std::uint32_t exchange = 0;
  std::uint32_t all = own_bit();
  for (std::uint32_t seen = 0; seen != all;) {
    auto const place = static_cast<unsigned>(std::countr_zero(all & ~seen));
    std::uint32_t const bit = std::uint32_t{1} << place;
    std::uint64_t const waiting = shared_.places[place].waiting.load(std::memory_order_seq_cst);
    if (reason_of(waiting) == reason::none || (word & bit) != 0 ||
        progress_of(places_of(waiting)) != progress_seen(waiting)) {
      return std::nullopt;  // it is still to come, or about to go on
    }
    seen |= bit;
    exchange |= reason_of(waiting) == reason::exchange ? bit : 0;
    waits_for[place] = places_of(waiting);
    all |= waits_for[place];
  }
  std::uint32_t for_this = own_bit();
  for (std::uint32_t before = 0; before != for_this;) {
    before = for_this;
    for (unsigned place = 0; place < most_places; ++place) {
      for_this |= (waits_for[place] & before) != 0 ? std::uint32_t{1} << place : 0;
    }
  }
  return for_this == all ? std::optional{exchange} : std::nullopt;
}

bool board::take_back(void const* who) noexcept {
  std::lock_guard const guard{one_};
  if (who_ != who) {
    return false;
  }
  shared_.places[place_].waiting.store(0, std::memory_order_seq_cst);
  if ((shared_.word.fetch_add(one_version, std::memory_order_seq_cst) & own_bit()) != 0) {
    return true;
  }
  who_ = nullptr;
  return false;
}

void board::made(void const* who) noexcept {
  std::lock_guard const guard{one_};
  if (who_ != who) {
    return;
  }
  clear(shared_, place_);
  who_ = nullptr;
}

}  // namespace sluice::nccl_shim
