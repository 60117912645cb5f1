/// The processes of the tests of the run-ahead bound.
#pragma once

#include <string>
#include <vector>

namespace sluice::test {

/// bounded FOLDER [IDLE]: a job whose runtime library has a gate that says each bound it is given,
/// "bound N" in nanoseconds. It trains for ever; with IDLE, whatever it is, it has no micro-batches.
int bounded_role(std::vector<std::string> const& arguments);

/// publisher FOLDER MICROSECONDS: a server that wants this of training. It serves nothing.
int publisher_role(std::vector<std::string> const& arguments);

}  // namespace sluice::test
