/// The shared memory of a pool, byte for byte: the ledger, and the mailroom with one mailbox a
/// client.
///
/// Three segments, so that a reader cannot write what is not his:
///
///   ledger    header | client entries | client controls | chunk words
///             written by broker and writer, read by all
///   mailroom  mailbox 0 | mailbox 1 | …
///             each written by its client, read by the writer; the byte with a slot's number is locked
///             (F_OFD_SETLK) while a process lives that is in that slot, or was forked from it
///   manifest  what the server's memory holds (manifest.hpp)
///             written by the server, read by its successor
///
/// The *writer* of the ledger is one process at a time, the server while it lives and otherwise the
/// broker; the header's `writer` word names it. Every change is one atomic store that is valid by
/// itself, and a mailbox message is taken by storing the chunk's new word before the message is
/// counted as read; a message carries the epoch of the ownership that it gives up, so taking it
/// twice has no effect. A writer may therefore die between any two instructions, and its successor
/// goes on from the same shared memory without a log to replay.
///
/// Only the header's constants have a checksum. A chunk's word with a checksum beside it would be
/// two stores, and a writer that dies between them would leave a chunk that nobody may believe; a
/// single word is never half written. Against damage readers check every owner, slot, index, count
/// and text that they take from shared memory, and a release counts only in the epoch it names.
///
/// States of a chunk (owner in its word; every change also adds one to the epoch, but for the last
/// line, which changes hands and leaves the contents as they are):
///
///   free or dirty ──grant──► training or engine ──released──► dirty
///   free or dirty ──take──► serving ──give back──► dirty
///   training, engine, serving, left ──owner dead, nobody wants it──► dirty
///   serving ──server dead──► serving of nobody (left) ──claim──► serving of the next server
///
/// No chunk goes from one owner to another but by way of free or dirty. Training and engines are *tenants*: a chunk is
/// granted to them on their request, theirs as their kind's owner says, and given up by mail, on their own account or
/// because the writer has demanded it. What the kinds may do otherwise is data (client_kinds.hpp).
///
/// Dirty: old contents, to be scrubbed by whoever gives it to a tenant or gets it there.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace sluice::memhandover {

inline constexpr std::uint64_t ledger_magic = 0x31474c4543494c53;  // "SLICELG1"
inline constexpr std::uint32_t layout_version = 22;
inline constexpr std::uint32_t max_clients = 32;
inline constexpr std::uint32_t broker_slot = 0xffff;
inline constexpr std::uint16_t left_slot = 0xfffe;  ///< serving, but its server is dead
inline constexpr std::uint32_t recent_handovers = 256;
inline constexpr std::uint32_t max_note_texts = 255;
inline constexpr std::uint32_t history_entries = 2048;
inline constexpr std::uint32_t no_chunk = 0xffffffff;
inline constexpr std::uint32_t whole_in_ppm = 1'000'000;

enum class owner : std::uint8_t { free = 0, dirty = 1, training = 2, serving = 3, engine = 4 };
inline constexpr std::size_t owner_count = 5;

/// Somebody's. A damaged word may say neither this nor that it is free.
[[nodiscard]] constexpr bool is_owned(owner who) noexcept {
  return who == owner::training || who == owner::serving || who == owner::engine;
}
/// A tenant's: granted on its request, and given up by its mail.
[[nodiscard]] constexpr bool is_tenants(owner who) noexcept {
  return is_owned(who) && who != owner::serving;
}

/// A chunk's word: who owns it since which epoch, and whether its contents are another owner's.
struct chunk_state {
  owner who = owner::free;
  bool needs_scrub = false;  ///< granted while dirty: the receiver zeroes it before use
  std::uint16_t client = 0;  ///< slot of the owner; meaningful where `is_owned`
  std::uint32_t epoch = 0;

