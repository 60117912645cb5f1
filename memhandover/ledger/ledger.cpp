#include "memhandover/ledger/ledger.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <new>
#include <string>

#include "memhandover/base/error.hpp"
#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/ledger/manifest.hpp"

namespace sluice::memhandover {
namespace {

constexpr std::size_t page = 4096;

constexpr std::size_t round_up(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}

std::size_t clients_offset() {
  return round_up(sizeof(ledger_header), 64);
}
std::size_t controls_offset() {
  return clients_offset() + max_clients * sizeof(client_entry);
}
std::size_t chunks_offset() {
  return controls_offset() + max_clients * sizeof(client_control);
}

std::size_t ledger_bytes(std::uint32_t chunk_count) {
  return round_up(chunks_offset() + chunk_count * sizeof(std::uint64_t), page);
}

std::size_t ring_capacity(std::uint32_t chunk_count) {
  return std::bit_ceil(std::max<std::size_t>(chunk_count, 16));
}

std::size_t texts_offset(std::uint32_t chunk_count) {
  return sizeof(mailbox_header) + ring_capacity(chunk_count) * sizeof(std::uint64_t);
}
std::size_t notes_offset(std::uint32_t chunk_count) {
  return texts_offset(chunk_count) + max_note_texts * sizeof(note_text);
}

std::size_t promises_offset(std::uint32_t chunk_count) {
  return round_up(notes_offset(chunk_count) + chunk_count * sizeof(std::uint16_t),
                  alignof(std::atomic<std::uint32_t>));
}

std::size_t history_offset(std::uint32_t chunk_count) {
  return round_up(promises_offset(chunk_count) + chunk_count * sizeof(std::uint32_t),
                  alignof(history_entry));
}

std::size_t mailbox_size(std::uint32_t chunk_count) {
  return round_up(history_offset(chunk_count) + history_entries * sizeof(history_entry), page);
}

/// FNV-1a over the constant part of the header.
std::uint64_t checksum_of(ledger_header const& header) {
  auto const* bytes = reinterpret_cast<unsigned char const*>(&header);
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::size_t i = 0; i < offsetof(ledger_header, checksum); ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3;
  }
  return hash;
}

unique_fd make_memfd(std::string const& name, std::size_t bytes) {
  unique_fd fd{::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw_system_error("cannot create shared memory of " + std::to_string(bytes) +
                       " bytes for the " + name);
  }
  // A reader that maps the segment must never see it shrink under its feet.
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_system_error("cannot seal the " + name);
  }
  return fd;
}

unique_fd reopen(int fd, int flags) {
  auto const path = "/proc/self/fd/" + std::to_string(fd);
  unique_fd again{::open(path.c_str(), flags | O_CLOEXEC)};
  if (!again) {
    throw_system_error("cannot open a second descriptor of the ledger");
  }
  return again;
}

}  // namespace

shared_segment::shared_segment(int fd, access how) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) {
    throw_system_error("cannot read the size of a shared segment");
  }
  bytes_ = static_cast<std::size_t>(status.st_size);
  if (bytes_ == 0) {
    throw error{error_kind::internal, "a shared segment of the pool is empty"};
  }
  int const protection = how == access::read_only ? PROT_READ : PROT_READ | PROT_WRITE;
  void* address = ::mmap(nullptr, bytes_, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    throw_system_error("cannot map a shared segment of " + std::to_string(bytes_) + " bytes");
  }
  data_ = static_cast<std::byte*>(address);
}

