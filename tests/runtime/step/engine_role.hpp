/// An engine, as a role of the tests' processes.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace sluice::test {

/// engine FOLDER BYTES [WORKERS [steady]]: joins the pool as an engine, grows to so many bytes, gives some back, is parked when
/// they are demanded, and grows again, until `stopping`; with so many forked workers that only wait; a `steady` one
/// gives nothing back of its own accord. It says
/// "joined", "grown" once it has had all, "parked" after the first demand that it has given something for, and "error: …" for
/// a byte that is not its own; then its exit code is 4.
int engine_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping);

}  // namespace sluice::test
