#include "tests/runtime/torch_step/scripted_runtime.hpp"

#include <algorithm>
#include <utility>

namespace sluice::testing {
namespace {

using numbers = std::vector<std::int64_t>;

std::string joined(std::string words, numbers const& all) {
  for (auto const number : all) {
    words += " " + std::to_string(number);
  }
  return words;
}

/// Remembers a call, and how it is answered: `otherwise`, unless the script says something else.
numbers called(std::string const& name, numbers const& with, numbers otherwise = {}) {
  auto& script = the_script();
  if (script.before_call) {
    script.before_call();
  }
  auto& answers = script.answers[name];
  if (!answers.empty()) {
    otherwise = std::move(answers.front());
    answers.pop_front();
  }
  auto words = joined(name, with);
  script.sequence.push_back(otherwise.empty() ? words : joined(words + " =", otherwise));
  return otherwise;
}

/// Whether the script says that the commit which is open does not count.
bool will_be_dropped() {
  for (auto const& answer : the_script().answers["commit_resolve"]) {
    if (answer[0] >= 0) {
      return answer[0] == 0;
    }
  }
  return false;
}

void drop_launches(bool drop) {
  auto& script = the_script();
  script.dropping = drop;
  if (script.drop_launches) {
    script.drop_launches(drop);
  }
}

}  // namespace

void script::lose(int state) {
  arena_state = state;
  if (memory_goes) {
    memory_goes();
  }
}

script& the_script() {
  static script one;
  return one;
}

}  // namespace sluice::testing

using namespace sluice::testing;

extern "C" {

char const* sluice_last_error(void) {
  return "the script has no error";
}
int sluice_join_host(void) {
  return SLUICE_OK;
}
int sluice_backend(void) {
  return the_script().inherited ? 0 : 1;
}
int sluice_begin(uint32_t micro_batch, uint32_t global_batch) {
  called("begin", {micro_batch, global_batch});
  if (the_script().micro_batch_begins) {
    the_script().micro_batch_begins();
  }
  the_script().calls.push_back("begin " + std::to_string(micro_batch));
  return SLUICE_OK;
}
int sluice_arena_state(void) {
  return the_script().arena_state;
}
int sluice_commit_begin(int may_defer) {
  auto& script = the_script();
  script.calls.emplace_back(may_defer == 0 ? "commit_begin" : "commit_begin, may defer");
  bool const sound = script.arena_state == SLUICE_ARENA_SOUND;
  bool const refused = script.commits_refused > 0;
  script.commits_refused -= refused ? 1 : 0;
  auto const start = called("commit_begin", {may_defer}, {sound && !refused ? 1 : 0})[0];
  bool const dropped = start == 2 && will_be_dropped();
  if (sound && (start == 0 || dropped)) {
    script.lose(SLUICE_ARENA_REVOKED);
  }
  if (dropped) {
    drop_launches(true);
  }
  return static_cast<int>(start);
}
void sluice_commit_end(uint32_t samples, int outlived) {
  called("commit_end", {samples, outlived});
  the_script().calls.push_back("commit_end " + std::to_string(samples) +
                               (outlived != 0 ? ", outlived" : ""));
}
int sluice_commit_resolve(uint32_t /*timeout_ms*/) {
  the_script().calls.emplace_back("commit_resolve");
  auto const counts = called("commit_resolve", {}, {1})[0];
  if (the_script().dropping && counts >= 0) {
    drop_launches(false);
  }
  return static_cast<int>(counts);
}
int sluice_commit_made(uint32_t /*timeout_ms*/) {
  return static_cast<int>(called("commit_made", {}, {1})[0]);
}
void sluice_discard(void) {
  called("discard", {});
  the_script().arena_state = SLUICE_ARENA_SOUND;
  the_script().calls.emplace_back("discard");
}
uint64_t sluice_discarded_ns(void) {
  return 1'500'000'000;
}
uint64_t sluice_survivors(void) {
  auto const& script = the_script();
  return script.count_survivors ? script.count_survivors() : script.survivors;
}
void sluice_enter(int enter) {
  called("enter", {enter});
  the_script().inside = enter != 0;
  the_script().calls.emplace_back(enter != 0 ? "enter" : "leave");
}
uint64_t sluice_arena_peak(void) {
  return 100;
}
uint64_t sluice_pool_bytes(void) {
  return 2000;
}
uint64_t sluice_reachable_bytes(void) {
  return the_script().reachable_bytes;
}
char const* sluice_shortage(void) {
  return "The script holds it all. Ask the test.";
}
int sluice_wait_memory(uint64_t bytes, uint32_t /*timeout_ms*/) {
  auto& script = the_script();
  bool const in_vain = script.waits_in_vain != 0;
  script.waits_in_vain -= script.waits_in_vain > 0 ? 1 : 0;
  return static_cast<int>(
      called("wait_memory", {static_cast<std::int64_t>(bytes)}, {in_vain ? 0 : 1})[0]);
}
int sluice_plan_start(uint32_t largest, int fixed, int /*may_recompute*/) {
  auto& script = the_script();
  called("plan_start", {largest, fixed});
  script.fixed = fixed != 0;
  script.next = largest;
  return SLUICE_OK;
}
uint32_t sluice_plan_next(uint32_t remaining, uint64_t* needed_bytes, int* recompute) {
  auto& script = the_script();
  numbers otherwise{std::min(remaining, script.next)};
  if (auto const needed = std::exchange(script.needed_bytes, 0); needed != 0) {
    otherwise = {0, static_cast<std::int64_t>(needed)};
  }
  auto const planned = called("plan_next", {remaining}, otherwise);
  *recompute = 0;
  *needed_bytes = planned.size() > 1 ? static_cast<std::uint64_t>(planned[1]) : 0;
  script.planned.push_back(static_cast<std::uint32_t>(planned[0]));
  return script.planned.back();
}
void sluice_plan_committed(uint32_t samples, int /*recomputed*/, uint64_t /*bytes*/,
                           uint64_t /*at_first_bytes*/, double /*seconds*/) {
  called("plan_committed", {samples});
}
void sluice_plan_discarded(uint32_t samples, int /*recomputed*/, int arena_state) {
  auto& script = the_script();
  called("plan_discarded", {samples, arena_state});
  script.calls.emplace_back(arena_state == SLUICE_ARENA_REVOKED   ? "plan_discarded, revoked"
                            : arena_state == SLUICE_ARENA_STARVED ? "plan_discarded, starved"
                                                                  : "plan_discarded, sound");
  if (!script.fixed) {
    script.next = std::max(samples / 2, 1U);
  }
}
}