shared_segment& shared_segment::operator=(shared_segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

shared_segment::~shared_segment() {
  if (data_ != nullptr) {
    ::munmap(data_, bytes_);
  }
}

ledger_view::ledger_view(int ledger_fd, int mailroom_fd, shared_segment::access how)
    : ledger_(ledger_fd, how), mailroom_(mailroom_fd, shared_segment::access::read_write) {
  auto refuse = [](std::string const& why) {
    throw error{error_kind::internal, "the pool's ledger cannot be used: " + why};
  };
  if (ledger_.bytes() < sizeof(ledger_header)) {
    refuse("it has " + std::to_string(ledger_.bytes()) + " bytes, too few for a header");
  }
  header_ = std::launder(reinterpret_cast<ledger_header*>(ledger_.data()));
  if (header_->magic != ledger_magic) {
    refuse("it does not begin with the ledger's magic number");
  }
  if (header_->version != layout_version) {
    refuse("its layout is version " + std::to_string(header_->version) +
           ", this program knows version " + std::to_string(layout_version) +
           "; end the programs that use the pool and start them again");
  }
  if (header_->checksum != checksum_of(*header_)) {
    refuse("the checksum of its header is wrong");
  }
  if (header_->client_slots != max_clients) {
    refuse("its header counts " + std::to_string(header_->client_slots) +
           " client slots, this program " + std::to_string(max_clients));
  }
  if (header_->backend != static_cast<std::uint32_t>(backend_kind::host) &&
      header_->backend != static_cast<std::uint32_t>(backend_kind::cuda)) {
    refuse("its header names backend " + std::to_string(header_->backend) +
           ", which this program does not know");
  }
  auto const count = header_->chunk_count;
  auto const chunks = std::to_string(count) + " chunks of " + std::to_string(header_->chunk_bytes) +
                      " bytes in its header";
  if (count == 0 || header_->chunk_bytes == 0) {
    refuse("the " + chunks + " make a pool without memory");
  }
  if (ledger_.bytes() != ledger_bytes(count)) {
    refuse("the ledger has " + std::to_string(ledger_.bytes()) + " bytes, but the " + chunks +
           " need " + std::to_string(ledger_bytes(count)));
  }
  if (header_->mailbox_bytes != mailbox_size(count) ||
      mailroom_.bytes() != mailbox_size(count) * max_clients) {
    refuse("the mailroom has " + std::to_string(mailroom_.bytes()) + " bytes in mailboxes of " +
           std::to_string(header_->mailbox_bytes) + ", but the " + chunks + " need " +
           std::to_string(mailbox_size(count) * max_clients));
  }
  shape_ = {static_cast<backend_kind>(header_->backend), header_->device, header_->chunk_bytes,
            count};
  std::copy(std::begin(header_->gpu), std::end(header_->gpu), shape_.gpu.begin());
  chunks_ = {
      std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(ledger_.data() + chunks_offset())),
      count};
}

std::span<client_entry> ledger_view::clients() const noexcept {
  return {std::launder(reinterpret_cast<client_entry*>(ledger_.data() + clients_offset())),
          max_clients};
}

std::span<client_control> ledger_view::controls() const noexcept {
  return {std::launder(reinterpret_cast<client_control*>(ledger_.data() + controls_offset())),
          max_clients};
}

std::byte* ledger_view::mailbox_at(std::uint32_t slot) const noexcept {
  return mailroom_.data() + static_cast<std::size_t>(slot) * header().mailbox_bytes;
}

mailbox_header& ledger_view::mailbox(std::uint32_t slot) const noexcept {
  return *std::launder(reinterpret_cast<mailbox_header*>(mailbox_at(slot)));
}

std::span<std::atomic<std::uint64_t>> ledger_view::mail_ring(std::uint32_t slot) const noexcept {
  auto* at = mailbox_at(slot) + sizeof(mailbox_header);
  return {std::launder(reinterpret_cast<std::atomic<std::uint64_t>*>(at)),
          ring_capacity(header().chunk_count)};
}

std::span<note_text> ledger_view::note_texts(std::uint32_t slot) const noexcept {
  auto* at = mailbox_at(slot) + texts_offset(header().chunk_count);
  return {std::launder(reinterpret_cast<note_text*>(at)), max_note_texts};
}

std::span<std::atomic<std::uint16_t>> ledger_view::chunk_notes(std::uint32_t slot) const noexcept {
  auto* at = mailbox_at(slot) + notes_offset(header().chunk_count);
  return {std::launder(reinterpret_cast<std::atomic<std::uint16_t>*>(at)), header().chunk_count};
}

