/// The examples in the headers of memhandover/, word for word: compiled, never run.
#include <poll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memhandover/allocation/detail/kept_layout.hpp"
#include "memhandover/allocation/tensor_heap.hpp"
#include "memhandover/allocation/tensor_placement.hpp"
#include "memhandover/base/bytes.hpp"
#include "memhandover/base/environment.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/numbers.hpp"
#include "memhandover/base/poll_list.hpp"
#include "memhandover/base/system_error.hpp"
#include "memhandover/base/waiting.hpp"
#include "memhandover/broker/broker_launch.hpp"
#include "memhandover/broker/job_wish.hpp"
#include "memhandover/broker/pool_creation.hpp"
#include "memhandover/client/detail/mapping_ahead.hpp"
#include "memhandover/client/detail/pause_lease.hpp"
#include "memhandover/client/host_copy_share.hpp"
#include "memhandover/client/pinned_copies.hpp"
#include "memhandover/client/serving_pool.hpp"
#include "memhandover/client/tenant_client.hpp"
#include "memhandover/client/work_report.hpp"
#include "memhandover/device/chunk_transfer.hpp"
#include "memhandover/device/content_hash.hpp"
#include "memhandover/device/disk_file.hpp"
#include "memhandover/device/held_pages.hpp"
#include "memhandover/ledger/chunk_counts.hpp"
#include "memhandover/ledger/client_entries.hpp"
#include "memhandover/ledger/client_kinds.hpp"
#include "memhandover/ledger/client_mailbox.hpp"
#include "memhandover/ledger/demand_order.hpp"
#include "memhandover/ledger/job_needs.hpp"
#include "memhandover/ledger/pool_account.hpp"
#include "memhandover/ledger/promised_chunks.hpp"
#include "memhandover/parking/return_estimate.hpp"
#include "memhandover/parking/tenant_parking.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-result"
#pragma GCC diagnostic ignored "-Wunused-value"
#pragma GCC diagnostic ignored "-Wunused-variable"

namespace sluice::memhandover::header_examples {

using namespace detail;
using namespace std::chrono_literals;
using std::chrono::steady_clock;

void of_broker_launch(std::string const& dir) {
  auto presence = open_pool({.runtime_dir = dir, .pool_bytes = 4_GiB});
}

void of_numbers() {
  parse_number<int>("12");
  parse_number<int>("12 s");
}

void of_bytes() {
  auto chunk = 64_MiB;
  format_bytes(chunk);
}

void of_chunk_counts(ledger_view const& view, std::uint32_t slot) {
  auto const counted = count_chunks(view);
  counted.serving - counted.left;
  counted.by_client.at(slot);
}

void of_chunk_transfer(std::unique_ptr<chunk_transfer> const& copies,
                       std::vector<std::byte*> const& slots, std::vector<std::byte*> const& chunks,
                       std::size_t chunk_bytes, std::size_t done, void (*give)(std::byte*),
                       bool (*late)()) {
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    copies->out(slots[i], chunks[i], chunk_bytes);
  }
  while (copies->in_flight() > 0) {
    for (auto ended = copies->poll(); ended > 0; --ended) {
      give(chunks[done++]);
    }
    if (late()) {
      copies->drop();
    }
  }
}

void of_held_pages(std::byte* where, std::byte* copy, std::size_t bytes) {
  held_pages pages;
  auto* const aside = pages.take(where, bytes);  // from now on who touches them waits
  std::memcpy(copy, aside, bytes);
  pages.drop(aside, bytes);
  if (pages.touched()) {
    pages.put(where, copy, bytes);
    pages.release(where, bytes);  // they are pages as any others
  }
}

