#include "tests/nccl_shim/places.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_shim/agreement/cut_memory.hpp"
#include "nccl_shim/agreement/words_in_store.hpp"
#include "tests/nccl_shim/store_server.hpp"
#include "tests/runtime/gate/built_files.hpp"

namespace sluice::nccl_shim::testing {
namespace {

class memory final : public place {
 public:
  memory()
      : at_{::mmap(nullptr, sizeof(cut_memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                   -1, 0)} {
    if (at_ == MAP_FAILED) {
      throw std::bad_alloc{};
    }
    shared_ = new (at_) cut_memory;
  }
  memory(memory const&) = delete;
  memory& operator=(memory const&) = delete;
  ~memory() override { ::munmap(at_, sizeof(cut_memory)); }

  std::unique_ptr<cut_words> words_of(unsigned rank, unsigned ranks) override {
    return std::make_unique<words_in_memory>(*shared_, rank, ranks);
  }
  void await_sleeper() override {
    while (shared_->sleepers.load() == 0) {
      std::this_thread::yield();
    }
  }
  [[nodiscard]] std::uint64_t some_of(std::uint64_t steps) const override { return steps; }

 private:
  void* at_;
  cut_memory* shared_ = nullptr;
};

class in_store final : public place {
 public:
  std::unique_ptr<cut_words> words_of(unsigned rank, unsigned ranks) override {
    store& connected = connection(taken_++);
    for (unsigned of = 0; of < ranks; ++of) {
      words_in_store::make(connected, prefix_, of);
    }
    return std::make_unique<words_in_store>(connected, prefix_, rank, ranks);
  }
  void await_sleeper() override {}
  [[nodiscard]] std::uint64_t some_of(std::uint64_t steps) const override {
    return std::max<std::uint64_t>(steps / 20, 1);
  }

 private:
  static store_server& server() {
    static store_server one;
    return one;
  }
  /// Each rank has one of its own, as if it were a process. They are kept for the next place: torch looks a
  /// host's name up for each, which may take seconds. A process that was forked has others.
  static store& connection(std::size_t which) {
    static pid_t owner = ::getpid();
    static std::vector<std::unique_ptr<store>>& all =
        *std::make_unique<std::vector<std::unique_ptr<store>>>().release();
    if (std::exchange(owner, ::getpid()) != ::getpid()) {
      static_cast<void>(
          std::make_unique<std::vector<std::unique_ptr<store>>>(std::move(all)).release());
      all.clear();
    }
    while (all.size() <= which) {
      all.push_back(store::open(gate::built(SLUICE_TORCH_PART "/libsluice_store.so"),
                                {"127.0.0.1", server().port(), std::chrono::seconds{10}}));
      if (all.back() == nullptr) {
        throw std::runtime_error{"no store"};
      }
    }
    return *all[which];
  }

  std::string prefix_ = "sluice/" + std::to_string(++places_) + '/';
  std::size_t taken_ = 0;
  static inline std::atomic<unsigned> places_{0};
};

}  // namespace

std::unique_ptr<place> make_place(place_kind kind) {
  return kind == place_kind::memory ? std::unique_ptr<place>{std::make_unique<memory>()}
                                    : std::make_unique<in_store>();
}

std::string name_of(place_kind kind) {
  return kind == place_kind::memory ? "memory" : "store";
}

}  // namespace sluice::nccl_shim::testing
