#include "nccl_shim/communicators.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "nccl_shim/clock.hpp"
#include "runtime/gate/gate_api.h"

namespace sluice::nccl_shim {
namespace {

using namespace std::chrono_literals;

/// How often it is looked whether a rank that is waited for has died.
constexpr std::chrono::nanoseconds between_looks = 20ms;
/// After which it is told who is waited for, and again every so often.
constexpr std::chrono::nanoseconds first_notice = 30s;
constexpr std::chrono::nanoseconds between_notices = 60s;

thread_local constinit int inside [[gnu::tls_model("initial-exec")]] = 0;

/// The gate's table; nullptr if there is no gate, or this process is not to share.
sluice_gate_api const* gate() {
  static sluice_gate_api const* const found = []() -> sluice_gate_api const* {
    char const* const run = std::getenv("SLUICE_RUN");
    auto* const table =
        reinterpret_cast<sluice_gate_api const* (*)()>(::dlsym(RTLD_DEFAULT, "sluice_gate_table"));
    if (run == nullptr || *run == '\0' || table == nullptr) {
      return nullptr;
    }
    auto const* const offered = table();
    constexpr auto needed = offsetof(sluice_gate_api, make_agreed) + sizeof(void*);
    return offered->size >= needed ? offered : nullptr;
  }();
  return found;
}

/// What is known of a communicator.
struct known_communicator {
  std::unique_ptr<membership> ranks;  ///< nullptr: they do not agree
  std::atomic<int> error{success};
  std::atomic<bool> given_up{false};