void of_content_hash(std::unique_ptr<content_hasher> const& hashes,
                     std::vector<std::byte*> const& chunks, std::size_t chunk_bytes,
                     std::vector<content_hash> const& kept, std::size_t next, std::size_t done,
                     void (*give)(std::byte*)) {
  for (; next < chunks.size() && hashes->room(); ++next) {
    hashes->begin(chunks[next], chunk_bytes);
  }
  while (auto const hash = hashes->poll()) {
    if (hash->zero() || *hash == kept[done]) {
      give(chunks[done]);
    }
    ++done;
  }
}

void of_client_mailbox(client_mailbox& mailbox) {
  mailbox.ask(16, lifetime::revocable);
  auto chunks = mailbox.collect(16);
  mailbox.release(chunks);
}

void of_client_kinds(ledger_view const& view, std::uint32_t slot) {
  auto const* const kind = traits_of(view.clients()[slot]);
  if (kind != nullptr && kind->is_tenant) {
  }
}

void of_work_report(tenant_client const& client) {
  work_report report{client.mailbox(), client.files().doorbell.get()};
  report.begins();
  report.renew();
  report.drained(true);
}

void of_work_report(ledger_view const& view) {
  // the server, whenever it is rung, and when that has passed
  if (auto const seen = work_of_engines(view, monotonic_ns()); seen.works) {
    // … is held until seen.until_ns …
  }
}

void of_pause_lease(ledger_header& header) {
  pause_lease lease{header.pause_until_ns, 100ms};
  auto const claim = lease.add(steady_clock::now() + 800ms);
  lease.renew();
  lease.drop(claim);
}

void of_poll_list(int bell_fd, steady_clock::time_point deadline) {
  poll_list polled;
  auto const bell = polled.add(bell_fd);
  polled.wait(deadline);
  if (polled.ready(bell)) {
  }
}

void of_waiting(int socket) {
  if (!await_ready(socket, POLLIN, steady_clock::now() + 5s)) {
  }
}

void of_error() {
  throw error{error_kind::invalid_argument,
              "pool.memory is 40GiB but the machine has 23GiB; ask for less"};
}

void of_pool_account(ledger_view const& view, std::uint32_t slot) {
  account_of(view, slot);
  remedies(view, slot);
}

void of_promised_chunks(ledger_view const& view, std::uint32_t slot, std::uint32_t number,
                        std::span<std::uint32_t const> chunks) {
  promise(view, slot, number, chunks);                 // the client, of that demand
  auto const foreseen = promised(view, slot, number);  // the server; nothing before that
}

void of_pool_creation() {
  pool_creation making{{.backend = "cuda", .device = 1}};
  while (!making.done()) {
    making.advance();
  }
  auto files = making.take();
}

void of_serving_pool(steady_clock::time_point deadline) {
  auto pool = serving_pool::join({.name = "server", .endpoint = "127.0.0.1:8000"});
  auto weights = pool->acquire(90_MiB, deadline);
  auto claim = pool->claim_compute();
}

void of_system_error() {
  throw system_error("cannot create a pool of 4 GiB");
}

void of_kept_layout(std::vector<std::uint64_t> const& sizes, load_decision const& decision) {
  using namespace detail;
  auto const blob = pack({"resnet50", sizes, decision.tensors, decision.stitched});
  auto const layout = unpack(blob);
}

void of_succession(tensor_heap& heap, loaded_tensors const& model, tensor_heap& successor,
                   std::vector<std::uint64_t> const& sizes) {
  heap.publish(model, "resnet50/1", "what the bytes are");
  auto warm = successor.adopt({.sizes = sizes}, "resnet50/1", "what the bytes are");
}

void of_tensor_heap(std::shared_ptr<serving_pool> const& pool,
                    std::vector<std::uint64_t> const& sizes, steady_clock::time_point deadline) {
  handover_report report;
  tensor_heap heap{pool, 256};
  auto model = heap.load({.sizes = sizes, .what = "resnet50"}, deadline, &report);
}

void of_tensor_placement(std::vector<std::uint64_t> const& sizes,
                         std::vector<std::uint32_t> const& free_chunks) {
  tensor_placement places{64_MiB, 2000, 256};
  auto where = places.load(7, sizes, free_chunks);
  where->taken;
  where->tensors[3];
  auto gone = places.unload(7);
}

