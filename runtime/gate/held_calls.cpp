/// What the submitter does while others have not agreed to a call yet: it goes on with what does not
/// depend on it.
#include <cstring>

#include "runtime/gate/agreed_calls.hpp"
#include "runtime/gate/own_thread.hpp"

namespace sluice::gate {

/// Holds that call, and what comes behind it, until nothing is held any more.
void submission_queue::hold_behind(thread_slot& self, std::uint64_t number) {
  hold(number);
  while (!held_.empty()) {
    std::uint64_t const first = held_.front();
    if (deferred_call& call = call_of(first); !call.agreed) {
      held_.pop_front();
      end_with(first, make(self, call));
    } else if (come_to_terms(self) != agreed_end::taken_back) {
      held_.pop_front();
      end_with(first, CUDA_SUCCESS);
    }
  }
  held_streams_.clear();
  held_events_.clear();
}

void submission_queue::hold(std::uint64_t number) {
  deferred_call const& call = call_of(number);
  held_.push_back(number);
  if (call.agreed) {
    agreed_ns_ = monotonic_ns();
  }
  held_streams_.insert(name_of(call.work.stream));
  if (call.event != nullptr) {
    held_events_.insert(call.event);
  }
}

/// Makes the first of the held calls, when all have agreed to it, or drops it.
agreed_end submission_queue::come_to_terms(thread_slot& self) {
  deferred_call const& call = call_of(held_.front());
  sluice_agreed_call agreed{};
  std::memcpy(&agreed, call.parameters.get(), sizeof(agreed));
  take_exemptions(self, call);
  own_work const work;
  return make_if_agreed(
      self, call.work, agreed, [&] { return is_dropped(call); }, [] { return false; },
      [&] {
        own_work::go_on();
        return take_one_beside(self);
      });
}

/// Takes the next call out of the queue, and makes or holds it. False if it has to wait.
bool submission_queue::take_one_beside(thread_slot& self) {
  std::uint64_t const number = taken_ + 1;
  if (accepted_.load(std::memory_order_acquire) < number ||
      number >= decide_at_.load(std::memory_order_acquire)) {
    return false;
  }
  deferred_call const& call = call_of(number);
  if (!call.enters && call.event == nullptr && !call.agreed) {
    return false;  // a step of a commit: all before it must have been made
  }
  // Agreed calls keep their order, which is the same on all ranks.
  if (call.agreed || comes_behind_held(call)) {
    hold(number);
    taken_ = number;
    return true;
  }
  return make_beside(self, number);
}

bool submission_queue::comes_behind_held(deferred_call const& call) const {
  void* const stream = name_of(call.work.stream);
  if (held_streams_.count(stream) != 0 ||
      (call.event != nullptr && held_events_.count(call.event) != 0)) {
    return true;
  }
  for (void* const held : held_streams_) {
    if (are_ordered(held, stream)) {
      return true;
    }
  }
  return false;
}

/// Makes a call from inside the gate. False if there is no room for it yet.
bool submission_queue::make_beside(thread_slot& self, std::uint64_t number) {
  gate& at = the_gate();
  deferred_call& call = call_of(number);
  CUresult result = CUDA_SUCCESS;
  if (!call.enters) {
    result = call.make(call.parameters.get());
  } else if (!is_dropped(call) && !(call.expendable && at.aborting())) {
    if (at.bounded() && !streams().has_room(self, call.work, at.run_ahead_bound())) {
      return false;
    }
    result = call.make(call.parameters.get());
    note_launch(at, self, call.work);
  }
  taken_ = number;
  end_with(number, result);
  return true;
}

}  // namespace sluice::gate
