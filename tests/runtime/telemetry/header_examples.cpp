/// The examples in the headers of runtime/telemetry/, word for word: compiled, never run.
#include <spdlog/spdlog.h>

#include <functional>
#include <string>

#include "memhandover/base/error.hpp"
#include "runtime/telemetry/error_table.hpp"
#include "runtime/telemetry/logging.hpp"
#include "runtime/telemetry/recurring_lines.hpp"

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

void of_recurring_lines(std::string const& text) {
  recurring_lines lines;
  if (auto const due = lines.on(text, recurring_lines::clock::now())) {
    spdlog::warn("it has failed reason={} repeated={}", text, due->repeated);
  }
}

}  // namespace sluice::telemetry::header_examples
