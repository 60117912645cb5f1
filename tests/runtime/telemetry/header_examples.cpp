/// The examples in the headers of runtime/telemetry/, word for word: compiled, never run.
#include <spdlog/spdlog.h>

#include <functional>
#include <string>

#include "memhandover/base/error.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"
#include "runtime/telemetry/metrics_text.hpp"
#include "runtime/telemetry/recurring_lines.hpp"

// An example shows what an expression is by a comment behind it.
#pragma GCC diagnostic ignored "-Wunused-result"

namespace sluice::telemetry::header_examples {

void of_error_table(std::function<std::string()> const& answer,
                    std::function<void(int, std::string const&)> const& respond) {
  try {
    respond(200, answer());
  } catch (error const& why) {
    respond(telemetry::http_status(why.kind()), why.what());
  }
}

void of_logging(std::string const& host, int port) {
  telemetry::set_up_logging("sluice-server", "info");
  spdlog::info("listening host={} port={}", host, port);
}

void of_metrics_text() {
  metrics_text metrics;
  metrics.family("sluice_pool_bytes", metrics_text::kind::gauge, "Memory by its owner.");
  metrics.sample({{"owner", "training"}}, 4096.0);
  metrics.text();
}

void of_recurring_lines(std::string const& text) {
  recurring_lines lines;
  if (auto const due = lines.on(text, recurring_lines::clock::now())) {
    spdlog::warn("it has failed reason={} repeated={}", text, due->repeated);
  }
}

}  // namespace sluice::telemetry::header_examples
