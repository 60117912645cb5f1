#include "damaged_pool.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/chunk_notes.hpp"
#include "memhandover/ledger/client_mailbox.hpp"
#include "memhandover/ledger/ledger_writer.hpp"
#include "random_runs.hpp"

namespace sluice::memhandover::trials {
namespace {

using namespace sluice::literals;

/// A value that breaks arithmetic more often than a random one does.
std::uint64_t nasty(std::mt19937_64& random) {
  constexpr std::array<std::uint64_t, 14> words{
      0,          1,           2,          0xff,  0xffff,    0x7fffffff,  0x80000000,
      0xffffffff, 0x100000000, 1ULL << 63, ~0ULL, ~0ULL - 1, ~0ULL << 32, 0x5555555555555555};
  return random() % 2 == 0 ? words.at(below(random, words.size())) : random();
}

void seat(ledger_view const& view, std::uint32_t slot, client_kind kind) {
  auto& entry = view.clients()[slot];
  entry.kind.store(static_cast<std::uint32_t>(kind));
  entry.pid.store(4711 + slot);
  std::string const name = "client " + std::to_string(slot);
  std::copy(name.begin(), name.end(), entry.name);
  entry.status.store(static_cast<std::uint32_t>(client_status::live));
}

/// The header's constants, as layout.hpp describes them.
struct constants {
  std::uint64_t magic;
  std::uint32_t version, client_slots;
  std::uint64_t pool_id;
  std::uint32_t backend;
  std::int32_t device;
  std::uint64_t chunk_bytes;
  std::uint32_t chunk_count, mailbox_bytes;
  std::array<std::uint8_t, 16> gpu;
};

std::uint64_t fnv1a(std::byte const* bytes, std::size_t count) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (std::size_t i = 0; i < count; ++i) {
    hash = (hash ^ static_cast<std::uint8_t>(bytes[i])) * 0x100000001b3;
  }
  return hash;
}

std::uint64_t whole_pages(std::uint64_t bytes) {
  return (bytes + 4095) / 4096 * 4096;
}

/// Lets the product's own pieces use the pool, so that every field holds what it may hold.
void use_pool(ledger_view const& view, pool_use use) {
  if (use == pool_use::unused) {
    return;
  }
  auto const count = view.header().chunk_count;
  ledger_writer writer{view};
  auto const tenants = use == pool_use::crowded ? max_clients - 1 : 2;
  for (std::uint32_t slot = 0; slot < tenants; ++slot) {
    bool const is_engine = use == pool_use::engines || (use == pool_use::crowded && slot % 3 == 0);
    seat(view, slot, is_engine ? client_kind::engine : client_kind::training);
    client_mailbox mailbox{view, slot};
    mailbox.ask(count / (tenants + 1) + 1, lifetime::lasting);
    writer.pump();
    auto const mine = mailbox.collect(count);
    chunk_notes notes{view, slot};
    notes.say(mine, slot % 2 == 0 ? "arena" : "persistent");
    mailbox.release(std::span{mine}.first(mine.size() / 2));
    if (slot % 2 == 0) {
      writer.pump();
    }
    view.mailbox(slot).arena_chunks.store(static_cast<std::uint32_t>(mine.size()));
  }
  if (use != pool_use::training) {
    auto const slot = max_clients - 1;
    seat(view, slot, client_kind::server);
    view.header().serving_now.store(1);
    view.header().run_ahead_ns.store(200'000);
    chunk_notes notes{view, slot};
    auto const taken = writer.take(count / 3 + 1, static_cast<std::uint16_t>(slot));
    notes.say(taken, "model a");
    notes.say(std::span{taken}.first(taken.size() / 2), "model b");
    writer.demand(0, 3);
    for (std::uint64_t seq = 1; seq <= 3; ++seq) {
      view.header().recent[seq].total_ns.store(1000 * seq);
      view.header().recent[seq].seq.store(seq);
    }
  }
}

unique_fd scratch_file() {
  unique_fd fd{::memfd_create("damaged", MFD_CLOEXEC)};
  if (!fd) {
    throw std::runtime_error{"cannot create shared memory for a damaged segment"};
  }
  return fd;
}

}  // namespace

void damaged_pool::segment::restore() {
  for (auto const at : damaged) {
    std::memcpy(map.data() + at, whole.data() + at, sizeof(std::uint64_t));
  }
  damaged.clear();
}

void damaged_pool::segment::set_word(std::size_t at, std::uint64_t value) {
  at = std::min(at, whole.size() - sizeof value);
  std::memcpy(map.data() + at, &value, sizeof value);
  damaged.push_back(at);
}

std::uint64_t damaged_pool::segment::word(std::size_t at) const {
  std::uint64_t value = 0;
  std::memcpy(&value, map.data() + std::min(at, whole.size() - sizeof value), sizeof value);
  return value;
}

damaged_pool::damaged_pool(std::uint32_t chunk_count, pool_use use)
    : files_(create_ledger({backend_kind::host, -1, 2_MiB, chunk_count})),
      twin_files_(create_ledger({backend_kind::host, -1, 2_MiB, chunk_count})),
      twin_(twin_files_.ledger.get(), twin_files_.mailroom.get(),
            shared_segment::access::read_only) {
  use_pool({files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write}, use);
  auto copy = [](segment& of, int fd) {
    of.map = shared_segment{fd, shared_segment::access::read_write};
    of.whole.assign(of.map.data(), of.map.data() + of.map.bytes());
    of.resized = scratch_file();
  };
  copy(ledger_, files_.ledger.get());
  copy(mailroom_, files_.mailroom.get());
}

int damaged_pool::ledger_fd() const noexcept {
  return ledger_bytes_ ? ledger_.resized.get() : files_.ledger.get();
}
int damaged_pool::mailroom_fd() const noexcept {
  return mailroom_bytes_ ? mailroom_.resized.get() : files_.mailroom.get();
}

std::size_t damaged_pool::ledger_offset(void const* in_twin) const {
  return static_cast<std::size_t>(static_cast<std::byte const*>(in_twin) -
                                  reinterpret_cast<std::byte const*>(&twin_.header()));
}
std::size_t damaged_pool::mailroom_offset(void const* in_twin) const {
  return static_cast<std::size_t>(static_cast<std::byte const*>(in_twin) -
                                  reinterpret_cast<std::byte const*>(&twin_.mailbox(0)));
}

void damaged_pool::damage(std::mt19937_64& random) {
  ledger_bytes_.reset();
  mailroom_bytes_.reset();
  // Who reads a damaged pool may write all of the ledger, of the mailroom the requests and rings.
  std::memcpy(ledger_.map.data(), ledger_.whole.data(), ledger_.whole.size());
  ledger_.damaged.clear();
  mailroom_.restore();
  for (auto places = below(random, 9); places > 0; --places) {
    damage_place(random);
  }
  if (random() % 32 == 0) {
    damage_header(random);
  }
  if (random() % 64 == 0) {
    damage_size(random);
  }
}

void damaged_pool::damage_place(std::mt19937_64& random) {
  auto& where = random() % 2 == 0 ? ledger_ : mailroom_;
  auto const anywhere = below(random, where.whole.size());
  switch (random() % 8) {
    case 0:
      where.set_word(anywhere, where.word(anywhere) ^ 1ULL << (random() % 64));
      break;
    case 1:
      where.set_word(anywhere / 8 * 8, nasty(random));
      break;
    case 2:
    case 3:
    case 4:
      damage_ledger(random);
      break;
    default:
      damage_mailbox(random);
  }
}

/// One constant of the header, with a checksum that fits as often as not.
void damaged_pool::damage_header(std::mt19937_64& random) {
  auto const at = below(random, sizeof(constants) / 4 + 2) * 4;
  ledger_.set_word(at,
                   random() % 2 == 0 ? ledger_.word(at) ^ 1ULL << (random() % 32) : nasty(random));
  if (random() % 2 == 0) {
    ledger_.set_word(sizeof(constants), fnv1a(ledger_.map.data(), sizeof(constants)));
  }
}

void damaged_pool::damage_text(segment& where, std::size_t at, std::size_t bytes,
                               std::mt19937_64& random) {
  auto const kind = random() % 3;
  for (std::size_t i = 0; i < bytes; i += 8) {
    where.set_word(at + i, kind == 0   ? 0x7878787878787878  // no zero byte
                           : kind == 1 ? random() | 0x0101010101010101
                                       : 0x0101010101010101);
  }
}

void damaged_pool::damage_ledger(std::mt19937_64& random) {
  auto const chunk = below(random, twin_.header().chunk_count);
  auto const slot = below(random, max_clients);
  auto& entry = twin_.clients()[slot];
  auto& control = twin_.controls()[slot];
  auto& header = twin_.header();
  auto at = [&](void const* address) { return ledger_offset(address); };
  switch (random() % 10) {
    case 9:  // side by side as well
      ledger_.set_word(at(&entry.rank), nasty(random));
      break;
    case 0:
    case 1:
    case 2: {
      chunk_state const state{
          static_cast<owner>(below(random, random() % 2 == 0 ? 6 : 256)), random() % 2 == 0,
          static_cast<std::uint16_t>(random() % (random() % 2 == 0 ? 40 : 65536)),
          static_cast<std::uint32_t>(nasty(random))};
      ledger_.set_word(at(&twin_.chunks()[chunk]), state.pack());
      break;
    }
    case 3:  // status and kind, which stand side by side
      ledger_.set_word(at(&entry.status), (random() % 5) << 32U | random() % 4);
      break;
    case 4:
      damage_text(ledger_, at(entry.name), sizeof entry.name, random);
      break;
    case 5:
      damage_text(ledger_, at(entry.endpoint), sizeof entry.endpoint, random);
      break;
    case 6:
      ledger_.set_word(at(random() % 2 == 0 ? &control.mail_read : &control.grant), nasty(random));
      break;
    case 7: {
      auto& recent = header.recent[below(random, recent_handovers)];
      ledger_.set_word(at(&recent.seq), nasty(random));
      ledger_.set_word(at(&recent.total_ns), nasty(random));
      break;
    }
    default:
      ledger_.set_word(at(random() % 2 == 0 ? static_cast<void*>(&header.writer)
                                            : static_cast<void*>(&header.grantable)),
                       nasty(random));
  }
}

void damaged_pool::damage_mailbox(std::mt19937_64& random) {
  auto const slot = below(random, max_clients);
  auto const chunk = below(random, twin_.header().chunk_count);
  auto& mailbox = twin_.mailbox(slot);
  auto at = [&](void const* address) { return mailroom_offset(address); };
  switch (random() % 8) {
    case 0:
      mailroom_.set_word(at(&mailbox.mail_written), nasty(random));
      break;
    case 1:
      mailroom_.set_word(at(&mailbox.request), nasty(random));
      break;
    case 2: {
      auto const ring = twin_.mail_ring(slot);
      auto const state = chunk_state::unpack(ledger_.word(ledger_offset(&twin_.chunks()[chunk])));
      mailroom_.set_word(
          at(&ring[below(random, ring.size())]),
          random() % 2 == 0 ? release_mail{chunk, state.epoch}.pack() : nasty(random));
      break;
    }
    case 3:
      mailroom_.set_word(at(&twin_.chunk_notes(slot)[chunk]), nasty(random));
      break;
    case 4:
      mailroom_.set_word(at(&twin_.promises(slot)[chunk]), nasty(random));
      break;
    case 5:
      mailroom_.set_word(at(&mailbox.demand_chosen), nasty(random));
      break;
    case 6:
      damage_text(mailroom_, at(twin_.note_texts(slot)[below(random, 4)].text),
                  sizeof(note_text::text), random);
      break;
    default:
      mailroom_.set_word(at(&mailbox.arena_chunks), nasty(random));
  }
}

/// One of the segments becomes shorter or longer, page by page or byte by byte.
void damaged_pool::damage_size(std::mt19937_64& random) {
  bool const of_ledger = random() % 2 == 0;
  auto& where = of_ledger ? ledger_ : mailroom_;
  auto const now = where.whole.size();
  std::size_t const page = 4096;
  auto const bytes = random() % 4 == 0   ? below(random, 300)
                     : random() % 3 == 0 ? below(random, 2 * now)
                     : random() % 2 == 0 ? now + page
                                         : now - page;
  if (::ftruncate(where.resized.get(), 0) != 0 ||
      ::ftruncate(where.resized.get(), static_cast<off_t>(bytes)) != 0 ||
      ::pwrite(where.resized.get(), where.map.data(), std::min<std::size_t>(bytes, now), 0) < 0) {
    throw std::runtime_error{"cannot resize a damaged segment"};
  }
  (of_ledger ? ledger_bytes_ : mailroom_bytes_) = bytes;
}

bool damaged_pool::opens_as_before() const {
  return !ledger_bytes_ && !mailroom_bytes_ &&
         std::memcmp(ledger_.map.data(), ledger_.whole.data(),
                     sizeof(constants) + sizeof(std::uint64_t)) == 0;
}

std::optional<std::string> damaged_pool::refusal() const {
  auto const ledger_size = ledger_bytes_.value_or(ledger_.whole.size());
  auto const mailroom_size = mailroom_bytes_.value_or(mailroom_.whole.size());
  if (ledger_size == 0 || mailroom_size == 0) {
    return "empty";
  }
  if (ledger_size < sizeof(ledger_header)) {
    return "too few for a header";
  }
  constants now{};
  constants before{};
  std::memcpy(&now, ledger_.map.data(), sizeof now);
  std::memcpy(&before, ledger_.whole.data(), sizeof before);
  if (now.magic != before.magic) {
    return "magic number";
  }
  if (now.version != before.version) {
    return "version";
  }
  if (fnv1a(ledger_.map.data(), sizeof now) != ledger_.word(sizeof now)) {
    return "checksum";
  }
  if (now.client_slots != before.client_slots) {
    return "client slots";
  }
  if (now.backend != 1 && now.backend != 2) {
    return "backend";
  }
  if (now.chunk_bytes == 0 || now.chunk_count == 0) {
    return "without memory";
  }
  // Another count may by chance take as many pages: such a pool is as good as this one.
  std::uint64_t const count = now.chunk_count;
  auto const words_at = ledger_offset(twin_.chunks().data());
  if (ledger_size != whole_pages(words_at + 8 * count)) {
    return "ledger has";
  }
  std::uint64_t ring = 16;
  while (ring < count) {
    ring *= 2;
  }
  auto const notes_end = sizeof(mailbox_header) + 8 * ring + 255 * 48 + 2 * count;
  auto const promises_end = (notes_end + 3) / 4 * 4 + 4 * count;
  auto const mailbox = whole_pages((promises_end + 63) / 64 * 64 + 2048 * 128);  // with the history
  return now.mailbox_bytes != mailbox || mailroom_size != 32 * mailbox
             ? std::optional<std::string>{"mailroom has"}
             : std::nullopt;
}

}  // namespace sluice::memhandover::trials
