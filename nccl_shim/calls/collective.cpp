#include "nccl_shim/calls/collective.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <string_view>

namespace sluice::nccl_shim {
namespace {

constexpr std::array names{"",
                           "ncclAllReduce",
                           "ncclBroadcast",
                           "ncclBcast",
                           "ncclReduce",
                           "ncclAllGather",
                           "ncclReduceScatter",
                           "ncclAlltoAll",
                           "ncclGather",
                           "ncclScatter",
                           "ncclSend",
                           "ncclRecv",
                           "the end of a micro-batch",
                           "a CUDA graph"};

/// NCCL's functions by operation, once they have been looked up.
constinit std::array<std::atomic<void*>, names.size()> known_functions{};

template <typename... Arguments>
int call(operation what, Arguments... arguments) noexcept {
  auto& known = known_functions.at(static_cast<std::size_t>(what));
  void* function = known.load(std::memory_order_acquire);
  if (function == nullptr) {
    function = real_function(name_of(what));
    known.store(function, std::memory_order_release);
  }
  return function != nullptr ? reinterpret_cast<int (*)(Arguments...)>(function)(arguments...)
                             : int{invalid_usage};
}

/// FNV-1a over 64-bit words.
class hash {
 public:
  void add(std::uint64_t word) noexcept {
    constexpr std::uint64_t prime = 0x100000001b3;
    for (unsigned shift = 0; shift < 64; shift += 8) {
      value_ = (value_ ^ (word >> shift & 0xffU)) * prime;
    }
  }
  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325;
};

/// A reduction that was made for one communicator may have another number on each rank.
int reduction_alike(int reduction) noexcept {
  return reduction < usual_reductions ? reduction : usual_reductions;
}

numbered_call numbered(collective const& call) noexcept {
  auto const root_or_reduction = static_cast<std::uint64_t>(call.root) << 32U |
                                 static_cast<std::uint32_t>(reduction_alike(call.reduction));
  return {static_cast<std::uint64_t>(call.what), static_cast<std::uint64_t>(call.type), call.count,
          root_or_reduction};
}

constexpr unsigned group_shift = 8;

void add_to(hash& all, numbered_call const& one) noexcept {
  all.add(one.operation);
  all.add(one.type);
  all.add(one.count);
  all.add(one.root);
}

/// The launch of a graph of that many calls.
numbered_call graph_of(std::uint64_t calls, hash const& alike) noexcept {
  return {static_cast<std::uint64_t>(operation::graph) | calls << group_shift, 0, alike.value(), 0};
}

}  // namespace

char const* name_of(operation what) noexcept {
  return names.at(static_cast<std::size_t>(what));
}

[[gnu::hot]] bool are_of_all(std::span<collective const> calls) noexcept {
  return std::all_of(calls.begin(), calls.end(), [&calls](collective const& call) {
    return call.on == calls.front().on && is_of_all(call.what);
  });
}

[[gnu::hot]] int perform(collective const& c) noexcept {
  switch (c.what) {
    case operation::all_reduce:
    case operation::reduce_scatter:
      return call(c.what, c.from, c.to, c.count, c.type, c.reduction, c.on, c.where);
    case operation::broadcast:
    case operation::gather:
    case operation::scatter:
      return call(c.what, c.from, c.to, c.count, c.type, c.root, c.on, c.where);
    case operation::bcast:
    case operation::receive:
      return call(c.what, c.to, c.count, c.type, c.root, c.on, c.where);
    case operation::reduce:
      return call(c.what, c.from, c.to, c.count, c.type, c.reduction, c.root, c.on, c.where);
    case operation::all_gather:
    case operation::all_to_all:
      return call(c.what, c.from, c.to, c.count, c.type, c.on, c.where);
    case operation::send:
      return call(c.what, c.from, c.count, c.type, c.root, c.on, c.where);
    case operation::keep:
    case operation::graph:
      break;
  }
  return invalid_argument;
}

[[gnu::hot]] int perform(std::span<collective const> calls) noexcept {
  if (calls.size() == 1) {
    return perform(calls.front());
  }
  auto* const start = real<"ncclGroupStart", int()>();
  auto* const end = real<"ncclGroupEnd", int()>();
  int first = start();
  for (auto const& call : calls) {
    int const result = first == success ? perform(call) : first;
    first = first == success ? result : first;
  }
  int const ended = end();
  return first == success ? ended : first;
}

numbered_call numbered_end() noexcept {
  return {static_cast<std::uint64_t>(operation::keep), 0, 0, 0};
}

[[gnu::hot]] numbered_call numbered(std::span<collective const> calls) noexcept {
  numbered_call result = numbered(calls.front());
  if (calls.size() == 1) {
    return result;
  }
  hash all;
  for (collective const& each : calls) {
    add_to(all, numbered(each));
  }
  result.operation |= calls.size() << group_shift;
  result.count = all.value();
  return result;
}

numbered_call numbered_graph(std::span<collective const> calls) noexcept {
  hash all;
  add_to(all, numbered(calls));
  return graph_of(calls.size(), all);
}

numbered_call joined(numbered_call const& one, numbered_call const& other) noexcept {
  hash both;
  add_to(both, one);
  add_to(both, other);
  return graph_of((one.operation >> group_shift) + (other.operation >> group_shift), both);
}

std::string to_text(numbered_call const& call) {
  auto const what = call.operation & ((1U << group_shift) - 1);
  std::string name = what < names.size() ? names.at(what) : "an unknown call";
  auto const size = call.operation >> group_shift;
  if (what == static_cast<std::uint64_t>(operation::graph)) {
    return name + " of " + std::to_string(size) + (size == 1 ? " collective" : " collectives");
  }
  if (size > 0) {
    return "a group of " + std::to_string(size) + " calls from " + name + " on";
  }
  if (what == static_cast<std::uint64_t>(operation::keep)) {
    return name;
  }
  return name + " of " + std::to_string(call.count) + " elements of type " +
         std::to_string(call.type) + ", root " + std::to_string(call.root >> 32U) + ", reduction " +
         std::to_string(call.root & 0xffffffffU);
}

}  // namespace sluice::nccl_shim
