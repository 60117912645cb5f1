/// The processes of the benchmark `isolation`, one role at a time; benchmarks/isolation.py starts
/// them.

#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "benchmarks/isolation_roles.hpp"
#include "benchmarks/isolation_watch.hpp"

namespace {

using namespace sluice;

int report(std::string const& file) {
  auto const& counts = bench::map_counts(file);
  nlohmann::json doing;
  for (std::size_t i = 0; i < bench::role_names.size(); ++i) {
    if (auto const what = static_cast<bench::activity>(counts.doing.at(i).load());
        what != bench::activity::nothing) {
      doing[bench::role_names.at(i)] = bench::to_string(what);
    }
  }
  nlohmann::json const line{{"doing", doing.is_null() ? nlohmann::json::object() : doing},
                            {"done", counts.done.load() != 0},
                            {"handovers", counts.handovers.load()},
                            {"checked_bytes", counts.checked_bytes.load()},
                            {"foreign_bytes", counts.foreign_bytes.load()},
                            {"granted_bytes", counts.granted_bytes.load()},
                            {"leaked_bytes", counts.leaked_bytes.load()},
                            {"probes", counts.probes.load()},
                            {"refused", counts.refused.load()},
                            {"probes_that_saw", counts.probes_that_saw.load()},
                            {"revocations", counts.revocations.load()},
                            {"engine_granted_bytes", counts.engine_granted_bytes.load()},
                            {"engine_leaked_bytes", counts.engine_leaked_bytes.load()},
                            {"engine_checked_bytes", counts.engine_checked_bytes.load()},
                            {"engine_foreign_bytes", counts.engine_foreign_bytes.load()},
                            {"engine_probes", counts.engine_probes.load()},
                            {"engine_refused", counts.engine_refused.load()},
                            {"engine_parked", counts.engine_parked.load()},
                            {"server_errors", counts.server_errors.load()},
                            {"faults", counts.faults.load()}};
  std::printf("%s\n", line.dump().c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Uses revoked memory, and looks who sees it"};
  bench::isolation_options how;
  std::string role;
  app.add_option("role", role, "trainer, fault, engine, server or report")->required();
  app.add_option("--counts", how.counts)->required();
  app.add_option("--runtime-dir", how.broker.runtime_dir);
  app.add_option("--backend", how.broker.backend);
  app.add_option("--memory", how.broker.pool_bytes);
  app.add_option("--chunk", how.broker.chunk_bytes);
  app.add_option("--bytes", how.bytes);
  app.add_option("--handovers", how.handovers);
  app.add_option("--faults", how.faults);
  app.add_option("--number", how.number)->check(CLI::Range(0, bench::engine_number - 1));
  int longest = static_cast<int>(how.longest.count());
  int patience = static_cast<int>(how.patience.count());
  app.add_option("--seconds", longest, "the server ends then at the latest");
  app.add_option("--patience", patience, "seconds that a role may get nowhere");
  CLI11_PARSE(app, argc, argv);
  how.longest = std::chrono::seconds{longest};
  how.patience = std::chrono::seconds{patience};
  spdlog::set_level(spdlog::level::err);
  try {
    return role == "trainer"  ? bench::isolation_trainer(how)
           : role == "fault"  ? bench::isolation_fault(how)
           : role == "engine" ? bench::isolation_engine(how)
           : role == "server" ? bench::isolation_server(how)
           : role == "report" ? report(how.counts)
                              : 2;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "%s: %s\n", role.c_str(), why.what());
    return 1;
  }
}
