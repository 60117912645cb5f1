#include "nccl_shim/agreement/store.hpp"

#include <dlfcn.h>
#include <sched.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "nccl_shim/agreement/clock.hpp"

namespace sluice::nccl_shim {
namespace {

sluice_store_value value_of(std::span<std::byte const> bytes) {
  return {bytes.data(), bytes.size()};
}

sluice_store_api const* table_of(std::string const& library) {
  // It stays: threads of torch's run on in it.
  void* const opened = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  auto* const table =
      opened == nullptr
          ? nullptr
          : reinterpret_cast<decltype(&sluice_store_table)>(::dlsym(opened, "sluice_store_table"));
  if (table == nullptr) {
    char const* const why = ::dlerror();
    std::fprintf(stderr,
                 "sluice: ranks on several hosts agree through libsluice_store.so, which belongs "
                 "into the folder _torch/<version> beside libsluice_nccl.so, for the version of "
                 "the job's torch: %s\n",
                 why != nullptr ? why : library.c_str());
    return nullptr;
  }
  sluice_store_api const* const offered = table();
  if (offered->size < sizeof(sluice_store_api)) {
    std::fprintf(stderr, "sluice: %s is of an older Sluice than libsluice_nccl.so beside it\n",
                 library.c_str());
    return nullptr;
  }
  return offered;
}

}  // namespace

std::unique_ptr<store> store::open(std::string const& library, address const& at) {
  sluice_store_api const* const table = table_of(library);
  if (table == nullptr) {
    return nullptr;
  }
  sluice_store_error why{};
  sluice_store* const opened = table->open(at.host.c_str(), at.port, at.patience.count(), &why);
  if (opened == nullptr) {
    std::fprintf(stderr,
                 "sluice: no store of torch's answers at MASTER_ADDR:MASTER_PORT, which is %s:%u, "
                 "so that ranks on several hosts do not agree where they pause: %s\n",
                 at.host.c_str(), unsigned{at.port}, why.text);
    return nullptr;
  }
  return std::unique_ptr<store>{new store{table, opened, at}};
}

/// A call that is under way, unless the store is gone.
class store::call {
 public:
  explicit call(store& of) noexcept : of_{of} {
    of.under_way_.fetch_add(1, std::memory_order_seq_cst);
  }
  call(call const&) = delete;
  call& operator=(call const&) = delete;
  ~call() { of_.under_way_.fetch_sub(1, std::memory_order_seq_cst); }

  [[nodiscard]] bool may_be_made() const noexcept { return !of_.is_gone(); }
  /// By what a function of the table has returned. False if it has failed.
  [[nodiscard]] bool has_been(int made) const noexcept { return of_.has(made, why); }

  sluice_store_error why{};

 private:
  store& of_;
};

void store::retire() noexcept {
  constexpr std::chrono::nanoseconds moment = std::chrono::seconds{1};
  gone_.store(true, std::memory_order_seq_cst);
  for (auto const until = monotonic_ns() + moment.count();
       under_way_.load(std::memory_order_seq_cst) != 0 && monotonic_ns() < until;) {
    ::sched_yield();
  }
}

store::store(sluice_store_api const* table, sluice_store* of, address at) noexcept
    : table_{table}, of_{of}, at_{std::move(at)} {}

store::~store() {
  table_->close(of_);
}

std::string store::name() const {
  return "the store at " + at_.host + ':' + std::to_string(at_.port);
}

bool store::has(int made, sluice_store_error const& why) noexcept {
  if (made == 0) {
    return true;
  }
  if (!gone_.exchange(true, std::memory_order_acq_rel)) {
    std::fprintf(stderr,
                 "sluice: %s, by which ranks on several hosts agree, does not answer: %s. It lives "
                 "with torchrun on the first host, or with rank 0\n",
                 name().c_str(), why.text);
  }
  return false;
}

void store::set(std::span<written const> all) noexcept {
  std::array<char const*, 2> keys{};
  std::array<sluice_store_value, 2> values{};
  for (std::size_t i = 0; i < all.size(); ++i) {
    keys.at(i) = all[i].key.c_str();
    values.at(i) = value_of(all[i].value);
  }
  call one{*this};
  if (one.may_be_made()) {
    static_cast<void>(
        one.has_been(table_->set(of_, keys.data(), values.data(), all.size(), &one.why)));
  }
}

std::optional<std::span<std::byte>> store::compare_set(std::string const& key,
                                                       std::span<std::byte const> expected,
                                                       std::span<std::byte const> desired,
                                                       std::span<std::byte> room) noexcept {
  call one{*this};
  auto const old = value_of(expected);
  auto const made = value_of(desired);
  sluice_store_room found{room.data(), room.size()};
  if (!one.may_be_made() ||
      !one.has_been(table_->compare_set(of_, key.c_str(), &old, &made, &found, &one.why))) {
    return std::nullopt;
  }
  return room.first(found.size);
}

bool store::get(std::span<std::string const> keys, std::span<std::byte> values) noexcept {
  std::vector<char const*> names;
  std::vector<sluice_store_room> into;
  std::size_t const size = values.size() / keys.size();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    names.push_back(keys[i].c_str());
    into.push_back({values.subspan(i * size, size).data(), size});
  }
  call one{*this};
  return one.may_be_made() &&
         one.has_been(table_->get(of_, names.data(), into.data(), keys.size(), &one.why));
}

std::optional<std::int64_t> store::add(std::string const& key, std::int64_t summand) noexcept {
  call one{*this};
  std::int64_t sum = 0;
  if (!one.may_be_made() || !one.has_been(table_->add(of_, key.c_str(), summand, &sum, &one.why))) {
    return std::nullopt;
  }
  return sum;
}

void store::remove(std::string const& key) noexcept {
  call one{*this};
  if (one.may_be_made()) {
    static_cast<void>(one.has_been(table_->remove(of_, key.c_str(), &one.why)));
  }
}

}  // namespace sluice::nccl_shim