  /// Nobody's, though it may hold old contents.
  [[nodiscard]] constexpr bool is_free() const noexcept {
    return who == owner::free || who == owner::dirty;
  }
  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return static_cast<std::uint64_t>(epoch) << 32U | static_cast<std::uint64_t>(client) << 16U |
           (needs_scrub ? 1ULL << 8U : 0ULL) | static_cast<std::uint64_t>(who);
  }
  [[nodiscard]] static constexpr chunk_state unpack(std::uint64_t word) noexcept {
    return {static_cast<owner>(word & 0xffU), (word >> 8U & 1U) != 0,
            static_cast<std::uint16_t>(word >> 16U & 0xffffU),
            static_cast<std::uint32_t>(word >> 32U)};
  }
};

/// Two 32-bit numbers that change together: a sequence number and a count of chunks.
struct numbered {
  std::uint32_t seq = 0;
  std::uint32_t chunks = 0;

  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return static_cast<std::uint64_t>(seq) << 32U | chunks;
  }
  [[nodiscard]] static constexpr numbered unpack(std::uint64_t word) noexcept {
    return {static_cast<std::uint32_t>(word >> 32U), static_cast<std::uint32_t>(word)};
  }
};

/// A request for chunks that stay: bit of `numbered::chunks` in `mailbox_header::request`. They come
/// from the pool's end, the others from its beginning, so that what training can give back lies
/// together.
inline constexpr std::uint32_t request_lasting = 1U << 31U;
/// A request of a commit, for whose end a demand may be waiting: it is granted what the server has reserved
/// or is waiting for, too. Of a client whose kind has no commits it says nothing.
inline constexpr std::uint32_t request_before_demands = 1U << 30U;
/// A request that is granted whole, or not at all; beyond what others need to come back, but not what this
/// client does (`client_report::parked_chunks`).
inline constexpr std::uint32_t request_whole = 1U << 29U;
/// A request of who would otherwise go without for good: it is granted what is kept for cold starts, too, but not what the server is
/// waiting for.
inline constexpr std::uint32_t request_beyond_reserve = 1U << 28U;

/// A demand for which nothing is parked: bit of `numbered::chunks` in `client_control::demand`.
inline constexpr std::uint32_t demand_without_parking = 1U << 31U;

/// One finished handover, as `sluice status` shows it. Times in nanoseconds from the demand.
struct handover_entry {
  std::atomic<std::uint64_t> seq;  ///< 1 for the first; 0: the place is unused
  std::atomic<std::uint64_t> bytes;
  std::atomic<std::uint64_t> notify_ns, gate_ns, drain_ns, revoke_ns, ledger_ns, map_ns, total_ns;
  /// Of these, where jobs were parked for it: until the gates were closed to all, the devices idle, enough chunks gone.
  std::atomic<std::uint64_t> parked_bytes, park_closing_ns, park_idle_ns, park_out_ns;
};

struct ledger_header {
  // Constant after creation; `checksum` covers what stands before it.
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t client_slots;
  std::uint64_t pool_id;
  std::uint32_t backend;
  std::int32_t device;
  std::uint64_t chunk_bytes;
  std::uint32_t chunk_count;
  std::uint32_t mailbox_bytes;
  std::uint8_t gpu[16];  ///< the GPU's UUID; zero on the host
  std::uint64_t checksum;

  /// {generation: 48, slot: 16}. Written by the broker, which alone appoints.
  alignas(64) std::atomic<std::uint64_t> writer;