  /// Why calls are not made.
  [[nodiscard]] int trouble() const noexcept {
    return given_up.load(std::memory_order_acquire) ? int{remote_error}
                                                    : error.load(std::memory_order_acquire);
  }
  void fail(int why) noexcept {
    int none = success;
    error.compare_exchange_strong(none, why, std::memory_order_acq_rel);
  }
};

struct registry {
  std::shared_mutex lock;
  std::unordered_map<communicator, std::shared_ptr<known_communicator>> all;  // guarded by lock
};

registry& the_registry() {
  static registry& one = *std::make_unique<registry>().release();  // threads call until the end
  return one;
}

std::shared_ptr<known_communicator> find(communicator which) {
  registry& in = the_registry();
  std::shared_lock const guard{in.lock};
  auto const found = in.all.find(which);
  return found != in.all.end() ? found->second : nullptr;
}

/// The same; one that is not known yet is from now on.
std::shared_ptr<known_communicator> know(communicator which) {
  if (auto known = find(which); known != nullptr) {
    return known;
  }
  registry& in = the_registry();
  std::lock_guard const guard{in.lock};
  auto& place = in.all[which];
  if (place == nullptr) {
    place = std::make_shared<known_communicator>();
  }
  return place;
}

std::string list(std::vector<unsigned> const& ranks) {
  std::string text;
  for (unsigned const rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

/// A call, or a group, on its way to NCCL.
class pending_call {
 public:
  pending_call(std::span<collective const> calls, std::shared_ptr<known_communicator> of)
      : calls_{calls.begin(), calls.end()}, of_{std::move(of)} {}

  /// Hands it over to the gate.
  static int hand_over(std::unique_ptr<pending_call> call) {
    pending_call* const self = call.release();  // `make` ends it
    int result = success;
    self->direct_ = &result;
    sluice_agreed_call const handed{
        .stream = self->calls_.front().where,
        .of = self,
        .ask = [](void* of) { static_cast<pending_call*>(of)->ask(); },
        .is_agreed =
            [](void* of) { return static_cast<int>(static_cast<pending_call*>(of)->is_agreed()); },
        .withdraw =
            [](void* of) { return static_cast<int>(static_cast<pending_call*>(of)->withdraw()); },
        .make =
            [](void* of) {
              std::unique_ptr<pending_call> {
                static_cast<pending_call*>(of)
                } -> make();
            }};
    self->caller_ = &inside;
    int const how = gate()->make_agreed(&handed);
    if (how >= 0) {
      return how == 1 ? result : int{success};
    }
    std::unique_ptr<pending_call> const refused{self};
    std::fprintf(
        stderr,
        "sluice: %s was called inside of a micro-batch, which may be discarded while other "
        "ranks wait for it; call it between micro-batches\n",
        name_of(self->calls_.front().what));
    return invalid_usage;
  }

 private:
  [[nodiscard]] cut& agreement() const { return of_->ranks->agreement(); }

  void ask() {
    if (of_->ranks == nullptr || !is_of_all_ranks() || of_->trouble() != success) {
      return;  // nobody is to be asked, or it will not be made anyhow
    }
    if (std::exchange(asked_, true)) {
      agreement().resume();
    } else {
      agreement().arrive(numbered(calls_));
      notice_at_ = monotonic_ns() + first_notice.count();
    }
  }

  [[nodiscard]] bool is_agreed() {
    if (!asked_ || of_->trouble() != success) {
      return true;
    }
    switch (agreement().await(0)) {
      case outcome::granted:
        return true;
      case outcome::late:
      case outcome::dropped:  // no pause of this library's begins an epoch
        break;
      case outcome::lost:
        complain_of_death();
        return true;
      case outcome::differs:
        complain_of_difference();
        return true;
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
    return false;
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

  void make() {
    int result = of_->trouble();
    if (result == success) {
      inside_nccl const here;
      result = perform_all();
    }
    if (asked_) {
      agreement().launched();
    }
    if (caller_ == &inside) {  // the thread that waits for the result
      *direct_ = result;
    } else if (result != success && result != in_progress) {
      of_->fail(result);
    }
  }

  /// Whether all ranks of one communicator take part, and of no other.
  [[nodiscard]] bool is_of_all_ranks() const noexcept {
    return std::all_of(calls_.begin(), calls_.end(), [this](collective const& call) {
      return call.on == calls_.front().on && is_of_all(call.what);
    });
  }

  [[nodiscard]] int perform_all() const noexcept {
    if (calls_.size() == 1) {
      return perform(calls_.front());
    }
    auto* const start = real<int()>("ncclGroupStart");
    auto* const end = real<int()>("ncclGroupEnd");
    int first = start();
    for (auto const& call : calls_) {
      int const result = first == success ? perform(call) : first;
      first = first == success ? result : first;
    }
    int const ended = end();
    return first == success ? ended : first;
  }

  void complain_of_death() {
    of_->fail(remote_error);
    std::fprintf(stderr, "sluice: rank %u has died; collective %llu, %s, will not be made\n",
                 agreement().lost().value_or(0),
                 static_cast<unsigned long long>(agreement().number()),
                 to_text(numbered(calls_)).c_str());
  }

  void complain_of_difference() {
    of_->fail(invalid_usage);
    if (auto const found = agreement().difference()) {
      std::fprintf(
          stderr, "sluice: ranks differ in collective %llu: rank %u calls %s, rank %u calls %s\n",
          static_cast<unsigned long long>(found->number), found->ranks[0],
          to_text(found->calls[0]).c_str(), found->ranks[1], to_text(found->calls[1]).c_str());
    }
  }

  void complain_of_delay() const {
    std::fprintf(stderr, "sluice: collective %llu, %s, waits for ranks %s\n",
                 static_cast<unsigned long long>(agreement().number()),
                 to_text(numbered(calls_)).c_str(), list(agreement().missing()).c_str());
  }

  std::vector<collective> calls_;
  std::shared_ptr<known_communicator> of_;  // the first call's
  bool asked_ = false;
  std::int64_t look_at_ = 0;
  std::int64_t notice_at_ = 0;
  int const* caller_ = nullptr;  // tells the thread
  int* direct_ = nullptr;
};

}  // namespace

void* real_function(char const* name) noexcept {
  // By its handle, since libraries that are opened locally are in nobody else's scope.
  void* const library = ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return ::dlsym(RTLD_NEXT, name);
  }
  void* const found = ::dlsym(library, name);
  ::dlclose(library);  // one reference less; it stays for those who have it loaded
  return found;
}

bool is_watching() noexcept {
  return inside == 0 && gate() != nullptr;
}

inside_nccl::inside_nccl() noexcept {
  ++inside;
}
inside_nccl::~inside_nccl() {
  --inside;
}

void flush() noexcept {
  gate()->flush();
}

std::unique_ptr<membership> join(std::string const& key) {
  char const* const folder = std::getenv("SLUICE_RUNTIME_DIR");
  return folder != nullptr && *folder != '\0' ? membership::join(folder, key) : nullptr;
}

void enlist(communicator made, std::unique_ptr<membership> of) {
  auto known = std::make_shared<known_communicator>();
  int ranks = 0;
  int rank = 0;
  bool agrees = false;
  {
    inside_nccl const here;
    auto* const count = real<int(communicator, int*)>("ncclCommCount");
    auto* const own = real<int(communicator, int*)>("ncclCommUserRank");
    agrees = of != nullptr && count(made, &ranks) == success && own(made, &rank) == success;
  }
  if (agrees && of->complete(static_cast<unsigned>(rank), static_cast<unsigned>(ranks))) {
    known->ranks = std::move(of);
  } else if (agrees && rank == 0) {
    std::fprintf(
        stderr,
        "sluice: %u of a communicator's %d ranks are under `sluice run` on this host (at most "
        "%u): its ranks do not agree where they pause, and a pause may wait for others\n",
        of->joined(), ranks, max_ranks);
  }
  registry& in = the_registry();
  std::lock_guard const guard{in.lock};
  in.all[made] = std::move(known);
}

std::optional<std::string> key_of_child(communicator parent, int colour) {
  auto const known = find(parent);
  if (known == nullptr || known->ranks == nullptr) {
    return std::nullopt;
  }
  auto key = known->ranks->key() + '-' + std::to_string(known->ranks->next_child());
  return colour == no_colour ? std::nullopt : std::optional{key + '-' + std::to_string(colour)};
}

int submit(std::span<collective const> calls) {
  auto first = know(calls.front().on);
  for (collective const& call : calls) {
    auto const known = call.on == calls.front().on ? first : know(call.on);
    if (int const earlier = known->trouble(); earlier != success) {
      return earlier;
    }
  }
  return pending_call::hand_over(std::make_unique<pending_call>(calls, std::move(first)));
}

int error_of(communicator which) noexcept {
  auto const known = find(which);
  return known != nullptr ? known->error.load(std::memory_order_acquire) : int{success};
}

void give_up(communicator which) noexcept {
  know(which)->given_up.store(true, std::memory_order_release);
}

void forget(communicator which) noexcept {
  registry& in = the_registry();
  std::lock_guard const guard{in.lock};
  in.all.erase(which);
}

}  // namespace sluice::nccl_shim
