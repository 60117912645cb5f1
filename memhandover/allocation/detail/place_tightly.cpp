#include <algorithm>
#include <optional>

#include "memhandover/allocation/detail/placement_ways.hpp"

namespace sluice::memhandover::detail {
namespace {

class tight_way {
 public:
  tight_way(placement_draft& draft, std::span<std::uint32_t const> offered)
      : draft_(draft), chunk_(draft.map().chunk_bytes()) {
    auto hole = draft.map().holes().begin();
    auto const last = draft.map().holes().end();
    for (auto const number : offered) {
      auto const begin = number * chunk_;
      for (; hole != last && hole->first < begin; ++hole) {
        add({hole->first, hole->second});
      }
      add({begin, begin + chunk_});
    }
    for (; hole != last; ++hole) {
      add({hole->first, hole->second});
    }
  }

  /// Fills the largest space with what it holds, then the largest that is left, and so on: that way
  /// a model lies in few chunks, and leaves large spaces when it goes.
  [[nodiscard]] bool place(std::vector<wanted_tensor> rest) {
    while (!rest.empty()) {
      auto const space = largest(spaces_);
      if (!space || space->size() < rest.front().bytes) {
        if (!stitch(rest.front())) {
          return false;
        }
        rest.erase(rest.begin());
        continue;
      }
      auto left = *space;
      std::erase_if(rest, [&](wanted_tensor const& each) {
        if (each.bytes > left.size()) {
          return false;
        }
        draft_.put(each, left.begin);
        left.begin += each.bytes;
        return true;
      });
      extent const filled{space->begin, left.begin};
      draft_.occupy(filled);
      remove(filled);
    }
    return true;
  }

 private:
  /// Behind the others; one with the last if they touch.
  void add(extent space) {
    if (!spaces_.empty() && spaces_.back().end == space.begin) {
      spaces_.back().end = space.end;
    } else {
      spaces_.push_back(space);
    }
  }

  void remove(extent part) {
    auto const in = std::find_if(spaces_.begin(), spaces_.end(), [&](extent const& each) {
      return each.begin <= part.begin && part.end <= each.end;
    });
    extent const behind{part.end, in->end};
    in->end = part.begin;
    if (behind.size() > 0) {
      spaces_.insert(std::next(in), behind);
    }
    std::erase_if(spaces_, [](extent const& each) { return each.size() == 0; });
  }

  /// Free parts of chunks that a tensor can be stitched from.
  struct pieces {
    std::vector<extent> endings, wholes, beginnings;
  };

  [[nodiscard]] pieces cut() const {
    pieces result;
    for (auto const& space : spaces_) {
      for_each_chunk(space, chunk_, [&](std::uint32_t, extent part) {
        bool const begins = part.begin % chunk_ == 0;
        bool const ends = part.end % chunk_ == 0;
        if (begins && ends) {
          result.wholes.push_back(part);
        } else if (begins) {
          result.beginnings.push_back(part);
        } else if (ends) {
          result.endings.push_back(part);
        }
      });
    }
    return result;
  }

  [[nodiscard]] static std::optional<extent> largest(std::vector<extent> const& from) {
    std::optional<extent> best;
    for (auto const& each : from) {
      if (!best || each.size() > best->size()) {
        best = each;
      }
    }
    return best;
  }

  /// The smallest of at least `bytes`.
  [[nodiscard]] static std::optional<extent> smallest(std::vector<extent> const& from,
                                                      std::uint64_t bytes) {
    std::optional<extent> best;
    for (auto const& each : from) {
      if (each.size() >= bytes && (!best || each.size() < best->size())) {
        best = each;
      }
    }
    return best;
  }

  [[nodiscard]] bool stitch(wanted_tensor const& tensor) {
    auto const free = cut();
    auto const wholes = std::min<std::uint64_t>(free.wholes.size(), tensor.bytes / chunk_);
    auto const rest = tensor.bytes - wholes * chunk_;
    std::optional<extent> ending, beginning;
    if (rest > 0 && !(ending = smallest(free.endings, rest)) &&
        !(beginning = smallest(free.beginnings, rest))) {
      if ((ending = largest(free.endings))) {
        beginning = smallest(free.beginnings, rest - ending->size());
      }
      if (!beginning) {
        if (free.wholes.size() <= wholes || rest > chunk_) {
          return false;
        }
        ending.reset();
        beginning = free.wholes[wholes];
      }
    }
    std::vector<extent> parts;
    auto const in_ending = ending ? std::min(rest, ending->size()) : 0;
    if (ending) {
      parts.push_back({ending->end - in_ending, ending->end});
    }
    parts.insert(parts.end(), free.wholes.begin(),
                 free.wholes.begin() + static_cast<std::ptrdiff_t>(wholes));
    if (beginning) {
      parts.push_back({beginning->begin, beginning->begin + rest - in_ending});
    }
    draft_.stitch(tensor, parts);
    for (auto const& each : parts) {
      remove(each);
    }
    return true;
  }

  placement_draft& draft_;
  std::uint64_t chunk_;
  std::vector<extent> spaces_;  ///< all that is free, by address, never two that touch
};

}  // namespace

bool place_tightly(placement_draft& draft, std::vector<wanted_tensor> const& tensors,
                   std::span<std::uint32_t const> offered) {
  return tight_way{draft, offered}.place(tensors);
}

}  // namespace sluice::memhandover::detail
