#include "runtime/launcher/torch_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace sluice::launcher {
namespace {

struct conflict {
  std::string_view setting;
  std::string_view why;
};

constexpr std::array conflicts{
    conflict{"expandable_segments:True",
             "torch then manages virtual memory of its own; in the pool segments need not expand"},
    conflict{"backend:cudaMallocAsync", "CUDA's own pool then holds what torch frees"},
};

/// As torch reads it: blanks do not count.
std::string without_blanks(std::string text) {
  std::erase_if(text, [](char c) { return c == ' ' || c == '\t'; });
  return text;
}

bool has_setting(std::string_view list, std::string_view setting) {
  while (!list.empty()) {
    auto const end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == setting) {
      return true;
    }
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

}  // namespace

std::optional<std::string> memory_outside_pool(environment const& env) {
  for (auto const* name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    auto const settings = without_blanks(env.get(name).value_or(""));
    for (auto const& [setting, why] : conflicts) {
      if (has_setting(settings, setting)) {
        return fmt::format(
            "{} has {}, with which the job's memory would lie outside the pool: {}. Remove the "
            "setting, or run the command without `sluice run`",
            name, setting, why);
      }
    }
  }
  return std::nullopt;
}

}  // namespace sluice::launcher
