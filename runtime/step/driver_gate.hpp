/// The preloaded gate's table, as the interface that the training memory knows.
#pragma once

#include <cstdint>
#include <optional>

#include "abi/gate_api.h"
#include "memhandover/ledger/layout.hpp"
#include "runtime/step/launch_gate.hpp"

namespace sluice::step {

class driver_gate final : public launch_gate {
 public:
  explicit driver_gate(sluice_gate_api const& table) : table_(table) {}
  bool close(std::int64_t deadline_ns) override { return table_.close(deadline_ns) == 0; }
  bool close_all(std::int64_t deadline_ns) override { return table_.close_all(deadline_ns) == 0; }
  bool wait_idle(std::int64_t deadline_ns) override { return table_.wait_idle(deadline_ns) == 0; }
  void open() override { table_.open(); }
  void set_parked(bool parked) override { table_.set_parked(parked ? 1 : 0); }
  void abort_begin() override { table_.abort_begin(); }
  void abort_end() override { table_.abort_end(); }
  void set_urgent(bool urgent) override { table_.set_urgent(urgent ? 1 : 0); }
  void flush() override { table_.flush(); }
  bool defer_commit(int (*decide)(void* of), void* of) override {
    return table_.commit_begin(decide, of) != 0;
  }
  void end_commit(void (*made)(void* of), void* of) override { table_.commit_end(made, of); }
  std::optional<bool> resolve_commit(std::int64_t deadline_ns) override {
    int const counts = table_.commit_resolve(deadline_ns);
    return counts < 0 ? std::nullopt : std::optional{counts != 0};
  }
  bool await_commit(std::int64_t deadline_ns) override {
    return table_.commit_made(deadline_ns) != 0;
  }
  void allow_inside(bool allow) override {
    if (auto const* const others = table_.agreement(); others != nullptr) {
      others->allow_inside(allow ? 1 : 0);
    }
  }
  bool end_with(void* communicator) override {
    auto const* const others = table_.agreement();
    return others != nullptr && others->end_with(communicator) != 0;
  }
  /// As in sluice_agreement.
  void may_pause(bool may) {
    if (auto const* const others = table_.agreement(); others != nullptr) {
      others->may_pause(may ? 1 : 0);
    }
  }
  void resolve(std::int64_t deadline_ns) {
    if (auto const* const others = table_.agreement(); others != nullptr) {
      static_cast<void>(others->resolve(deadline_ns));
    }
  }
  bool keep(void (*agreed)(void* of), void* of) override {
    auto const* const others = table_.agreement();
    return others != nullptr ? others->keep(agreed, of) != 0 : launch_gate::keep(agreed, of);
  }
  void run_again() override {
    if (auto const* const others = table_.agreement(); others != nullptr) {
      others->run_again();
    }
  }
  [[nodiscard]] bool others_may_wait() const override {
    auto const* const others = table_.agreement();
    return others != nullptr && others->others_may_wait() != 0;
  }
  [[nodiscard]] std::int64_t unit_ended_ns() const override { return table_.unit_ended(); }
  [[nodiscard]] std::int64_t demand_seen_ns() const override { return table_.demand_seen(); }
  void demand_answered(memhandover::demand const& which) override {
    table_.demand_answered(memhandover::numbered{which.number, which.chunks}.pack());
  }

 private:
  sluice_gate_api const& table_;
};

}  // namespace sluice::step