std::span<std::atomic<std::uint32_t>> ledger_view::promises(std::uint32_t slot) const noexcept {
  auto* at = mailbox_at(slot) + promises_offset(header().chunk_count);
  return {std::launder(reinterpret_cast<std::atomic<std::uint32_t>*>(at)), header().chunk_count};
}

std::span<history_entry> ledger_view::history(std::uint32_t slot) const noexcept {
  auto* at = mailbox_at(slot) + history_offset(header().chunk_count);
  return {std::launder(reinterpret_cast<history_entry*>(at)), history_entries};
}

std::string ledger_name(std::uint64_t pool_id) {
  return "sluice-ledger-" + hexadecimal(pool_id);
}
std::string mailroom_name(std::uint64_t pool_id) {
  return "sluice-mailroom-" + hexadecimal(pool_id);
}

std::string hexadecimal(std::uint64_t pool_id) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(pool_id));
  return text.data();
}

pool_files create_ledger(pool_shape const& shape) {
  std::uint64_t pool_id = 0;
  if (::getrandom(&pool_id, sizeof pool_id, 0) != sizeof pool_id) {
    throw_system_error("cannot draw the pool's number");
  }
  pool_files files;
  files.ledger = make_memfd(ledger_name(pool_id), ledger_bytes(shape.chunk_count));
  files.mailroom =
      make_memfd(mailroom_name(pool_id), mailbox_size(shape.chunk_count) * max_clients);
  files.manifest =
      make_memfd("sluice-manifest-" + hexadecimal(pool_id), manifest_bytes(shape.chunk_count));
  files.doorbell = unique_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!files.doorbell) {
    throw_system_error("cannot create the doorbell");
  }
  shared_segment segment{files.ledger.get(), shared_segment::access::read_write};
  // Fresh memfd pages are zero, which is the empty state of every atomic behind the header.
  auto* header = new (segment.data()) ledger_header{};
  header->magic = ledger_magic;
  header->version = layout_version;
  header->client_slots = max_clients;
  header->pool_id = pool_id;
  header->backend = static_cast<std::uint32_t>(shape.backend);
  header->device = shape.device;
  header->chunk_bytes = shape.chunk_bytes;
  header->chunk_count = shape.chunk_count;
  header->mailbox_bytes = static_cast<std::uint32_t>(mailbox_size(shape.chunk_count));
  std::copy(shape.gpu.begin(), shape.gpu.end(), std::begin(header->gpu));
  header->checksum = checksum_of(*header);
  header->writer.store(1ULL << 16U | broker_slot);
  header->grantable.store(shape.chunk_count);
  return files;
}

std::optional<std::chrono::nanoseconds> published_run_ahead(ledger_header const& header) noexcept {
  constexpr auto longest =
      static_cast<std::uint64_t>(std::chrono::nanoseconds{longest_run_ahead}.count());
  auto const bound = header.run_ahead_ns.load(std::memory_order_relaxed);
  if (header.serving_now.load() == 0 || bound == 0 || bound > longest) {
    return std::nullopt;
  }
  return std::chrono::nanoseconds{static_cast<std::int64_t>(bound)};
}

void forget_wishes(ledger_header& header) noexcept {
  header.pause_until_ns.store(0);
  header.announced_until_ns.store(0);
  header.run_ahead_ns.store(0);
}

unique_fd make_event() {
  auto event = beside_standard_streams(unique_fd{::eventfd(0, EFD_CLOEXEC)});
  if (!event) {
    throw system_error("cannot create an event to stop a thread by");
  }
  return event;
}

unique_fd reopen_read_only(int fd) {
  return reopen(fd, O_RDONLY);
}
unique_fd reopen_read_write(int fd) {
  return reopen(fd, O_RDWR);
}

std::int64_t monotonic_ns() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace sluice::memhandover