void of_tenant_client(broker_options const& broker, tenant_client::handler const& give_up,
                      steady_clock::time_point deadline) {
  auto pool = tenant_client::join(broker, client_kind::training, "job",
                                  [&](demand const& d) { return give_up(d); });
  pool->ask(16, lifetime::revocable, deadline);
  auto chunks = pool->collect();
  pool->release(chunks);
}

void of_host_copies(std::span<std::atomic<std::uint64_t>> words, std::uint16_t holder) {
  host_copies copies{words};
  auto mine = copies.hold(3, holder);
  copies.give_back(mine.front());
}

void of_host_copy_table(std::uint16_t holder) {
  auto disk = create_disk_file({"/var/lib/sluice", 256_GiB});
  auto const files = create_host_copies(64_GiB, 64_MiB, std::move(disk));
  host_copy_table table{files};
  table.copies().hold(3, holder);
}

void of_disk_file(std::span<std::byte> contents) {
  auto const made = create_disk_file({"/var/lib/sluice", 64_GiB});
  disk_file file{made.get()};
  file.write(0, contents);
  file.read(0, contents);
}

void of_return_estimate() {
  return_estimate coming;
  coming.went(3s, {1500ms, 2});
  coming.expected(8, 2);
  coming.came(2s, 8, {1200ms, 2});
  coming.expected(4, 0);
}

void of_standing(ledger_view const& view, std::uint32_t slot) {
  write_client(view, slot, {.kind = client_kind::training, .standing = {priority::high, 12}});
  auto const of = standing_of(view.clients()[slot], view.header().chunk_count);
  of.least_chunks;
}

void of_job_needs(ledger_view const& view, mailbox_header& mailbox, std::uint32_t slot) {
  show_need(mailbox, 12, 1s);
  beside_needs(view, slot, 20, 3);
  withdraw_need(mailbox);
}

void of_job_wish(pool_shape const& shape) {
  auto wish = job_wish_in(environment("SLUICE_PRIORITY"), environment("SLUICE_MIN_MEMORY"));
  wish.chunks_of(shape);
}

void of_demand_order(std::vector<giver> const& givers, std::uint32_t missing,
                     void (*ask)(std::uint32_t, std::uint32_t, bool)) {
  while (auto const next = next_demand(givers, missing)) {
    ask(next->slot, next->chunks, next->may_park);
  }
}

void of_host_copy_share(host_copy_share& share) {
  auto const taken = share.copies().hold(1, share.holder());
  auto const where = share.at(taken.front().slot);
}

void of_pinned_copies(host_copy_share* share, std::shared_ptr<cuda_driver const> const& driver,
                      int device) {
  pinned_copies pinned{*share, driver, device};
  while (auto const next = pinned.advance()) {
  }
}

struct stock_of_chunks {
  std::vector<std::uint32_t> (*take)(std::uint32_t);
};

void of_mapping_ahead(device_memory& memory, std::span<std::uint32_t const> foreseen,
                      std::span<std::uint32_t const> had) {
  mapping_ahead ahead{memory};
  ahead.map(foreseen);
  auto const there = ahead.put_right(had);
}

void of_tenant_parking(std::mutex& mutex, device_memory& memory, host_copy_share& copies,
                       std::shared_ptr<cuda_driver const> const& driver,
                       std::span<chunk_space* const> spaces, demand const& wanted,
                       stock_of_chunks const& stock) {
  tenant_parking parking{mutex, memory, copies, driver};
  // nothing runs on the device, and until `parked().all()` is 0 again nothing may
  parking.take(spaces, 12, wanted.give, wanted.stands);
  parking.bring_back(stock.take(parking.parked().all()));
}

}  // namespace sluice::memhandover::header_examples

#pragma GCC diagnostic pop