  // Written by the writer.
  alignas(64) std::atomic<std::uint64_t> pause_until_ns;  ///< CLOCK_MONOTONIC; launches are held
                                                          ///< until then; 0: not
  std::atomic<std::uint64_t>
      announced_until_ns;  ///< CLOCK_MONOTONIC; until then a launch of the server's is
                           ///< expected; 0: none
  std::atomic<std::uint32_t> grantable;            ///< chunks that tenants may ask for at present
  std::atomic<std::uint32_t> grantable_to_parked;  ///< the same, of who is parked, for coming back
  std::atomic<std::uint32_t>
      park_stay;  ///< tenants may be parked, and stay then at least so many times as long as
                  ///< going and coming takes; 0: they may not
  std::atomic<std::uint32_t> resident_ppm;  ///< of every window of `resident_window_ns`, who is
                                            ///< parked is to be resident; 0: there is no such share
  std::atomic<std::uint64_t> resident_window_ns;
  std::atomic<std::uint32_t> serving_now;    ///< 1 while a server is attached
  std::atomic<std::uint64_t> left_until_ns;  ///< CLOCK_MONOTONIC; until then what a dead server has
                                             ///< left waits for the next one
  std::atomic<std::uint64_t> run_ahead_ns;   ///< how much predicted work a stream of training may
                                             ///< have on the device; 0: the server has not said
  std::atomic<std::uint64_t> handovers;
  std::atomic<std::uint64_t> bytes_to_serving;
  std::atomic<std::uint64_t> bytes_to_training;
  std::atomic<std::uint64_t> bytes_to_engines;
  handover_entry recent[recent_handovers];
};

enum class client_kind : std::uint32_t { training = 1, server = 2, engine = 3 };
enum class client_status : std::uint32_t { empty = 0, live = 1, gone = 2 };

/// Which training jobs demands are met by first: those of the lowest.
enum class priority : std::uint32_t { low = 1, normal = 2, high = 3 };

inline constexpr std::uint64_t until_woken = ~std::uint64_t{0};

/// Why nothing that a client keeps is parked, whatever there is in host copies.
enum class unparkable : std::uint32_t {
  none = 0,
  never = 1,           ///< it has been started so
  communicators = 2,   ///< of NCCL, whose ranks do not agree: devices wait for each other
  no_host_copies = 3,  ///< the broker keeps none for it
  pinning = 4,         ///< not yet: it makes them pinned memory
  refused = 5  ///< the driver has refused that, or the system what parking on the host needs
};

/// Where the memory of a client that lasts is.
enum class park_state : std::uint32_t {
  resident = 0,
  closing = 1,  ///< its gate, and until the device is proven idle
  going = 2,
  parked = 3,
  coming_back = 4
};

/// Who a client is. Written by the broker; the texts are set before `status` becomes `live`.
struct alignas(64) client_entry {
  std::atomic<std::uint32_t> status;
  std::atomic<std::uint32_t> kind;
  std::atomic<std::uint32_t> pid;          ///< as the process knows itself
  std::atomic<std::uint64_t> start_ticks;  ///< start time of the process, tells a reused pid apart
  /// Inode of the namespace that the pid is of; 0: not known.
  std::atomic<std::uint64_t> pid_namespace;
  std::atomic<std::uint64_t> life_inode;  ///< inode of the pipe that its descendants hold
  /// CLOCK_MONOTONIC; until then an operator wants it parked (`sluice park`); 0: not, `until_woken`: until it is woken.
  /// Past, and another value than before: it has been woken then.
  std::atomic<std::uint64_t> held_until_ns;
  std::atomic<std::uint32_t>
      in_use;  ///< 1: an engine that answers requests now, as its server says
  // What a training job has before others (standing.hpp).
  std::atomic<std::uint32_t> rank;          ///< `priority`
  std::atomic<std::uint32_t> least_chunks;  ///< that no demand takes
  char name[48];
  char endpoint[64];
};

/// What the writer tells one client. Written by the writer.
struct alignas(64) client_control {
  /// `numbered`: give up so many chunks; a newer number replaces an older one. See `demand_without_parking`.
  std::atomic<std::uint64_t> demand;
  std::atomic<std::uint64_t> grant;      ///< `numbered`: answer to the request of that number
  std::atomic<std::uint64_t> mail_read;  ///< messages of the client's mailbox that have been taken
  std::atomic<std::uint32_t> refused;  ///< most chunks at once that the server went without, since
                                       ///< clients keep the rest for good; 0: none
};

/// Work that takes a GPU longer than the bound of run-ahead, as last predicted; 0 times: the place is
/// unused.
struct long_unit_entry {
  std::atomic<std::uint64_t> nanoseconds, times;
  std::atomic<std::uint64_t> name[15];  ///< see shared_text.hpp
};
inline constexpr std::size_t max_long_units = 8;

