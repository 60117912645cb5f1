/// The examples in the headers of runtime/launcher/, word for word: compiled, never run.
#include <unistd.h>

#include "memhandover/base/bytes.hpp"
#include "runtime/launcher/environment.hpp"
#include "runtime/launcher/install_layout.hpp"
#include "runtime/launcher/launcher.hpp"

namespace sluice::launcher::header_examples {

void of_environment(char const* name, char* const* argv) {
  auto env = environment::of_this_process();
  env.set("SLUICE_RUN", "1");
  env.append("LD_PRELOAD", "/opt/sluice/lib/libsluice_gate.so");
  ::execvpe(name, argv, env.pointers().data());
}

int of_launcher() {
  return launcher::run({.pool_bytes = 4_GiB}, {"python", "train.py"},
                       launcher::this_installation());
}

}  // namespace sluice::launcher::header_examples
