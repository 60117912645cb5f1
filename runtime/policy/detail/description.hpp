/// The keys of a policy file, described once.
#pragma once

#include "runtime/policy/detail/key_visitor.hpp"

namespace sluice::policy::detail {

/// The one version of the format that this build reads.
inline constexpr std::int64_t format_version = 1;

/// Describes every key to `visitor`. `into` gives the defaults and takes the values.
void describe(key_visitor& visitor, policy& into);

}  // namespace sluice::policy::detail
