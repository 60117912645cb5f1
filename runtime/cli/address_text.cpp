#include "runtime/cli/address_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <string>

#include "memhandover/base/error.hpp"
#include "runtime/cli/detail/json_text.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::cli {
namespace {

using detail::bytes;
using detail::field;
using detail::plain;
using nlohmann::json;

std::string when(json const& instant) {
  auto const ago = field(instant, "ago_s");
  return fmt::format("{} ({:.3f} s ago)", plain(field(instant, "at")),
                     ago.is_number() ? ago.get<double>() : 0.0);
}

std::string process(json const& who) {
  return fmt::format("pid {} (slot {}{})", plain(field(who, "pid")), plain(field(who, "slot")),
                     field(who, "lives") == json(true) ? "" : ", has ended");
}

/// "the step arena of generation 7", "persistent memory", "model bert", "weights of an engine".
std::string place(json const& who) {
  auto const holds = plain(field(who, "holds"));
  if (field(who, "kind") == json("server")) {
    return "model " + holds;
  }
  if (field(who, "kind") == json("engine")) {
    return holds + " of an engine";
  }
  return holds == "arena" ? "the step arena of generation " + plain(field(who, "generation"))
                          : holds + " memory";
}

std::string owner_text(json const& now) {
  auto owner = plain(field(now, "owner"));
  if (!field(now, "slot").is_number()) {
    return owner;
  }
  return fmt::format("{}, slot {}, holds {}", owner, plain(field(now, "slot")),
                     plain(field(now, "holds")));
}

std::string mapped_text(json const& stay) {
  auto const& mapped = field(stay, "mapped");
  auto const first = field(mapped, "ago_s");
  auto const last = field(mapped, "until_ago_s");
  // Chunks mapped one after the other are one entry, which has the first's and the last's time.
  bool const between = first.is_number() && last.is_number() && first != last;
  return between ? fmt::format("{}, or up to {:.3f} s later", when(mapped),
                               first.get<double>() - last.get<double>())
                 : when(mapped);
}

std::string ended_text(json const& stay) {
  auto const& ended = field(stay, "ended");
  if (!ended.is_null()) {
    return plain(field(ended, "how")) + " " + when(ended);
  }
  if (field(stay, "kind") == json("server")) {
    return {};
  }
  return field(stay, "lives") == json(true) ? "no: it is mapped now" : "with the process";
}

std::string next_text(json const& stay) {
  auto const& next = field(stay, "went_to");
  if (next.is_null()) {
    return {};
  }
  auto const given = "given up " + when(field(next, "given"));
  if (field(next, "slot").is_null()) {
    return given + "; nobody has used it since";
  }
  return fmt::format("{}; then {} of {} {}", given, place(next), process(next),
                     when(field(next, "mapped")));
}

std::string stay_text(json const& stay) {
  auto text = fmt::format("in {} of {}\n", place(stay), process(stay));
  auto line = [&text](char const* name, std::string const& value) {
    if (!value.empty()) {
      text += fmt::format("  {:<10}{}\n", name, value);
    }
  };
  line("chunk", fmt::format("{}, offset {} in it", plain(field(stay, "chunk")),
                            plain(field(stay, "offset"))));
  line(field(stay, "kind") == json("server") ? "taken" : "mapped", mapped_text(stay));
  line("ended", ended_text(stay));
  line("went to", next_text(stay));
  line("now", owner_text(field(stay, "now")));
  return text;
}

/// What one pool knows of the address.
std::string known_text(json const& story) {
  std::string text;
  auto const& stays = field(story, "stays");
  auto const& reserved = field(story, "reserved");
  std::set<std::string> pids;
  for (auto const& stay : stays.is_array() ? stays : json::array()) {
    text += stay_text(stay);
    pids.insert(plain(field(stay, "pid")));
  }
  if (pids.size() > 1) {
    text += "addresses are each process's own: --pid shows those of one alone\n";
  }
  if (stays.empty() && reserved.is_array() && !reserved.empty()) {
    auto const& last = reserved.back();
    text += fmt::format(
        "in the addresses of {} of {}, {} from {} on, but no memory is known to have been mapped "
        "there: a discarded micro-batch is given such addresses\n",
        place(last), process(last), bytes(field(last, "bytes")), plain(field(last, "base")));
  } else if (stays.empty()) {
    text += "no process of this pool is known to have had memory of the pool there\n";
  }
  if (field(story, "complete") != json(true)) {
    text += "the oldest entries of the history have been dropped\n";
  }
  return text;
}

}  // namespace

std::uint64_t parse_address(std::string const& text) {
  auto digits = text.starts_with("0x") || text.starts_with("0X") ? text.substr(2) : text;
  std::erase(digits, '_');  // as the kernel writes the address of an Xid
  std::uint64_t address = 0;
  auto const* end = digits.data() + digits.size();
  auto const [stop, failed] = std::from_chars(digits.data(), end, address, 16);
  if (digits.empty() || stop != end || failed != std::errc{}) {
    throw error{error_kind::invalid_argument,
                fmt::format("{} is no address; write it in hexadecimal, for example 0x7f12a4000000",
                            telemetry::quoted(text))};
  }
  return address;
}

std::string address_text(json const& story) {
  auto text = fmt::format("address {}\n", plain(field(story, "address")));
  auto const pools = detail::several(story);
  for (auto const& pool : pools) {
    if (pools.size() > 1) {
      text += fmt::format("\npool of {}\n", detail::place(field(pool, "pool")));
    }
    text += known_text(pool);
  }
  return text;
}

}  // namespace sluice::cli