/// What a client says of itself. The slot's next owner begins with zeros.
struct alignas(64) client_report {
  // Phases of that answer, CLOCK_MONOTONIC nanoseconds; `unit_ended_ns`: see `demand_answer`.
  std::atomic<std::int64_t> awake_ns, closed_ns, unit_ended_ns, idle_ns, released_ns;
  std::atomic<std::uint32_t> live_chunks;  ///< of that answer: from a micro-batch that was running
  // For `sluice status`.
  std::atomic<std::uint64_t> run_ahead_ns;  ///< the bound that the job keeps; 0: none
  std::atomic<std::uint32_t> micro_batch, global_batch;
  std::atomic<std::uint64_t> samples, commits, discards;
  std::atomic<std::uint64_t> discarded_ns;  ///< what discarded micro-batches have run for in vain
  std::atomic<std::uint32_t> arena_chunks;  ///< revocable; `spare_chunks` of them are not in use
  std::atomic<std::uint32_t> spare_chunks, persistent_chunks;
  std::atomic<std::uint32_t> waiting;      ///< 1 while it waits for memory
  std::atomic<std::uint32_t> kept_chunks;  ///< that no demand gets, but by parking
  /// That it needs to come back. The writer grants them to no other tenant.
  std::atomic<std::uint32_t> parked_chunks;
  std::atomic<std::uint32_t> parked_dirty,
      parked_clean;                        ///< of those: copied; as a copy that was there already
  std::atomic<std::uint32_t> parked_disk;  ///< of both: on the disk
  std::atomic<std::int32_t>
      disk_fault;  ///< errno of the write by which it came to use that no more; 0: it does
  std::atomic<std::uint32_t>
      parkable_chunks;                        ///< of what is in use, host copies could take so many
  std::atomic<std::uint32_t> why_unparkable;  ///< `unparkable`
  std::atomic<std::uint32_t> where_parked;    ///< `park_state`
  std::atomic<std::int64_t> longest_absence_ns;  ///< others wait for it; 0: there is no such bound
  std::atomic<std::uint32_t> obeys;          ///< 1: all has gone that can, as an operator wants it
  std::atomic<std::int64_t> away_since_ns;   ///< CLOCK_MONOTONIC; 0: it is resident
  std::atomic<std::int64_t> stays_until_ns;  ///< CLOCK_MONOTONIC; until then none of them go
  std::atomic<std::uint64_t> parks;          ///< times that it has been
  std::atomic<std::uint64_t> park_ns, unpark_ns,
      parked_ns;  ///< in all: going, coming, and being away, without the present time
  /// CLOCK_MONOTONIC; from then on what it needs to come back is kept for it, and the server gives back what it has of it;
  /// another value each time that it has had it in between. 0: nobody waits for it, or there is no share.
  std::atomic<std::int64_t> owed_ns;
  /// Of an engine that is resident: an allocation waits for so many more, which are owed to it likewise.
  std::atomic<std::uint32_t> short_chunks;
  /// 1: an engine's whose memory comes and goes by the chunk (client/elastic_space.hpp): what goes by an order is not copied.
  std::atomic<std::uint32_t> elastic;
  std::atomic<std::uint64_t> used_bytes;     ///< of that memory, what requests use now
  std::atomic<std::int64_t> waits_since_ns;  ///< somebody waits for what is parked; 0: nobody
  std::atomic<std::int64_t> looked_ns;       ///< when it has looked for that last
  /// Of a job that cannot go on without them (job_needs.hpp), until then, CLOCK_MONOTONIC.
  std::atomic<std::int64_t> needed_until_ns;
  std::atomic<std::uint32_t> needed_chunks;
  std::atomic<std::uint64_t> window_ns,
      window_away_ns;                    ///< of the last such window, in which it was parked
  std::atomic<std::uint64_t> missed_ns;  ///< in all: back later than its share says
  // Of the last time that something of it went, CLOCK_MONOTONIC; written before the first chunk goes, `park_idle_ns` last.
  std::atomic<std::int64_t> park_began_ns, park_closed_ns, park_idle_ns;
  std::atomic<std::uint32_t> park_chunks;  ///< that have gone since then, and one that is about to
  /// Of those: nothing lives in them, but beyond them something does. Looked for every 100 ms.
  std::atomic<std::uint32_t> stranded_chunks;
  // Of an engine, what its process has the device do (client/work_report.hpp), CLOCK_MONOTONIC.
  std::atomic<std::int64_t>
      works_until_ns;  ///< it works until then, unless something else is said; 0: it rests
  std::atomic<std::int64_t> works_since_ns;
  std::atomic<std::int64_t>
      drained_ns;  ///< the last end; its lowest bit: somebody has waited for it
  std::atomic<std::uint64_t> worked_ns;        ///< in all, without what lasts
  long_unit_entry long_units[max_long_units];  ///< the last

