#include "memhandover/ledger/client_kinds.hpp"

#include <algorithm>

#include "memhandover/base/error.hpp"
#include "memhandover/base/shared_text.hpp"

namespace sluice::memhandover {
namespace {

client_traits const* find_kind(std::uint32_t word) noexcept {
  auto const* const found = std::find_if(
      client_kinds.begin(), client_kinds.end(),
      [word](client_traits const& each) { return static_cast<std::uint32_t>(each.kind) == word; });
  return found == client_kinds.end() ? nullptr : found;
}

}  // namespace

client_traits const* traits_of(client_entry const& entry) noexcept {
  return find_kind(entry.kind.load(std::memory_order_relaxed));
}

client_traits const& traits_of(client_kind kind) noexcept {
  return *find_kind(static_cast<std::uint32_t>(kind));
}

client_traits const& kind_named(std::string_view name) {
  std::string known;
  for (auto const& each : client_kinds) {
    if (each.name == name) {
      return each;
    }
    known += (known.empty() ? "" : ", ") + std::string{each.name};
  }
  throw error{error_kind::invalid_argument, "a client joins a pool as one of " + known +
                                                ", and not as \"" + readable_text(name) + "\""};
}

char const* name_of(owner who) noexcept {
  switch (who) {
    case owner::free:
      return "free";
    case owner::dirty:
      return "dirty";
    case owner::training:
      return "training";
    case owner::serving:
      return "serving";
    case owner::engine:
      return "engine";
  }
  return "unknown";
}

char const* name_of_kind(std::uint32_t word) noexcept {
  auto const* const kind = find_kind(word);
  return kind == nullptr ? "unknown" : kind->name;
}

}  // namespace sluice::memhandover
