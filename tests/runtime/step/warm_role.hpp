/// A server whose memory outlives it, as a role of the tests' processes.
#pragma once

#include <string>
#include <vector>

namespace sluice::test {

/// warm FOLDER ACTION…: joins as the pool's server, does one action after the other, says a line
/// after each, and then stays until it is asked to end.
///
///   publish:KEY:MIB   takes memory, fills it with KEY's pattern and publishes it      "published KEY"
///   take:MIB          takes memory                                                    "took MIB"
///   scatter:KEY:MIB   like publish, in chunks that are not neighbours                 "published KEY"
///   inherited         what is left                                                   "inherited KEY…"
///   claim:KEY         claims that, and checks pattern and blob          "claimed KEY", or what is wrong
///   let-go:KEY        gives that back                                                 "let go KEY"
///   drop              its placements die                                              "dropped"
///   end               ends in order at once
int warm_role(std::vector<std::string> const& arguments);

}  // namespace sluice::test
