#include "runtime/server/model_account.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <string_view>

#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// Of what a model says, in bytes; its answers have more.
constexpr std::size_t longest_logged = 1024;

std::string shortened(std::string_view text) {
  return text.size() <= longest_logged
             ? std::string{text}
             : fmt::format("{}… ({} bytes)", text.substr(0, longest_logged), text.size());
}

}  // namespace

void model_account::on_answer(infer_result const& result) {
  auto const* const failure = std::get_if<error>(&result);
  if (failure != nullptr && failure->kind() == error_kind::model_error) {
    log(*failure);
  }
}

void model_account::log(error const& failure) {
  std::unique_lock lock{mutex_};
  auto const due = failures_.on(failure.what(), telemetry::recurring_lines::clock::now());
  lock.unlock();
  if (due) {
    spdlog::warn(
        "a model has raised an exception model={} version={} reason={} repeated={} others={}",
        name_, version_, telemetry::quoted(shortened(failure.what())), due->repeated, due->others);
  }
}

}  // namespace sluice::server
