#include "memhandover/client/detail/mapping_ahead.hpp"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace sluice::memhandover::detail {

void mapping_ahead::map(std::span<std::uint32_t const> foreseen) noexcept {
  drop();
  try {
    mapped made{nullptr, {foreseen.begin(), foreseen.end()}};
    made.data = memory_.map_anew(foreseen);
    ahead_ = std::move(made);
  } catch (std::exception const& why) {
    spdlog::warn("chunks are mapped when they have come reason=\"{}\"", why.what());
  }
}

std::optional<mapping_ahead::mapped> mapping_ahead::put_right(
    std::span<std::uint32_t const> had) noexcept {
  if (ahead_.data == nullptr || had.size() != ahead_.chunks.size()) {
    drop();
    return std::nullopt;
  }
  try {
    std::vector<bool> missing(memory_.shape().chunk_count);
    for (auto const chunk : had) {
      missing.at(chunk) = true;
    }
    std::vector<std::size_t> wrong;
    for (std::size_t i = 0; i < ahead_.chunks.size(); ++i) {
      if (missing.at(ahead_.chunks[i])) {
        missing[ahead_.chunks[i]] = false;
      } else {
        wrong.push_back(i);
      }
    }
    auto next = wrong.begin();
    for (std::uint32_t chunk = 0; next != wrong.end(); ++chunk) {
      if (missing.at(chunk)) {
        gap_ = *next;
        unmap(*next, *next + 1);
        memory_.map(at(*next), {&chunk, 1});
        gap_.reset();
        ahead_.chunks[*next++] = chunk;
      }
    }
    return std::exchange(ahead_, {});
  } catch (std::exception const& why) {
    spdlog::warn("chunks that have come are mapped anew reason=\"{}\"", why.what());
    drop();
    return std::nullopt;
  }
}

void mapping_ahead::drop() noexcept {
  if (ahead_.data != nullptr) {
    auto const count = ahead_.chunks.size();
    auto const gap = gap_.value_or(count);
    unmap(0, gap);
    unmap(std::min(gap + 1, count), count);
    memory_.release(ahead_.data, static_cast<std::uint32_t>(count));
    ahead_ = {};
    gap_.reset();
  }
}

void mapping_ahead::unmap(std::size_t from, std::size_t end) noexcept {
  if (end > from) {
    memory_.unmap(at(from), static_cast<std::uint32_t>(end - from));
  }
}

}  // namespace sluice::memhandover::detail
