#include "nccl_shim/pending_calls.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "nccl_shim/clock.hpp"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;

/// How often it is looked whether a rank that is waited for has died.
constexpr std::chrono::nanoseconds between_looks = 20ms;
/// After which it is told who is waited for, and again every so often.
constexpr std::chrono::nanoseconds first_notice = 30s;
constexpr std::chrono::nanoseconds between_notices = 60s;

thread_local constinit int inside [[gnu::tls_model("initial-exec")]] = 0;

std::string list(std::vector<unsigned> const& ranks) {
  std::string text;
  for (unsigned const rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

/// What the ranks are asked about.
class question {
 public:
  question(numbered_call const& what, std::shared_ptr<known_communicator> of,
           std::uint64_t micro_batch, bool is_of_all_ranks)
      : of_{std::move(of)},
        what_{what},
        is_of_micro_batch_{micro_batch != 0},
        is_of_all_ranks_{is_of_all_ranks} {
    // A micro-batch belongs to the epoch that it began in: what this process runs again has had another
    // one begin before, so that nothing of the try before can be granted any more.
    if (is_of_micro_batch_ && std::exchange(of_->last_micro_batch, micro_batch) != micro_batch) {
      begins_in_ = agreement().epoch();
    }
  }
  question(question const&) = delete;
  question& operator=(question const&) = delete;
  virtual ~question() = default;

  /// As the gate sees it. `make` and `drop` end it.
  [[nodiscard]] sluice_agreed_call as_call(stream where) {
    return {.stream = where,
            .of = this,
            .ask = [](void* of) { static_cast<question*>(of)->ask(); },
            .is_agreed = [](void* of) -> int { return static_cast<question*>(of)->is_agreed(); },
            .withdraw = [](void* of) { return static_cast<question*>(of)->withdraw() ? 1 : 0; },
            .make =
                [](void* of) {
                  std::unique_ptr<question> const self{static_cast<question*>(of)};
                  self->perform();
                  if (self->asked_) {
                    self->agreement().launched();
                  }
                },
            .drop =
                [](void* of) {
                  std::unique_ptr<question> const self{static_cast<question*>(of)};
                  self->drop();
                }};
  }

 protected:
  /// All have agreed, or never will: `of_` says why.
  virtual void perform() = 0;

  [[nodiscard]] known_communicator& of() const noexcept { return *of_; }

 private:
  /// What becomes of it, as the gate calls that.
  enum answer : int { not_yet = 0, agreed = 1, dropped = 2 };

  [[nodiscard]] cut& agreement() const { return of_->ranks->agreement(); }

  void ask() {
    if (of_->ranks == nullptr || !is_of_all_ranks_ || of_->trouble() != success) {
      return;  // nobody is to be asked, or it will not be made anyhow
    }
    if (std::exchange(asked_, true)) {
      agreement().resume();
      return;
    }
    if (!is_of_micro_batch_) {
      agreement().follow(agreement().epoch());
    } else if (begins_in_) {
      agreement().follow(*begins_in_);
    }
    agreement().arrive(what_);
    notice_at_ = monotonic_ns() + first_notice.count();
  }

  [[nodiscard]] answer is_agreed() {
    if (!asked_ || of_->trouble() != success) {
      return agreed;
    }
    switch (agreement().await(0)) {
      case outcome::granted:
        return agreed;
      case outcome::late:
        break;
      case outcome::dropped:
        if (is_of_micro_batch_) {
          asked_ = false;
          return dropped;
        }
        agreement().arrive(what_);  // it comes before the micro-batch that was dropped
        break;
      case outcome::lost:
        complain_of_death();
        return agreed;
      case outcome::differs:
        of_->fail_by_difference();
        return agreed;
    }
    std::int64_t const now = monotonic_ns();
    if (now >= look_at_) {
      look_at_ = now + between_looks.count();
      of_->ranks->look_for_deaths();
    }
    if (now >= notice_at_) {
      complain_of_delay();
      notice_at_ += between_notices.count();
    }
    return not_yet;
  }

  [[nodiscard]] bool withdraw() {
    if (!asked_) {
      return false;
    }
    bool const owed = agreement().pause(false) >= agreement().number();
    if (owed) {
      agreement().resume();
    }
    return owed;
  }

  /// This process has dropped it, or all have.
  void drop() {
    if (asked_) {  // it has been withdrawn
      agreement().resume_without();
    }
  }

  void complain_of_death() {
    of_->fail(remote_error);
    std::fprintf(stderr, "sluice: rank %u has died; collective %llu, %s, will not be made\n",
                 agreement().lost().value_or(0),
                 static_cast<unsigned long long>(agreement().number()), to_text(what_).c_str());
  }

  void complain_of_delay() const {
    std::fprintf(stderr, "sluice: collective %llu, %s, waits for ranks %s\n",
                 static_cast<unsigned long long>(agreement().number()), to_text(what_).c_str(),
                 list(agreement().missing()).c_str());
  }

  std::shared_ptr<known_communicator> of_;
  numbered_call what_;
  bool is_of_micro_batch_;
  std::optional<std::uint16_t> begins_in_;  // the epoch of the micro-batch that it is the first of
  bool is_of_all_ranks_;
  bool asked_ = false;
  std::int64_t look_at_ = 0;
  std::int64_t notice_at_ = 0;
};

/// A call of NCCL's, or a group.
class pending_call final : public question {
 public:
  pending_call(std::span<collective const> calls, std::shared_ptr<known_communicator> first,
               std::uint64_t micro_batch, int& direct)
      : question{numbered(calls), std::move(first), micro_batch, are_of_all_ranks(calls)},
        calls_{calls.begin(), calls.end()},
        direct_{direct} {}

 private:
  /// Whether all ranks of one communicator take part, and of no other.
  [[nodiscard]] static bool are_of_all_ranks(std::span<collective const> calls) noexcept {
    return std::all_of(calls.begin(), calls.end(), [&calls](collective const& call) {
      return call.on == calls.front().on && is_of_all(call.what);
    });
  }

  void perform() override {
    int result = of().trouble();
    if (result == success) {
      inside_nccl const here;
      result = perform_all();
    }
    if (caller_ == &inside) {  // the thread that waits for the result
      direct_ = result;
    } else if (result != success && result != in_progress) {
      of().fail(result);
    }
  }

  [[nodiscard]] int perform_all() const noexcept {
    if (calls_.size() == 1) {
      return nccl_shim::perform(calls_.front());
    }
    auto* const start = real<int()>("ncclGroupStart");
    auto* const end = real<int()>("ncclGroupEnd");
    int first = start();
    for (auto const& call : calls_) {
      int const result = first == success ? nccl_shim::perform(call) : first;
      first = first == success ? result : first;
    }
    int const ended = end();
    return first == success ? ended : first;
  }

  std::vector<collective> calls_;
  int const* caller_ = &inside;  // tells the thread
  int& direct_;                  // of its
};

/// The end of a micro-batch.
class pending_end final : public question {
 public:
  pending_end(std::shared_ptr<known_communicator> of, std::uint64_t micro_batch,
              void (*keep)(void* of), void* keep_of, bool& kept)
      : question{numbered_end(), std::move(of), micro_batch, true},
        keep_{keep},
        keep_of_{keep_of},
        kept_{kept} {}

 private:
  void perform() override {
    if (of().trouble() == success) {
      keep_(keep_of_);
      kept_ = true;
    }
  }

  void (*keep_)(void* of);
  void* keep_of_;
  bool& kept_;
};

}  // namespace

void known_communicator::fail_by_difference() noexcept {
  auto const found = ranks->agreement().difference();
  if (fail(invalid_usage) && found) {
    std::fprintf(
        stderr, "sluice: ranks differ in collective %llu: rank %u calls %s, rank %u calls %s\n",
        static_cast<unsigned long long>(found->number), found->ranks[0],
        to_text(found->calls[0]).c_str(), found->ranks[1], to_text(found->calls[1]).c_str());
  }
}

sluice_gate_api const* gate() noexcept {
  static sluice_gate_api const* const found = []() -> sluice_gate_api const* {
    char const* const run = std::getenv("SLUICE_RUN");
    auto* const table =
        reinterpret_cast<sluice_gate_api const* (*)()>(::dlsym(RTLD_DEFAULT, "sluice_gate_table"));
    if (run == nullptr || *run == '\0' || table == nullptr) {
      return nullptr;
    }
    auto const* const offered = table();
    constexpr auto needed = offsetof(sluice_gate_api, holds) + sizeof(void*);
    return offered->size >= needed ? offered : nullptr;
  }();
  return found;
}

inside_nccl::inside_nccl() noexcept {
  ++inside;
}
inside_nccl::~inside_nccl() {
  --inside;
}
bool inside_nccl::here() noexcept {
  return inside != 0;
}

int hand_over(std::span<collective const> calls, std::shared_ptr<known_communicator> of,
              std::uint64_t micro_batch) {
  int result = success;
  auto call = std::make_unique<pending_call>(calls, std::move(of), micro_batch, result);
  sluice_agreed_call const handed = call.release()->as_call(calls.front().where);
  // What has been left has its errors come later, and what has been dropped succeeds undone.
  return gate()->make_agreed(&handed) == SLUICE_AGREED_MADE ? result : int{success};
}

bool hand_over_end(std::shared_ptr<known_communicator> of, std::uint64_t micro_batch,
                   void (*keep)(void* of), void* keep_of) {
  bool kept = false;
  auto end = std::make_unique<pending_end>(std::move(of), micro_batch, keep, keep_of, kept);
  sluice_agreed_call const handed = end.release()->as_call(nullptr);
  static_cast<void>(gate()->make_agreed_now(&handed));
  return kept;
}

}  // namespace sluice::nccl_shim
