#include "runtime/gate/long_units.hpp"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

namespace sluice::gate {
namespace {

/// A CUkernel may stand where a CUfunction is asked for; each has a question of its own.
char const* name_of_function(CUfunction function) {
  char const* name = nullptr;
  using question = CUresult (*)(char const**, void*);
  for (symbol const which : {symbol::of_cuFuncGetName, symbol::of_cuKernelGetName}) {
    if (real<question>(which)(&name, function) == CUDA_SUCCESS && name != nullptr) {
      return name;
    }
  }
  return nullptr;
}

std::string demangled(char const* name) {
  int status = 0;
  std::unique_ptr<char, decltype(&std::free)> const text{
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free};
  return text != nullptr ? text.get() : name;
}

std::string name_of(work_name const& what) {
  if (what.function != nullptr) {
    if (char const* const name = name_of_function(what.function)) {
      return demangled(name);
    }
  }
  std::string text = symbols[static_cast<std::size_t>(what.call)].name;
  if (what.bytes > 0) {
    text += " of " + std::to_string(what.bytes) + " bytes";
  }
  return text;
}

}  // namespace

void long_units::note(work_name const& what, std::chrono::nanoseconds takes) {
  std::lock_guard const guard{lock_};
  auto const end = places_.begin() + static_cast<std::ptrdiff_t>(used_);
  auto found = std::find_if(places_.begin(), end,
                            [&what](place const& known) { return known.what == what; });
  if (found == end) {
    if (used_ < most) {
      ++used_;
    } else {
      found = std::min_element(places_.begin(), end, [](place const& one, place const& other) {
        return one.unit.takes < other.unit.takes;
      });
      if (found->unit.takes >= takes) {
        return;
      }
    }
    *found = {what, {name_of(what), takes, 0}};
  }
  found->unit.takes = takes;
  ++found->unit.times;
}

std::optional<long_unit> long_units::at(std::size_t index) const {
  std::lock_guard const guard{lock_};
  if (index >= used_) {
    return std::nullopt;
  }
  std::array<place const*, most> order{};
  std::transform(places_.begin(), places_.end(), order.begin(),
                 [](place const& known) { return &known; });
  std::sort(
      order.begin(), order.begin() + static_cast<std::ptrdiff_t>(used_),
      [](place const* one, place const* other) { return one->unit.takes > other->unit.takes; });
  return order.at(index)->unit;
}

}  // namespace sluice::gate
