#include "ledger_in_step.hpp"

#include <algorithm>
#include <iterator>

#include "dying_process.hpp"
#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/chunk_counts.hpp"

namespace sluice::memhandover::trials {
namespace {

using namespace sluice::literals;
using indices = std::vector<std::uint32_t>;

constexpr auto server = plain_ledger::server;

void require(bool condition, std::string const& fact) {
  if (!condition) {
    throw difference{fact};
  }
}

}  // namespace

ledger_in_step::ledger_in_step(std::uint64_t seed, std::uint32_t chunk_count)
    : random_(seed),
      files_(create_ledger({backend_kind::host, -1, 2_MiB, chunk_count})),
      view_(files_.ledger.get(), files_.mailroom.get(), shared_segment::access::read_write),
      model_(chunk_count) {
  for (std::uint32_t slot = 0; slot < server; ++slot) {
    seat_tenant(slot);
    mailboxes_.at(slot).emplace(view_, slot);
  }
  seat(server, client_kind::server);
  replace_writer();
}

void ledger_in_step::step() {
  auto const slot = below(random_, plain_ledger::clients);
  switch (random_() % 16) {
    case 0:
    case 1:
      ask(slot);
      break;
    case 2:
    case 3:
    case 4:
      pump();
      break;
    case 5:
    case 6:
      collect(slot);
      break;
    case 7:
    case 8:
      release(slot);
      break;
    case 9:
      take();
      break;
    case 10:
      give_back();
      break;
    case 11:
      set_limits();
      break;
    case 12:
      demand(slot);
      break;
    case 13:
      repeat_mail(slot);
      break;
    case 14:
      if (random_() % 8 == 0) {
        replace_writer();
      }
      break;
    default:
      if (random_() % 16 == 0) {
        end_client(slot);
      }
  }
  compare();
}

void ledger_in_step::finish() {
  for (std::uint32_t slot = 0; slot <= server; ++slot) {
    writer_->reclaim(slot);
  }
  require(writer_->free_chunks() == chunk_count(), "something is held by nobody at the end");
}

void ledger_in_step::seat(std::uint32_t slot, client_kind kind) {
  view_.clients()[slot].kind.store(static_cast<std::uint32_t>(kind));
  set_status(slot, client_status::live);
}

void ledger_in_step::seat_tenant(std::uint32_t slot) {
  bool const trains = random_() % 2 == 0;
  model_.client.at(slot).kind = trains ? holder::training : holder::engine;
  seat(slot, trains ? client_kind::training : client_kind::engine);
}

void ledger_in_step::set_status(std::uint32_t slot, client_status status) {
  view_.clients()[slot].status.store(static_cast<std::uint32_t>(status));
}

void ledger_in_step::replace_writer() {
  writer_ = std::make_unique<ledger_writer>(view_);
  model_.reserve = 0;
  model_.wanted = 0;
}

bool ledger_in_step::writes(plan const& planned, std::function<void()> const& what) {
  if (random_() % 64 != 0) {
    what();
    model_.apply(planned);
    return true;
  }
  auto* const start = reinterpret_cast<std::byte*>(&view_.header());
  auto* const end = reinterpret_cast<std::byte*>(view_.chunks().data() + chunk_count());
  std::size_t const page = 4096;
  auto const bytes = (static_cast<std::size_t>(end - start) + page - 1) / page * page;
  deaths_ += dies_after_writes({start, bytes}, some(planned.size() + 12), what) ? 1 : 0;
  survive(planned);
  return false;
}

void ledger_in_step::survive(plan const& planned) {
  auto equal = [&] {
    for (std::uint32_t i = 0; i < chunk_count(); ++i) {
      if (state(i) != model_.chunks[i]) {
        return false;
      }
    }
    return true;
  };
  std::size_t made = 0;
  while (!equal()) {
    require(made < planned.size(), "a writer that died left what it never was about to do");
    model_.apply({planned[made++]});
  }
  for (std::uint32_t slot = 0; slot < server; ++slot) {
    auto& one = model_.client.at(slot);
    auto const& control = view_.controls()[slot];
    if (control.mail_read.load() == view_.mailbox(slot).mail_written.load()) {
      for (auto const& mail : one.unread) {
        auto const& at = model_.chunks[mail.chunk];
        require(!at.is_tenants() || at.slot != slot || at.epoch != mail.epoch,
                "mail was counted as read before it was taken");
      }
      one.unread.clear();
    }
    auto const answered = numbered::unpack(control.grant.load()).seq;
    require(answered == one.answered_number || answered == one.asked_number,
            "a request that nobody made was answered");
    one.answered_number = answered;
  }
  replace_writer();
  // The writer was the server: what it held is taken back by its successor.
  auto const orphaned = model_.reclaim(server);
  require(writer_->reclaim(server) == orphaned.size(), "a dead server's chunks were miscounted");
  model_.apply(orphaned);
}

void ledger_in_step::ask(std::uint32_t slot) {
  auto& one = model_.client.at(slot);
  one.asked_chunks = random_() % 4 == 0 ? 0 : some(chunk_count() / 3 + 1);
  ++one.asked_number;
  if (one.asked_chunks == 0) {
    mailboxes_.at(slot)->withdraw();
  } else {
    one.asked_lasting = random_() % 2 == 0;
    one.asked_first = random_() % 8 == 0;
    mailboxes_.at(slot)->ask(
        one.asked_chunks, one.asked_lasting ? lifetime::lasting : lifetime::revocable,
        one.asked_first ? precedence::before_demands : precedence::after_demands);
  }
}

void ledger_in_step::pump() {
  auto const planned = model_.pump();
  auto const freed = static_cast<std::uint32_t>(
      std::count_if(planned.begin(), planned.end(), [](auto const& c) { return c.now.is_free(); }));
  std::uint32_t came_free = 0;
  if (!writes(planned, [&] { came_free = writer_->pump(); })) {
    return;
  }
  require(came_free == freed, "a pump counted wrong what came free");
  for (std::uint32_t slot = 0; slot < server; ++slot) {
    auto& one = model_.client.at(slot);
    one.unread.clear();
    auto const grant = numbered::unpack(view_.controls()[slot].grant.load());
    if (one.asked_number != one.answered_number) {
      auto const given = std::count_if(planned.begin(), planned.end(), [slot](auto const& c) {
        return c.now.is_tenants() && c.now.slot == slot;
      });
      require(grant.chunks == given, "an answer counted wrong what was granted");
    }
    one.answered_number = one.asked_number;
    require(grant.seq == one.asked_number, "a request was not answered");
    require(!mailboxes_.at(slot)->has_mail(), "mail was left");
  }
}

void ledger_in_step::collect(std::uint32_t slot) {
  auto const most = some(chunk_count());
  indices dirty;
  auto const granted = mailboxes_.at(slot)->collect(most, &dirty);
  require(granted == model_.collect(slot, most), "a client collected what was not granted");
  indices expected;
  std::copy_if(granted.begin(), granted.end(), std::back_inserter(expected),
               [&](auto i) { return model_.chunks[i].needs_scrub; });
  require(dirty == expected, "old contents were not told");
  compare_holds(slot);
}

void ledger_in_step::release(std::uint32_t slot) {
  indices which;
  for (std::uint32_t i = 0; i < chunk_count(); ++i) {
    if (random_() % 3 == 0) {
      which.push_back(i);  // also chunks that are not its own
    }
  }
  std::shuffle(which.begin(), which.end(), random_);
  mailboxes_.at(slot)->release(which);
  model_.release(slot, which);
  compare_holds(slot);
}

void ledger_in_step::take() {
  auto const count = some(chunk_count() / 3 + 1);
  auto const planned = model_.take(count);
  indices taken;
  if (writes(planned, [&] { taken = writer_->take(count, server); })) {
    indices expected;
    std::transform(planned.begin(), planned.end(), std::back_inserter(expected),
                   [](auto const& c) { return c.chunk; });
    require(taken == expected, "serving got other chunks than it owns");
  }
}

void ledger_in_step::give_back() {
  indices which;
  for (std::uint32_t i = 0; i < chunk_count(); ++i) {
    for (auto times = random_() % 3; times > 0; --times) {
      which.push_back(i);  // twice, and also what is not serving's
    }
  }
  which.push_back(chunk_count() + some(9));
  std::shuffle(which.begin(), which.end(), random_);
  writes(model_.give_back(which), [&] { writer_->give_back(which); });
}

void ledger_in_step::set_limits() {
  model_.reserve = some(chunk_count() / 4);
  model_.wanted = random_() % 4 == 0 ? some(0xffffffffU) : 0;
  writer_->set_reserve(model_.reserve);
  writer_->set_wanted(model_.wanted);
}

void ledger_in_step::demand(std::uint32_t slot) {
  auto const count = some(5);
  auto const number = writer_->demand(slot, count);
  require(number == ++model_.client.at(slot).demand_number, "a demand's number was used before");
  auto const word = numbered::unpack(view_.controls()[slot].demand.load());
  require(word.seq == number && word.chunks == count, "a demand was not posted");
}

void ledger_in_step::repeat_mail(std::uint32_t slot) {
  auto const ring = view_.mail_ring(slot);
  auto& unread = model_.client.at(slot).unread;
  if (unread.size() + chunk_count() >= ring.size()) {
    return;
  }
  auto& read = view_.controls()[slot].mail_read;
  if (random_() % 2 == 0) {
    read.fetch_sub(std::min<std::uint64_t>(read.load(), some(5)));
    return;
  }
  auto const chunk = below(random_, chunk_count());
  auto const& now = model_.chunks[chunk];
  bool const its_own = now.is_tenants() && now.slot == slot;
  if (now.epoch == 0) {
    return;
  }
  plain_mail const mail{chunk, its_own ? now.epoch - 1 : now.epoch - some(1)};
  auto& written = view_.mailbox(slot).mail_written;
  ring[written.load() & (ring.size() - 1)].store(release_mail{mail.chunk, mail.epoch}.pack());
  written.fetch_add(1);
  unread.push_back(mail);
}

void ledger_in_step::end_client(std::uint32_t slot) {
  auto& one = model_.client.at(slot);
  set_status(slot, client_status::gone);
  one.live = false;
  if (random_() % 2 == 0) {
    plan const planned = model_.pump();
    if (writes(planned, [&] { writer_->pump(); })) {
      for (auto& other : model_.client) {
        other.unread.clear();
        other.answered_number = other.live ? other.asked_number : other.answered_number;
      }
    }
  }
  if (!writes(model_.reclaim(slot), [&] { writer_->reclaim(slot); })) {
    model_.apply(model_.reclaim(slot));
    writer_->reclaim(slot);
  }
  // One that died at the very end has withdrawn it already.
  auto const demanded = numbered::unpack(view_.controls()[slot].demand.load());
  require(demanded.chunks == 0, "what was demanded of a dead client is demanded of the next");
  require(demanded.seq == one.demand_number + 1 || demanded.seq == one.demand_number + 2,
          "a dead client's demand was withdrawn by another number than the next");
  one.demand_number = demanded.seq;
  one.unread.clear();
  one.answered_number = one.asked_number;
  one.known_epoch.assign(chunk_count(), 0);
  one.holds.assign(chunk_count(), false);
  one.live = true;
  mailboxes_.at(slot).emplace(view_, slot);
  seat_tenant(slot);
}

plain_chunk ledger_in_step::state(std::uint32_t chunk) const {
  auto const word = view_.chunks()[chunk].load();
  constexpr std::array holders{holder::nobody, holder::nobody_dirty, holder::training,
                               holder::serving, holder::engine};
  require((word & 0xffU) < holders.size(), "a chunk has no owner that there is");
  return {holders.at(word & 0xffU), static_cast<std::uint32_t>(word >> 16U & 0xffffU),
          (word >> 8U & 1U) != 0, static_cast<std::uint32_t>(word >> 32U)};
}

void ledger_in_step::compare() const {
  for (std::uint32_t i = 0; i < chunk_count(); ++i) {
    require(state(i) == model_.chunks[i], "chunk " + std::to_string(i) + " is another's");
  }
  require(writer_->free_chunks() == model_.free_chunks(), "the writer miscounts what is free");
  require(view_.header().grantable.load() == model_.grantable(),
          "the ledger promises other than what may be granted");
  std::uint32_t sum = model_.free_chunks();
  for (std::uint32_t slot = 0; slot <= server; ++slot) {
    auto const held = writer_->held_by(slot);
    require(held == model_.held_by(slot), "the writer miscounts what a client holds");
    sum += held;
  }
  require(writer_->owned_by(owner::training) == model_.owned_by(holder::training),
          "the writer miscounts what training holds");
  require(writer_->owned_by(owner::engine) == model_.owned_by(holder::engine),
          "the writer miscounts what engines hold");
  auto const counted = count_chunks(view_);
  require(counted.nobodys() + counted.training + counted.serving + counted.engine == chunk_count(),
          "a chunk is counted for nobody, or twice");
  require(sum == chunk_count(), "a chunk has not one owner");
}

void ledger_in_step::compare_holds(std::uint32_t slot) const {
  for (std::uint32_t i = 0; i < chunk_count(); ++i) {
    require(mailboxes_.at(slot)->holds(i) == model_.client.at(slot).holds[i],
            "a client is wrong about what it has");
  }
}

}  // namespace sluice::memhandover::trials
