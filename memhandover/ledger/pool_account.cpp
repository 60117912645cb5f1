#include "memhandover/ledger/pool_account.hpp"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "memhandover/base/bytes.hpp"
#include "memhandover/ledger/chunk_counts.hpp"
#include "memhandover/ledger/chunk_notes.hpp"

namespace sluice::memhandover {
namespace {

/// More models than a sentence can name are summed up.
constexpr std::size_t models_named = 5;

struct shares {
  std::uint64_t own = 0;
  std::uint64_t others = 0;   ///< of other training jobs
  std::uint64_t engines = 0;  ///< of other clients that are engines
  std::uint64_t free = 0;
  std::map<std::string, std::uint64_t> serving;  ///< by model; "" where nothing was said
};

shares count(ledger_view const& view, std::uint32_t slot) {
  shares result;
  auto const counted = count_chunks(view, [&](std::uint32_t chunk, chunk_state const& state) {
    if (state.who == owner::serving) {
      ++result.serving[state.client < max_clients ? chunk_note(view, state.client, chunk) : ""];
    } else if (is_owned(state.who) && state.client != slot) {
      ++(state.who == owner::engine ? result.engines : result.others);
    }
  });
  result.own = counted.by_client.at(slot);
  result.free = counted.nobodys();
  return result;
}

/// Models with what they hold, the largest first; what cannot be named comes last.
std::vector<std::pair<std::string, std::uint64_t>> largest_models(shares const& of) {
  std::vector<std::pair<std::string, std::uint64_t>> models{of.serving.begin(), of.serving.end()};
  std::stable_sort(models.begin(), models.end(), [](auto const& a, auto const& b) {
    return a.first.empty() != b.first.empty() ? b.first.empty() : a.second > b.second;
  });
  return models;
}

std::string models_text(shares const& of, std::uint64_t chunk_bytes) {
  std::uint64_t all = 0;
  std::uint64_t rest = 0;
  std::size_t named = 0;
  std::string names;
  for (auto const& [model, chunks] : largest_models(of)) {
    all += chunks;
    if (model.empty() || named == models_named) {
      rest += chunks;
      continue;
    }
    names += (names.empty() ? "" : ", ") + model + " " + format_bytes(chunks * chunk_bytes);
    ++named;
  }
  if (rest > 0 && !names.empty()) {
    names += ", others " + format_bytes(rest * chunk_bytes);
  }
  return "models hold " + format_bytes(all * chunk_bytes) +
         (names.empty() ? "" : " (" + names + ")");
}

/// Which of so many free chunks a job that asks does not get.
std::string kept_text(std::uint64_t free, ledger_header const& header) {
  auto const to_parked = std::min<std::uint64_t>(free, header.grantable_to_parked.load());
  auto const to_all = std::min<std::uint64_t>(to_parked, header.grantable.load());
  std::string text;
  auto const add = [&](std::uint64_t chunks, char const* what) {
    if (chunks > 0) {
      text += (text.empty() ? ", of which " : " and ") + format_bytes(chunks * header.chunk_bytes) +
              (text.empty() ? " are kept for " : " for ") + what;
    }
  };
  add(free - to_parked, "cold starts");
  add(to_parked - to_all, "jobs that are parked");
  return text;
}

}  // namespace

std::string account_of(ledger_view const& view, std::uint32_t slot) {
  auto const& header = view.header();
  auto const counted = count(view, slot);
  auto const bytes = [&](std::uint64_t chunks) {
    return format_bytes(chunks * header.chunk_bytes);
  };
  // The job's own words lag behind the ledger by a grant at most: what is not persistent is the
  // arena's.
  auto const persistent =
      std::min<std::uint64_t>(counted.own, view.mailbox(slot).persistent_chunks.load());
  std::string text = "of the pool's " + bytes(header.chunk_count) + " this job holds " +
                     bytes(persistent) + " for good and " + bytes(counted.own - persistent) +
                     " in its step arena, ";
  if (!counted.serving.empty()) {
    text += models_text(counted, header.chunk_bytes) + ", ";
  }
  if (counted.others > 0) {
    text += "other training jobs hold " + bytes(counted.others) + ", ";
  }
  if (counted.engines > 0) {
    text += "engines hold " + bytes(counted.engines) + ", ";
  }
  text += "and " + bytes(counted.free) + " are free";
  return text + kept_text(counted.free, header);
}

std::string remedies(ledger_view const& view, std::uint32_t slot) {
  auto const counted = count(view, slot);
  std::string text;
  auto add = [&text](std::string const& one) { text += (text.empty() ? "" : "; ") + one; };
  if (auto const samples = view.mailbox(slot).micro_batch.load(); samples > 1) {
    add("a smaller micro_batch (now " + std::to_string(samples) + " samples)");
  }
  add("a larger pool (--memory of `sluice run`, pool.memory of the policy)");
  std::string names;
  std::size_t named = 0;
  for (auto const& [model, chunks] : largest_models(counted)) {
    if (!model.empty() && named++ < models_named) {
      names += (names.empty() ? "" : ", ") + model;
    }
  }
  if (!names.empty()) {
    add("a shorter idle timeout of " + names);
  } else if (!counted.serving.empty()) {
    add("shorter idle timeouts of models");
  }
  if (counted.others > 0) {
    add("fewer training jobs in this pool");
  }
  if (counted.engines > 0) {
    add("engines that keep less, or fewer of them");
  }
  return text;
}

}  // namespace sluice::memhandover
