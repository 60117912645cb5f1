#include "nccl_shim/calls/question.hpp"

#include <pthread.h>

#include "nccl_shim/agreement/clock.hpp"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;

/// How often it is looked whether a rank that is waited for has died.
constexpr std::chrono::nanoseconds between_looks = 20ms;
/// After which it is told who is waited for, and again every so often.
constexpr std::chrono::nanoseconds first_notice = 30s;
constexpr std::chrono::nanoseconds between_notices = 60s;
/// Who waits for so long may be one of several that wait for each other.
constexpr std::chrono::nanoseconds between_rounds = 1ms;

/// Whether the time has come; then the next one is so much later.
bool comes(std::int64_t& at, std::chrono::nanoseconds between) noexcept {
  std::int64_t const now = monotonic_ns();
  if (now < at) {
    return false;
  }
  at = now + between.count();
  return true;
}

}  // namespace

sluice_agreed_call question::as_call(stream where) {
  return {.stream = where,
          .of = this,
          .ask = [](void* of) { static_cast<question*>(of)->ask(); },
          .is_agreed = [](void* of) -> int { return static_cast<question*>(of)->is_agreed(); },
          .withdraw = [](void* of) { return static_cast<question*>(of)->withdraw() ? 1 : 0; },
          .make =
              [](void* of) {
                std::unique_ptr<question> const self{static_cast<question*>(of)};
                self->make();
              },
          .drop =
              [](void* of) {
                std::unique_ptr<question> const self{static_cast<question*>(of)};
                self->drop();
              }};
}

int hand_over(std::unique_ptr<question> calls, stream where, int const& result, int otherwise) {
  sluice_agreed_call const handed = calls.release()->as_call(where);
  return gate()->make_agreed(&handed) == SLUICE_AGREED_MADE ? result : otherwise;
}

call_result::call_result(int& of_thread) noexcept
    : of_thread_{of_thread}, thread_{::pthread_self()} {}

void call_result::is(int result, known_communicator& of) const noexcept {
  if (::pthread_equal(thread_, ::pthread_self()) != 0) {
    of_thread_ = result;
  } else if (result != success && result != in_progress) {
    of.fail(result);
  }
}

waiting_calls::waiting_calls(std::span<collective const> calls, int& of_thread)
    : first_{calls.front()}, others_{calls.begin() + 1, calls.end()}, result_{of_thread} {}

void waiting_calls::make(known_communicator& of) const {
  calling const now{of};
  if (others_.empty()) {
    result_.is(make_calls({&first_, 1}, now), of);
    return;
  }
  std::vector<collective> all{first_};
  all.insert(all.end(), others_.begin(), others_.end());
  result_.is(make_calls(all, now), of);
}

void graph_launch::make(known_communicator& of) const noexcept {
  if (what_.make(what_.of) != 0) {
    result_.is(unhandled_cuda_error, of);
  }
}

void waiting_time::begin() noexcept {
  std::int64_t const now = monotonic_ns();
  report_at_ = now + first_notice.count();
  look_around_at_ = now + between_rounds.count();
}

bool waiting_time::looks() noexcept {
  return comes(look_at_, between_looks);
}

bool waiting_time::reports() noexcept {
  return comes(report_at_, between_notices);
}

bool waiting_time::looks_around() noexcept {
  return comes(look_around_at_, between_rounds);
}

std::string list(std::vector<unsigned> const& ranks) {
  std::string text;
  for (unsigned const rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

}  // namespace sluice::nccl_shim
