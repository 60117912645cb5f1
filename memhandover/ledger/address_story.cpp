#include "memhandover/ledger/address_story.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <optional>
#include <vector>

#include "memhandover/ledger/chunk_history.hpp"
#include "memhandover/ledger/chunk_notes.hpp"
#include "memhandover/ledger/client_kinds.hpp"

namespace sluice::memhandover {
namespace {

using json = nlohmann::json;
using slot_history = std::vector<chunk_record>;

constexpr std::size_t most_stays = 16;

/// Turns the pool's clock into times of day.
class calendar {
 public:
  calendar() : monotonic_(monotonic_ns()) {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    real_ = static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  }

  [[nodiscard]] json at(std::int64_t ns) const {
    auto const wall = real_ - (monotonic_ - ns);
    std::time_t const seconds = wall / 1'000'000'000;
    std::tm utc{};
    ::gmtime_r(&seconds, &utc);
    return {{"at", fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:06}Z", utc, wall / 1000 % 1'000'000)},
            {"ago_s", static_cast<double>(monotonic_ - ns) / 1e9}};
  }

 private:
  std::int64_t monotonic_;
  std::int64_t real_ = 0;
};

class story {
 public:
  explicit story(ledger_view const& view) : view_(view) {
    for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
      histories_.at(slot) = read_history(view, slot);
    }
  }

  [[nodiscard]] json of(std::uint64_t address, std::uint32_t pid) const {
    auto const bytes = view_.header().chunk_bytes;
    std::vector<std::pair<std::int64_t, json>> stays;
    json reserved = json::array();
    for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
      for (auto const& entry : histories_.at(slot)) {
        if (!entry.has_address(address, bytes) || (pid != 0 && entry.pid != pid)) {
          continue;
        }
        if (entry.kind == chunk_event::mapped || entry.kind == chunk_event::taken) {
          stays.emplace_back(entry.from_ns, stay(slot, entry, address));
        } else if (entry.kind == chunk_event::reserved) {
          reserved.push_back(who(slot, entry));
          reserved.back().update({{"base", fmt::format("{:#x}", entry.address)},
                                  {"bytes", entry.count * bytes},
                                  {"reserved", calendar_.at(entry.from_ns)}});
        }
      }
    }
    std::stable_sort(stays.begin(), stays.end(),
                     [](auto const& a, auto const& b) { return a.first > b.first; });
    json listed = json::array();
    for (auto& [when, one] : stays) {
      if (listed.size() < most_stays) {
        listed.push_back(std::move(one));
      }
    }
    if (reserved.size() > most_stays) {
      reserved.erase(reserved.begin(), reserved.end() - static_cast<std::ptrdiff_t>(most_stays));
    }
    return {{"address", fmt::format("{:#x}", address)},
            {"stays", std::move(listed)},
            {"reserved", std::move(reserved)},
            {"complete", complete()}};
  }

 private:
  /// Whether no history has dropped its oldest entries.
  [[nodiscard]] bool complete() const {
    return std::all_of(histories_.begin(), histories_.end(), [](slot_history const& history) {
      return history.empty() || history.front().seq == 1;
    });
  }

  [[nodiscard]] json who(std::uint32_t slot, chunk_record const& entry) const {
    auto const& client = view_.clients()[slot];
    bool const lives =
        client.pid.load() == entry.pid && client.status.load(std::memory_order_acquire) ==
                                              static_cast<std::uint32_t>(client_status::live);
    return {{"slot", slot},
            {"pid", entry.pid},
            {"lives", lives},
            {"kind", name_of_kind(entry.client)},
            {"holds", entry.what.empty() ? json{} : json(entry.what)},
            {"generation", entry.kind == chunk_event::taken ? json{} : json(entry.generation)}};
  }

  [[nodiscard]] json stay(std::uint32_t slot, chunk_record const& mapped,
                          std::uint64_t address) const {
    auto const bytes = view_.header().chunk_bytes;
    auto const chunk =
        mapped.first + static_cast<std::uint32_t>((address - mapped.address) / bytes);
    json result = who(slot, mapped);
    result["chunk"] = chunk;
    result["offset"] = (address - mapped.address) % bytes;
    result["mapped"] = calendar_.at(mapped.from_ns);
    result["mapped"]["until_ago_s"] = calendar_.at(mapped.until_ns)["ago_s"];
    result["ended"] = nullptr;
    result["went_to"] = nullptr;
    chunk_record const* given = nullptr;
    for (auto const& later : histories_.at(slot)) {
      if (later.seq <= mapped.seq || later.pid != mapped.pid) {
        continue;
      }
      bool const ends = later.kind == chunk_event::unmapped || later.kind == chunk_event::revoked;
      if (ends && result["ended"].is_null() && later.has_address(address, bytes)) {
        result["ended"] = calendar_.at(later.from_ns);
        result["ended"]["how"] = later.kind == chunk_event::revoked ? "revoked" : "unmapped";
      }
      if (later.kind == chunk_event::mapped && later.has_chunk(chunk)) {
        break;  // the chunk stayed with this job and lies elsewhere now
      }
      if (later.kind == chunk_event::given && later.has_chunk(chunk)) {
        given = &later;
        break;
      }
    }
    if (given != nullptr) {
      result["went_to"] = next_owner(slot, *given, chunk);
      result["went_to"]["given"] = calendar_.at(given->from_ns);
    }
    result["now"] = now(chunk);
    return result;
  }

  /// Who used `chunk` first after the client in `slot` had given it up.
  [[nodiscard]] json next_owner(std::uint32_t slot, chunk_record const& given,
                                std::uint32_t chunk) const {
    std::optional<std::pair<std::uint32_t, chunk_record const*>> next;
    for (std::uint32_t other = 0; other < max_clients; ++other) {
      for (auto const& entry : histories_.at(other)) {
        bool const gets = entry.kind == chunk_event::taken || entry.kind == chunk_event::mapped;
        // What is merged in another slot's entry lies somewhere between its two times.
        bool const after = other == slot ? entry.seq > given.seq : entry.until_ns >= given.from_ns;
        if (gets && after && entry.has_chunk(chunk) &&
            (!next || entry.from_ns < next->second->from_ns)) {
          next = {other, &entry};
        }
      }
    }
    if (!next) {
      return {{"slot", nullptr}};
    }
    auto result = who(next->first, *next->second);
    result["mapped"] = calendar_.at(next->second->from_ns);
    return result;
  }

  [[nodiscard]] json now(std::uint32_t chunk) const {
    if (chunk >= view_.header().chunk_count) {
      return nullptr;  // a damaged history
    }
    auto const state = view_.chunk(chunk);
    json result{{"owner", state.is_free() ? "free" : name_of(state.who)}};
    if (is_owned(state.who) && state.client < max_clients) {
      auto const note = chunk_note(view_, state.client, chunk);
      result.update({{"slot", state.client}, {"holds", note.empty() ? json{} : json(note)}});
    }
    return result;
  }

  ledger_view const& view_;
  calendar calendar_;
  std::array<slot_history, max_clients> histories_;
};

}  // namespace

nlohmann::json describe_address(ledger_view const& view, std::uint64_t address, std::uint32_t pid) {
  return story{view}.of(address, pid);
}

}  // namespace sluice::memhandover
