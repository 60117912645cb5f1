#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <utility>

#include "runtime/server/engines/detail/engine_host_impl.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// An engine may take up models and lay them down while it runs.
constexpr std::chrono::seconds fresh_for{10};
constexpr std::uint64_t most_of_list = 1_MiB;

}  // namespace

std::optional<std::size_t> engine_host::impl::find_model(std::string_view name) const {
  auto const found = by_name_.find(name);
  return found == by_name_.end() ? std::nullopt : std::optional{found->second};
}

std::vector<std::string> engine_host::impl::model_names() const {
  std::vector<std::string> names;
  names.reserve(by_name_.size());
  for (auto const& [name, engine] : by_name_) names.push_back(name);
  return names;
}

/// As they are known now. Engines that can be asked, and have not been for a while, are; it is the next who hears that.
nlohmann::json engine_host::impl::models() {
  auto all = nlohmann::json::array();
  std::lock_guard const lock{mutex_};
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    auto& engine = engines_[i];
    if (engine.is.engine->api != policy::engine_api::openai) continue;
    for (auto& each : engine.models.list()) all.push_back(std::move(each));
    if (engine.state == engine_state::ready && clock::now() - engine.asked > fresh_for) {
      net::post(io_, [this, i] { ask_for_models(i); });
    }
  }
  return all;
}

/// On the thread, of one that is ready: what is parked is not asked.
void engine_host::impl::ask_for_models(std::size_t which) {
  auto& engine = engines_[which];
  if (is_ending_ || engine.now.question) return;
  engine.now.has_asked = true;
  if (engine.is.engine->api == policy::engine_api::openai) {
    engine.now.unasked = {"/v1/models"};
  } else if (engine.is.engine->api == policy::engine_api::oip) {
    std::lock_guard const lock{mutex_};
    auto const paths = engine.described.questions();
    engine.now.unasked.assign(paths.begin(), paths.end());
  }
  ask_next(which);
}

void engine_host::impl::ask_next(std::size_t which) {
  auto& engine = engines_[which];
  if (engine.now.unasked.empty()) return;
  engine_address address;
  {
    std::lock_guard const lock{mutex_};
    if (engine.state != engine_state::ready) return;
    engine.asked = clock::now();
    address = engine.address;
  }
  auto const path = std::move(engine.now.unasked.front());
  engine.now.unasked.pop_front();
  engine.now.question = ask_engine(
      io_.get_executor(), address, {path, most_of_list},
      [this, which, path](engine_answer const& answer) { on_models(which, path, answer); });
}

void engine_host::impl::on_models(std::size_t which, std::string const& path,
                                  engine_answer const& answer) {
  auto& engine = engines_[which];
  net::post(io_, [over = std::exchange(engine.now.question, nullptr)] {});  // it calls this
  if (answer.failure.empty() && answer.status == 200) {
    if (engine.is.engine->api == policy::engine_api::openai) {
      note_models(which, answer.body);
    } else {
      std::lock_guard const lock{mutex_};
      for (auto& more : engine.described.learn(path, answer.body)) {
        engine.now.unasked.push_back(std::move(more));
      }
    }
  }
  ask_next(which);
}

void engine_host::impl::note_models(std::size_t which, std::string const& body) {
  auto& engine = engines_[which];
  std::vector<std::string> missing;
  {
    std::lock_guard const lock{mutex_};
    auto const before = engine.models.unlisted();
    engine.models.learn(body);
    if (engine.models.unlisted() != before) missing = engine.models.unlisted();
  }
  if (!missing.empty()) {
    spdlog::warn("engine does not list names that the policy gives its models engine={} names={}",
                 engine.is.name, telemetry::quoted(fmt::format("{}", fmt::join(missing, ", "))));
  }
}

std::vector<std::string> engine_host::impl::names() const {
  std::vector<std::string> all;
  for (auto const& engine : engines_) {
    all.push_back(engine.is.name);
    if (engine.is.engine->api != policy::engine_api::oip) continue;
    auto const& served = engine.is.engine->served_names;
    all.insert(all.end(), served.begin(), served.end());
  }
  return all;
}

std::optional<std::size_t> engine_host::impl::place_of(std::string_view name) const {
  for (std::size_t i = 0; i < engines_.size(); ++i) {
    auto const& is = engines_[i].is;
    auto const& served = is.engine->served_names;
    bool const is_served = is.engine->api == policy::engine_api::oip &&
                           std::find(served.begin(), served.end(), name) != served.end();
    if (is.name == name || is_served) return i;
  }
  return std::nullopt;
}

error engine_host::impl::unsaid(entry const& engine, std::string const& model,
                                std::string const& version) {
  return {
      error_kind::unavailable,
      fmt::format("engine '{}' has not said what model '{}'{} is; it is {}{}", engine.is.name,
                  model, version.empty() ? "" : " of version " + version, to_string(engine.state),
                  is_up(engine.state) ? "" : ", and an infer request starts it")};
}

model_metadata engine_host::impl::metadata(std::string const& model,
                                           std::string const& version) const {
  auto const& engine = engines_[place_of(model).value()];
  if (engine.is.engine->api != policy::engine_api::oip) {
    return {.name = model, .versions = {"1"}, .platform = "engine", .inputs = {}, .outputs = {}};
  }
  std::lock_guard const lock{mutex_};
  auto said = engine.described.metadata(model, version);
  if (!said) throw unsaid(engine, model, version);
  return std::move(*said);
}

nlohmann::json engine_host::impl::config(std::string const& model,
                                         std::string const& version) const {
  auto const& engine = engines_[place_of(model).value()];
  if (engine.is.engine->api != policy::engine_api::oip) {
    throw error{
        error_kind::unsupported,
        fmt::format("'{}' is an engine, which has no configuration in a repository", model)};
  }
  std::lock_guard const lock{mutex_};
  auto said = engine.described.config(model, version);
  if (!said) throw unsaid(engine, model, version);
  return std::move(*said);
}

}  // namespace sluice::server
