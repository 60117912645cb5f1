#include "memhandover/broker/detail/admission.hpp"

#include <algorithm>
#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "memhandover/base/shared_text.hpp"
#include "memhandover/ledger/client_entries.hpp"

namespace sluice::memhandover::detail {

job_standing admit(ledger_view const& view, client_traits const& kind, job_wish const& wish) {
  if (kind.kind != client_kind::training) {
    if (wish != job_wish{}) {
      throw error{
          error_kind::invalid_argument,
          std::string{"only training jobs have a priority and a minimum, and this joins as "} +
              kind.name};
    }
    return {};
  }
  auto const& shape = view.shape();
  auto const wanted = wish.chunks_of(shape);
  std::uint64_t promised = 0;
  std::string others;
  for (std::uint32_t slot = 0; slot < max_clients; ++slot) {
    auto const& entry = view.clients()[slot];
    auto const least = has_status(entry, client_status::live)
                           ? standing_of(entry, shape.chunk_count).least_chunks
                           : 0;
    if (least > 0) {
      promised += least;
      others += (others.empty() ? "" : ", ") + format_bytes(least * shape.chunk_bytes) + " to " +
                readable_text(text_of(entry.name)) + " (pid " + std::to_string(entry.pid.load()) +
                ")";
    }
  }
  if (wanted > 0 && promised + wanted > shape.chunk_count) {
    auto const left = shape.chunk_count - std::min<std::uint64_t>(promised, shape.chunk_count);
    auto const asked =
        wish.least_ppm > 0 ? wanted * shape.chunk_bytes : wish.least_bytes;  // never overflows
    throw error{error_kind::out_of_memory,
                "a minimum of " + format_bytes(asked) + " cannot be promised: the pool of " +
                    name_of(shape) + " has " + format_bytes(shape.bytes()) +
                    (others.empty() ? "" : ", of which are promised " + others) + ", so that " +
                    format_bytes(left * shape.chunk_bytes) +
                    " are left; write less (--min-memory of `sluice run`, SLUICE_MIN_MEMORY), or "
                    "make the pool larger (--memory, pool.memory of the policy)"};
  }
  return {wish.rank, static_cast<std::uint32_t>(wanted)};
}

}  // namespace sluice::memhandover::detail
