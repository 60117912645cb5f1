/// The program of the benchmark `kills`: one JSON object on standard output. The roles of the
/// processes are this program again (`trainer`, `server`); a trainer may also be any command that
/// makes a training client of the pool (`--trainer`).

#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "benchmarks/kills_controller.hpp"

int main(int argc, char** argv) {
  using namespace sluice;
  CLI::App app{"Kills clients and broker of a pool at random instants"};
  bench::kills_options how;
  std::string role;
  app.add_option("role", role, "trainer or server: what this program starts itself");
  app.add_option("--runtime-dir", how.broker.runtime_dir)->required();
  app.add_option("--bytes", how.role.bytes, "of a trainer's micro-batch, or a server's most")
      ->required();
  app.add_option("--server-bytes", how.server_bytes);
  app.add_option("--workers", how.role.workers);
  app.add_option("--progress-fd", how.role.progress_fd);
  app.add_option("--backend", how.broker.backend);
  app.add_option("--memory", how.broker.pool_bytes);
  app.add_option("--chunk", how.broker.chunk_bytes);
  app.add_option("--trainers", how.trainers);
  app.add_option("--kills", how.kills);
  app.add_option("--seconds", how.seconds, "ends after so long, whatever has been killed by then");
  app.add_option("--delay-ms", how.most_delay_ms);
  app.add_option("--seed", how.seed);
  app.add_option_function<std::string>(
      "--trainer",
      [&how](std::string const& words) {
        how.trainer = nlohmann::json::parse(words).get<std::vector<std::string>>();
      },
      "a command that trains in the pool, as a JSON array of its words");
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::err);
  how.role.runtime_dir = how.broker.runtime_dir;
  try {
    if (role == "trainer") {
      return bench::trainer_role(how.role);
    }
    if (role == "server") {
      return bench::server_role(how.role);
    }
    std::printf("%s\n", bench::run_kills(how).dump().c_str());
    return 0;
  } catch (std::exception const& why) {
    std::fprintf(stderr, "sluice-bench-kills: %s\n", why.what());
    return 1;
  }
}
