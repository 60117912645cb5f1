#include "tests/runtime/torch_step/scripted_runtime.hpp"

#include <algorithm>

namespace sluice::testing {

script& the_script() {
  static script one;
  return one;
}

}  // namespace sluice::testing

using sluice::testing::the_script;

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
int sluice_begin(uint32_t micro_batch, uint32_t /*global_batch*/) {
  the_script().calls.push_back("begin " + std::to_string(micro_batch));
  return SLUICE_OK;
}
int sluice_arena_state(void) {
  return the_script().arena_state;
}
int sluice_commit_begin(int may_defer) {
  auto& script = the_script();
  script.calls.emplace_back(may_defer == 0 ? "commit_begin" : "commit_begin, may defer");
  if (script.commits_refused > 0) {
    --script.commits_refused;
    script.arena_state = SLUICE_ARENA_REVOKED;
    return 0;
  }
  return 1;
}
void sluice_commit_end(uint32_t samples, int outlived) {
  the_script().calls.push_back("commit_end " + std::to_string(samples) +
                               (outlived != 0 ? ", outlived" : ""));
}
int sluice_commit_resolve(uint32_t /*timeout_ms*/) {
  the_script().calls.emplace_back("commit_resolve");
  return 1;
}
void sluice_discard(void) {
  the_script().arena_state = SLUICE_ARENA_SOUND;
  the_script().calls.emplace_back("discard");
}
uint64_t sluice_discarded_ns(void) {
  return 1'500'000'000;
}
uint64_t sluice_survivors(void) {
  return the_script().survivors;
}
void sluice_enter(int enter) {
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
int sluice_wait_memory(uint64_t /*bytes*/, uint32_t /*timeout_ms*/) {
  auto& script = the_script();
  if (script.waits_in_vain == 0) {
    return 1;
  }
  script.waits_in_vain -= script.waits_in_vain > 0 ? 1 : 0;
  return 0;
}
int sluice_plan_start(uint32_t largest, int fixed) {
  auto& script = the_script();
  script.fixed = fixed != 0;
  script.next = largest;
  return SLUICE_OK;
}
uint32_t sluice_plan_next(uint32_t remaining, uint64_t* needed_bytes) {
  auto& script = the_script();
  *needed_bytes = script.needed_bytes;
  script.needed_bytes = 0;
  script.planned.push_back(*needed_bytes != 0 ? 0 : std::min(remaining, script.next));
  return script.planned.back();
}
void sluice_plan_committed(uint32_t /*samples*/, uint64_t /*bytes*/, uint64_t /*at_first_bytes*/,
                           double /*seconds*/) {}
void sluice_plan_discarded(uint32_t samples, int arena_state) {
  auto& script = the_script();
  script.calls.emplace_back(arena_state == SLUICE_ARENA_REVOKED   ? "plan_discarded, revoked"
                            : arena_state == SLUICE_ARENA_STARVED ? "plan_discarded, starved"
                                                                  : "plan_discarded, sound");
  if (!script.fixed) {
    script.next = std::max(samples / 2, 1U);
  }
}
}
