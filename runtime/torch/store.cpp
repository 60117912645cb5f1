/// libsluice_store.so: torch's c10d::TCPStore behind the table of abi/store_api.h.
///
/// What is used of it, besides what its header says:
///   compareSet  of a key that is missing returns `expected` as it was given, if that is not empty
///   multiGet    waits until all keys are there, and then asks for them: two round trips
///   set         and multiSet are not answered
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "abi/store_api.h"

struct sluice_store {
  c10::intrusive_ptr<c10d::TCPStore> of;
};

namespace {

using bytes = std::vector<std::uint8_t>;

/// No value is that: asking whether a key is this one tells what it is, in one round trip.
bytes const& no_value() {
  static bytes const one{'?'};
  return one;
}

bytes bytes_of(sluice_store_value const& value) {
  auto const* const first = static_cast<std::uint8_t const*>(value.at);
  return {first, first + value.size};
}

void hand_out(bytes const& found, sluice_store_room& into) {
  if (found.size() > into.size) {
    throw std::runtime_error{"a key holds " + std::to_string(found.size()) + " bytes, but " +
                             std::to_string(into.size) + " were expected"};
  }
  std::copy(found.begin(), found.end(), static_cast<std::uint8_t*>(into.at));
  into.size = found.size();
}

/// Its first line is what went wrong; more would be where in torch.
void put_reason(char const* what, sluice_store_error* why) {
  std::string const text{what};
  std::snprintf(why->text, sizeof(why->text), "%s", text.substr(0, text.find('\n')).c_str());
}

/// Runs what may throw; -1 and why if it did.
template <typename Call>
int guarded(sluice_store_error* why, Call const& call) noexcept {
  try {
    call();
    return 0;
  } catch (c10::Error const& failure) {
    put_reason(failure.what_without_backtrace(), why);
  } catch (std::exception const& failure) {
    put_reason(failure.what(), why);
  } catch (...) {
    put_reason("an exception of an unknown kind", why);
  }
  return -1;
}

/// The client's socket, which torch shows in its description alone.
int socket_of(c10d::TCPStore const& store) {
  std::string const text = store.repr();
  constexpr char mark[] = "fd=";
  auto const at = text.find(mark);
  int const found = at == std::string::npos ? -1 : std::atoi(text.c_str() + at + sizeof(mark) - 1);
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  if (found < 0 || ::getpeername(found, reinterpret_cast<sockaddr*>(&peer), &size) != 0) {
    throw std::runtime_error{"the socket of torch's TCPStore is not known: " + text};
  }
  return found;
}

/// Without that a call would wait for ever for a host that is gone, since torch asks without a deadline.
void bound_waits(int socket, std::chrono::milliseconds patience) {
  timeval const limit{patience.count() / 1000, patience.count() % 1000 * 1000};
  for (int const option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    if (::setsockopt(socket, SOL_SOCKET, option, &limit, sizeof(limit)) != 0) {
      throw std::runtime_error{std::string{"the store's socket takes no deadline: "} +
                               std::strerror(errno)};
    }
  }
}

sluice_store* open_store(char const* host, std::uint16_t port, std::int64_t patience_ms,
                         sluice_store_error* why) {
  sluice_store* made = nullptr;
  guarded(why, [&] {
    std::chrono::milliseconds const patience{patience_ms};
    c10d::TCPStoreOptions options;
    options.port = port;
    options.waitWorkers = false;
    // It connects for whole seconds.
    options.timeout = std::max<std::chrono::milliseconds>(patience, std::chrono::seconds{1});
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    bound_waits(socket_of(*store), patience);
    store->setTimeout(patience);
    made = std::make_unique<sluice_store>(sluice_store{std::move(store)}).release();
  });
  return made;
}

void close_store(sluice_store* store) {
  std::unique_ptr<sluice_store> const gone{store};
}

int set(sluice_store* store, char const* const* keys, sluice_store_value const* values,
        std::size_t count, sluice_store_error* why) {
  return guarded(why, [&] {
    std::vector<bytes> all;
    all.reserve(count);
    std::transform(values, values + count, std::back_inserter(all), bytes_of);
    store->of->multiSet({keys, keys + count}, all);
  });
}

int compare_set(sluice_store* store, char const* key, sluice_store_value const* expected,
                sluice_store_value const* desired, sluice_store_room* found,
                sluice_store_error* why) {
  return guarded(why, [&] {
    hand_out(store->of->compareSet(key, bytes_of(*expected), bytes_of(*desired)), *found);
  });
}

int get(sluice_store* store, char const* const* keys, sluice_store_room* into, std::size_t count,
        sluice_store_error* why) {
  return guarded(why, [&] {
    if (count == 1) {
      bytes const found = store->of->compareSet(*keys, no_value(), no_value());
      hand_out(found == no_value() ? bytes{} : found, *into);
      return;
    }
    std::vector<bytes> const found = store->of->multiGet({keys, keys + count});
    for (std::size_t i = 0; i < count; ++i) {
      hand_out(found.at(i), into[i]);
    }
  });
}

int add(sluice_store* store, char const* key, std::int64_t summand, std::int64_t* sum,
        sluice_store_error* why) {
  return guarded(why, [&] { *sum = store->of->add(key, summand); });
}

int remove_key(sluice_store* store, char const* key, sluice_store_error* why) {
  return guarded(why, [&] { static_cast<void>(store->of->deleteKey(key)); });
}

constexpr sluice_store_api table{.size = sizeof(sluice_store_api),
                                 .open = open_store,
                                 .close = close_store,
                                 .set = set,
                                 .compare_set = compare_set,
                                 .get = get,
                                 .add = add,
                                 .remove = remove_key};

}  // namespace

extern "C" __attribute__((visibility("default"))) sluice_store_api const* sluice_store_table(void) {
  return &table;
}
