/// Tells a request that a client sends again, since it was refused, from one that is new: what nobody would have asked for had the
/// first been answered is no demand.
///
/// It goes by what the client calls its request, and by nothing else. An address would not do, since behind a proxy all clients have
/// one; nor would contents, which are the same for all requests of many a client. Each refusal stands for one that is sent again, from
/// then on until twice the time that the client was told to wait has passed, and ten seconds for a pause of its own.
///
///   retries again;
///   again.on_refusal(retries::mark_of("order-17"), now, 2s);
///   again.take(retries::mark_of("order-17"), now + 2s);   // true: it has come before
///
/// Bounded: of more than 4096 refusals at a time the oldest are forgotten. One thread at a time. Reads no clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <unordered_map>

#include "scheduler/units.hpp"

namespace sluice::scheduler {

/// Stands for what a client calls its request; 0: nothing.
using request_mark = std::uint64_t;

class retries {
 public:
  static constexpr std::size_t most_known = 4096;

  /// 0 for an empty text alone.
  [[nodiscard]] static request_mark mark_of(std::string_view id) noexcept;

  void on_refusal(request_mark request, instant now, seconds retry_after);
  /// Whether it was refused, and is expected again; which it is not any more then.
  [[nodiscard]] bool take(request_mark request, instant now);

 private:
  void forget_old(instant now);

  struct refusal {
    request_mark request;
    instant until;
  };
  std::unordered_map<request_mark, instant> expected_;
  std::deque<refusal> order_;  // some of which have come, or have been refused anew
};

}  // namespace sluice::scheduler
