/// What a training job has before the others of its pool: its priority, and its minimum. Who starts it says both (`sluice run`), the
/// broker checks them and writes them into the job's entry as it joins, and from there all read them.
///
///   write_client(view, slot, {.kind = client_kind::training, .standing = {priority::high, 12}});
///   auto const of = standing_of(view.clients()[slot], view.header().chunk_count);
///   of.least_chunks;   // 12
///
/// Thread-safety: any thread.
#pragma once

#include <cstdint>
#include <string_view>

#include "memhandover/ledger/layout.hpp"

namespace sluice::memhandover {

struct job_standing {
  priority rank = priority::normal;
  std::uint32_t least_chunks = 0;  ///< that no demand takes

  bool operator==(job_standing const&) const = default;
};

/// Of the client that has the entry. A word that is no priority counts as `normal`, a minimum beyond the pool as all of it.
[[nodiscard]] job_standing standing_of(client_entry const& entry,
                                       std::uint32_t chunk_count) noexcept;

/// "low", "normal" or "high", as on the command line and in status.
[[nodiscard]] char const* name_of(priority rank) noexcept;
/// The priority of that name. Throws `invalid_argument` naming those that there are.
[[nodiscard]] priority priority_named(std::string_view name);

}  // namespace sluice::memhandover
