#include "runtime/launcher/environment.hpp"

#include <unistd.h>

#include <algorithm>

namespace sluice::launcher {
namespace {

bool names(std::string_view entry, std::string_view name) {
  return entry.size() > name.size() && entry[name.size()] == '=' &&
         entry.substr(0, name.size()) == name;
}

bool contains(std::string_view list, std::string_view element) {
  while (!list.empty()) {
    auto const end =
        std::min(list.find_first_of(": "), list.size());  // LD_PRELOAD allows spaces too
    if (list.substr(0, end) == element) {
      return true;
    }
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

}  // namespace

environment environment::of_this_process() {
  std::vector<std::string> entries;
  for (char** entry = ::environ; *entry != nullptr; ++entry) {
    entries.emplace_back(*entry);
  }
  return environment{std::move(entries)};
}

std::optional<std::string> environment::get(std::string_view name) const {
  for (auto const& entry : entries_) {
    if (names(entry, name)) {
      return entry.substr(name.size() + 1);
    }
  }
  return std::nullopt;
}

void environment::set(std::string_view name, std::string_view value) {
  unset(name);
  entries_.push_back(std::string{name} + "=" + std::string{value});
}

void environment::unset(std::string_view name) {
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(),
                                [name](std::string const& entry) { return names(entry, name); }),
                 entries_.end());
}

void environment::prepend(std::string_view name, std::string_view element) {
  auto const before = get(name).value_or("");
  if (!contains(before, element)) {
    set(name, before.empty() ? std::string{element} : std::string{element} + ":" + before);
  }
}

void environment::append(std::string_view name, std::string_view element) {
  auto const before = get(name).value_or("");
  if (!contains(before, element)) {
    set(name, before.empty() ? std::string{element} : before + ":" + std::string{element});
  }
}

void environment::remove(std::string_view name, std::string_view element) {
  auto const before = get(name);
  if (!before) {
    return;
  }
  std::string kept;
  for (std::string_view list = *before; !list.empty();) {
    auto const end = std::min(list.find(':'), list.size());
    if (list.substr(0, end) != element) {
      kept += (kept.empty() ? "" : ":") + std::string{list.substr(0, end)};
    }
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  if (kept != *before) {
    kept.empty() ? unset(name) : set(name, kept);
  }
}

std::vector<char*> environment::pointers() {
  std::vector<char*> result;
  result.reserve(entries_.size() + 1);
  for (auto& entry : entries_) {
    result.push_back(entry.data());
  }
  result.push_back(nullptr);
  return result;
}

}  // namespace sluice::launcher