  /// Word by word, so that who reads meanwhile finds each value as it was or zero. Of a slot that nobody has.
  void begin_anew() noexcept {
    // Not to the end of the object: what a derived one adds may begin in its padding.
    auto const* const end = reinterpret_cast<std::uint64_t*>(std::end(long_units));
    for (auto* word = reinterpret_cast<std::uint64_t*>(this); word < end; ++word) {
      std::atomic_ref<std::uint64_t>{*word}.store(0, std::memory_order_relaxed);
    }
  }
};

/// What one client tells the writer. Written by the client. The numbers go on over the owners of a slot, since the
/// writer compares them with its own.
struct alignas(64) mailbox_header : client_report {
  std::atomic<std::uint64_t> request;        ///< `numbered`: wants so many more chunks; see
                                             ///< `request_lasting`
  std::atomic<std::uint64_t> mail_written;   ///< messages in the ring so far
  std::atomic<std::uint32_t> demand_done;    ///< number of the last demand that has been answered
  std::atomic<std::uint32_t> demand_chosen;  ///< of the last for which chunks have been promised
};

/// One of the texts with which a client says what its chunks hold; ends with a zero byte. Behind the
/// ring of a mailbox stand `max_note_texts` of them, then for each chunk the number of its text, 0
/// for none, and then for each the number of the demand that it was last promised to (promised_chunks.hpp). Written by
/// the client; a text does not change once a chunk's number names it.
struct note_text {
  char text[48];
};

/// Entries of a client's history, see chunk_history.hpp.
enum class chunk_event : std::uint32_t {
  reserved = 1,
  mapped = 2,
  unmapped = 3,
  revoked = 4,
  given = 5,
  taken = 6
};

/// Behind the chunks' notes of a mailbox stand `history_entries` of these, a ring. Written by the
/// client; what a dead one has left stays until its slot's next owner comes round.
struct alignas(64) history_entry {
  std::atomic<std::uint64_t> seq;  ///< 1 for the slot's first; 0: unused, or being written
  std::atomic<std::int64_t> from_ns, until_ns;
  std::atomic<std::uint64_t> address, generation;
  std::atomic<std::uint32_t> kind, pid, first, count;
  std::atomic<std::uint32_t> client;  ///< `client_kind` of who has written it
  /// See shared_text.hpp.
  std::atomic<std::uint64_t> what[sizeof(note_text::text) / sizeof(std::uint64_t)];
};

/// A text of shared memory up to its zero byte, or all of it if a damaged one has none.
template <std::size_t N>
[[nodiscard]] std::string_view text_of(char const (&text)[N]) {
  return {text, static_cast<std::size_t>(std::find(text, text + N, '\0') - text)};
}

/// A message in a mailbox's ring: "I no longer use this chunk, which I have owned since that
/// epoch."
struct release_mail {
  std::uint32_t chunk = 0;
  std::uint32_t epoch = 0;

  [[nodiscard]] constexpr std::uint64_t pack() const noexcept {
    return static_cast<std::uint64_t>(epoch) << 32U | chunk;
  }
  [[nodiscard]] static constexpr release_mail unpack(std::uint64_t word) noexcept {
    return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32U)};
  }
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace sluice::memhandover
