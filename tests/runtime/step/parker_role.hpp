/// A tenant that holds host copies, as a role of the tests' processes.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace sluice::test {

/// parker FOLDER SLOTS: joins the pool of the (fake) GPU as training, holds so many slots of the host copies, fills each with its
/// own pattern and keeps every second. Says "joined", or "none" where the pool has no host copies. Asked by SIGUSR1 it
/// says "intact" or what it has lost. A forked child of it would fault on its copies: it says so if not.
int parker_role(std::vector<std::string> const& arguments, std::atomic<bool> const& stopping,
                std::atomic<bool>& asked);

}  // namespace sluice::test
