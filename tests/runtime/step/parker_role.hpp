/// Tenants that hold host copies, as roles of the tests' processes.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace sluice::test {

/// parker FOLDER SLOTS [MISCHIEF [DEVICE]]: joins the pool of the (fake) GPU as training, holds so many slots of the host
/// copies, fills each with its own pattern and keeps every second. Says "joined", or "none" where the pool has no host copies.
/// Asked by SIGUSR1 it says "intact", or "intact, refused" where the broker does not count with them, or what it has
/// lost. A forked child of it would fault on its copies: it says so if not.
/// MISCHIEF, done before it says "joined": `damage` writes to all of the table, but to the words of what it holds, `places` erases
/// the places of the pools, `exchange` puts other copies in the place of its own, to be brought to the next broker.
int parker_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping,
                std::atomic<bool>& asked);

/// taker FOLDER: takes and keeps slots, takes them back, steals and frees them, at random, without end. Says "joined". Asked
/// by SIGUSR1 it says "has N", of slots whose bytes it has found whole, and rests until it is asked again.
int taker_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping,
               std::atomic<bool>& asked);

}  // namespace sluice::test
