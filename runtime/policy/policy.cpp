#include "runtime/policy/policy.hpp"

#include <fmt/format.h>
#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>

#include "memhandover/device/disk_room.hpp"
#include "runtime/policy/detail/description.hpp"
#include "runtime/policy/detail/reader.hpp"
#include "runtime/policy/units.hpp"

namespace sluice::policy {
namespace {

constexpr std::uint64_t largest_file = 1_MiB;
/// Of a window, for what is parked. Less than that few jobs are parked and back in.
constexpr microseconds least_absence = std::chrono::milliseconds{100};

std::string join(std::vector<problem> const& problems) {
  std::string all;
  for (auto const& one : problems) {
    all += (all.empty() ? "" : "\n") + one.text();
  }
  return all;
}

[[noreturn]] void refuse_file(error_kind kind, std::filesystem::path const& file,
                              std::string const& message) {
  throw policy_error{kind, {{file.string(), 1, 1, "", message}}};
}

void check_chunk(pool_policy const& pool, detail::findings& found) {
  if (!pool.chunk) {
    return;
  }
  auto const granularity = pool.backend == pool_backend::cuda ? 2_MiB : 4_KiB;
  if (*pool.chunk % granularity != 0) {
    found.add_at("pool.chunk",
                 fmt::format("is {}, must be a multiple of {}; for example {}",
                             write_bytes(*pool.chunk), write_bytes(granularity),
                             write_bytes((*pool.chunk / granularity + 1) * granularity)));
  }
  if (pool.memory && pool.memory->bytes != 0 && pool.memory->bytes < *pool.chunk) {
    found.add_at("pool.memory", fmt::format("is {}, less than one chunk of {}; give at least {}",
                                            write_bytes(pool.memory->bytes),
                                            write_bytes(*pool.chunk), write_bytes(*pool.chunk)));
  }
}

void check_against_chunk(std::uint64_t bytes, char const* path, policy const& wanted,
                         detail::findings& found) {
  if (bytes != 0 && wanted.pool.chunk && bytes < *wanted.pool.chunk) {
    found.add_at(path, fmt::format("is {}, less than one chunk of {}; give at least {}, or 0",
                                   write_bytes(bytes), write_bytes(*wanted.pool.chunk),
                                   write_bytes(*wanted.pool.chunk)));
  }
}

/// What the disk has at present is for the broker to see, which may have its part of it already.
void check_disk(host_copies_policy const& copies, detail::findings& found) {
  if (copies.disk == 0) {
    if (!copies.disk_path.empty()) {  // of a value that was refused all has been said
      found.add_at("host_copies.disk_path",
                   "has no meaning without host_copies.disk; say there how much, or remove it");
    }
    return;
  }
  if (copies.memory == 0) {
    found.add_at("host_copies.disk",
                 "needs host_copies.memory, which is used first; give at least one chunk");
  }
  if (copies.disk_path.empty()) {
    found.add_at("host_copies.disk",
                 "needs host_copies.disk_path; name a folder on a disk, for example "
                 "/var/lib/sluice");
    return;
  }
  memhandover::disk_wish const wish{copies.disk_path, copies.disk};
  if (auto const why = memhandover::refusal_of_folder(wish.folder)) {
    found.add_at("host_copies.disk_path", *why);
  } else if (auto const too_much =
                 memhandover::refusal_of_disk(wish, memhandover::read_disk_room(wish.folder))) {
    found.add_at("host_copies.disk", *too_much);
  }
}

void check_host_copies(policy const& wanted, detail::findings& found) {
  auto const& copies = wanted.host_copies;
  check_against_chunk(copies.memory, "host_copies.memory", wanted, found);
  check_against_chunk(copies.disk, "host_copies.disk", wanted, found);
  check_disk(copies, found);
}

/// What a job may be away for has to be longer than any swap, and it is not if there is nothing of a window left for it.
void check_turns(training_policy const& training, detail::findings& found) {
  auto const away =
      std::chrono::round<microseconds>(training.resident_window * (1.0 - training.resident_share));
  if (training.park == park_rule::never || away >= least_absence) {
    return;
  }
  bool const by_share = found.given("training.resident_share");
  found.add_at(
      by_share ? "training.resident_share" : "training.resident_window",
      fmt::format(
          "resident_share is {} and resident_window is {}, so that a job may be away for {} "
          "of a window; to park it takes longer. Give at least {}, or training.park never",
          write_percentage(training.resident_share), write_duration(training.resident_window),
          write_duration(away), write_duration(least_absence)));
}

void check_warm(warm_policy const& warm, std::string const& path, detail::findings& found) {
  if (warm.mode == warm_mode::automatic && warm.min_idle > warm.max_idle) {
    auto const blamed = found.given(path + ".min_idle") ? ".min_idle" : ".max_idle";
    found.add_at(
        path + blamed,
        fmt::format("min_idle is {} and max_idle is {}; min_idle must not be the longer one",
                    write_duration(warm.min_idle), write_duration(warm.max_idle)));
  }
  auto refuse = [&](char const* name, char const* advice) {
    if (found.given(path + name)) {
      found.add_at(path + name,
                   fmt::format("has no meaning with mode {}; {}", to_string(warm.mode), advice));
    }
  };
  if (warm.mode == warm_mode::fixed) {
    refuse(".min_idle", "max_idle is the timeout");
    refuse(".prewarm", "mode auto has it");
  } else if (warm.mode == warm_mode::always) {
    refuse(".min_idle", "remove it");
    refuse(".max_idle", "remove it");
    refuse(".prewarm", "remove it");
  }
}

/// What has no meaning for an engine.
void check_keys_beside_engine(engine_policy const& engine, std::string const& path,
                              detail::findings& found) {
  if (found.given(path + ".on_miss_predicted")) {
    found.add_at(path + ".on_miss_predicted",
                 "has no meaning beside engine: how long it takes is not predicted; remove it");
  }
  if (!engine.is_tenant() && found.given(path + ".warm")) {
    found.add_at(path + ".warm",
                 "has no meaning beside engine.memory own: such an engine is never parked; remove "
                 "one of the two");
  } else if (found.given(path + ".warm.prewarm")) {
    found.add_at(
        path + ".warm.prewarm",
        "has no meaning beside engine: engines are not woken before they are asked; remove "
        "it");
  }
}

bool has_dot_segment(std::string const& route) {
  auto const path = route + "/";
  return path.find("/./") != std::string::npos || path.find("/../") != std::string::npos;
}

/// Whether the server answers there itself.
bool is_own_path(std::string const& route) {
  auto const path = route + "/";
  return path.starts_with("/v2/") || path.starts_with("/metrics/");
}

/// A name of an engine's model that requests may have, which stands at `place`.
void check_served_name(std::string const& name, std::string const& place,
                       std::map<std::string, std::string>& first_of, detail::findings& found) {
  if (name.empty()) {
    return;  // refused already
  }
  if (auto const [first, fresh] = first_of.emplace(name, place); !fresh) {
    found.add_at(place, fmt::format("is \"{}\", which line {} has already; each name leads to one "
                                    "engine",
                                    name, found.line_of(first->second)));
  }
}

void check_api(engine_policy const& engine, std::string const& path, detail::findings& found) {
  if (engine.api != engine_api::http) {
    return;
  }
  if (!found.given(path + ".routes")) {
    found.add_within(
        path, path + ".routes",
        "is missing; add `routes: [/v1/completions, /chat/*]`, or `api: openai` or `api: oip`");
  }
  if (!engine.served_names.empty()) {
    found.add_at(
        path + ".served_names",
        "has no meaning with api http, where an engine is found by its path; remove it, or "
        "add `api: openai` or `api: oip`");
  }
}

void check_engine(engine_policy const& engine, std::string const& path,
                  std::map<std::string, std::string>& first_of, detail::findings& found) {
  check_api(engine, path, found);
  if (engine.names(port_placeholder) && engine.names(socket_placeholder)) {
    found.add_at(path + ".command",
                 fmt::format("{} and {} are both named; an engine listens in one place",
                             port_placeholder, socket_placeholder));
  }
  if (engine.env.contains("SLUICE_VLLM_KV")) {
    found.add_at(path + ".env.SLUICE_VLLM_KV",
                 "is the server's to set, which then counts the cache and asks for it; remove it, "
                 "and add `kv: pool` to engine");
  }
  if (engine.env.contains("PORT")) {
    found.add_at(path + ".env.PORT",
                 fmt::format("is the server's to choose; remove it, and take {} where the engine "
                             "does not read PORT",
                             port_placeholder));
  }
  for (std::size_t i = 0; i < engine.routes.size(); ++i) {
    auto const& route = engine.routes[i];
    auto const place = fmt::format("{}.routes[{}]", path, i);
    if (route.empty()) {
      continue;  // refused already
    }
    if (has_dot_segment(route)) {
      found.add_at(place,
                   fmt::format("is \"{}\", must not have \".\" or \"..\" between slashes", route));
    } else if (is_own_path(route)) {
      found.add_at(place, fmt::format("is \"{}\", where the server answers itself; give a path "
                                      "that is not /metrics and not below /v2",
                                      route));
    }
    if (auto const [first, fresh] = first_of.emplace(route, place); !fresh) {
      found.add_at(place, fmt::format("is \"{}\", which line {} has already; each route leads to "
                                      "one engine",
                                      route, found.line_of(first->second)));
    }
  }
}

void check_token_promises(model_policy const& model, std::string const& path,
                          detail::findings& found) {
  if (model.engine && model.engine->api == engine_api::openai) {
    return;
  }
  auto const refuse = [&](char const* key, microseconds given) {
    if (given.count() > 0) {
      found.add_at(path + key,
                   "has no meaning but of engines with api openai, whose streams have tokens; "
                   "remove it");
    }
  };
  refuse(".slo.ttft", model.slo.ttft);
  refuse(".slo.tbt", model.slo.tbt);
}

/// What OpenAI's clients ask for leads to engines by their models' names.
void check_named_engines(std::vector<model_policy> const& models, detail::findings& found) {
  std::map<std::string, std::string> first_of;
  auto const each_named = [&](auto const& visit) {
    for (std::size_t i = 0; i < models.size(); ++i) {
      if (models[i].engine && models[i].engine->api == engine_api::openai) {
        visit(models[i], fmt::format("models[{}]", i));
      }
    }
  };
  each_named([&](model_policy const& model, std::string const& path) {
    first_of.emplace(model.name, path + ".name");  // a second one is refused as such
  });
  if (first_of.empty()) {
    return;
  }
  each_named([&](model_policy const& model, std::string const& path) {
    for (std::size_t i = 0; i < model.engine->served_names.size(); ++i) {
      check_served_name(model.engine->served_names[i],
                        fmt::format("{}.engine.served_names[{}]", path, i), first_of, found);
    }
  });
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (!models[i].engine) {
      continue;
    }
    auto const& routes = models[i].engine->routes;
    for (std::size_t j = 0; j < routes.size(); ++j) {
      if (routes[j] == "/v1/*" || (routes[j] + "/").starts_with("/v1/models/")) {
        found.add_at(fmt::format("models[{}].engine.routes[{}]", i, j),
                     fmt::format("is \"{}\", where requests are led by their model, as an engine "
                                 "has api openai; give longer paths below /v1, or none",
                                 routes[j]));
      }
    }
  }
}

/// Models of the Open Inference Protocol, of engines as of the repository, stand below one path.
void check_oip_engines(std::vector<model_policy> const& models, detail::findings& found) {
  std::map<std::string, std::string> first_of;
  for (std::size_t i = 0; i < models.size(); ++i) {
    first_of.emplace(models[i].name, fmt::format("models[{}].name", i));
  }
  static std::regex const plain{R"([A-Za-z0-9_][A-Za-z0-9._-]*)"};
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (!models[i].engine || models[i].engine->api != engine_api::oip) {
      continue;
    }
    auto const& names = models[i].engine->served_names;
    for (std::size_t j = 0; j < names.size(); ++j) {
      auto const place = fmt::format("models[{}].engine.served_names[{}]", i, j);
      if (!names[j].empty() && !std::regex_match(names[j], plain)) {
        found.add_at(place, fmt::format("is \"{}\", must be letters, digits, \"_\", \"-\" and "
                                        "\".\", as it stands in paths",
                                        names[j]));
      } else {
        check_served_name(names[j], place, first_of, found);
      }
    }
  }
}

/// Rules between keys, which no single key can check. Values that were refused keep their defaults
/// here.
void check_together(policy const& wanted, detail::findings& found) {
  check_chunk(wanted.pool, found);
  check_host_copies(wanted, found);
  check_turns(wanted.training, found);
  if (auto const& reserve = wanted.scheduler.reserve; reserve && wanted.pool.memory) {
    if (auto const bytes = wanted.pool.memory->bytes; bytes != 0 && *reserve >= bytes) {
      found.add_at("scheduler.reserve",
                   fmt::format("is {}, must be less than pool.memory, which is {}",
                               write_bytes(*reserve), write_bytes(bytes)));
    }
  }
  auto const& server = wanted.server;
  if (server.grpc_port && *server.grpc_port == server.port && server.port != 0) {
    found.add_at("server.grpc_port",
                 fmt::format("is {}, as server.port; gRPC and HTTP take a port each", server.port));
  }
  std::map<std::string, std::string> first_of, first_of_route;
  for (std::size_t i = 0; i < wanted.models.size(); ++i) {
    auto const& model = wanted.models[i];
    auto const path = fmt::format("models[{}]", i);
    if (model.engine) {
      check_keys_beside_engine(*model.engine, path, found);
      check_engine(*model.engine, path + ".engine", first_of_route, found);
    }
    check_token_promises(model, path, found);
    check_warm(model.warm, path + ".warm", found);
    if (model.slo.latency > wanted.server.request_timeout) {
      found.add_at(
          path + ".slo.latency",
          fmt::format("is {}, longer than server.request_timeout, which is {}; lower it or "
                      "raise the timeout",
                      write_duration(model.slo.latency),
                      write_duration(wanted.server.request_timeout)));
    }
    auto const name_path = path + ".name";
    if (auto const [first, fresh] = first_of.emplace(model.name, name_path);
        !fresh && !model.name.empty()) {
      found.add_at(name_path,
                   fmt::format("is \"{}\", which line {} has already; each model stands once",
                               model.name, found.line_of(first->second)));
    }
  }
  check_named_engines(wanted.models, found);
  check_oip_engines(wanted.models, found);
}

/// Where the documents of a file begin.
class document_starts final : public YAML::EventHandler {
 public:
  /// Of no more than three. yaml-cpp's own loop over documents has no end where one takes nothing of the file: a comma
  /// outside of a list begins another, and another.
  static std::vector<YAML::Mark> of(std::string const& text) {
    std::istringstream stream{text};
    YAML::Parser parser{stream};
    document_starts found;
    while (found.starts_.size() < 3 && parser.HandleNextDocument(found)) {
    }
    return std::move(found.starts_);
  }

  void OnDocumentStart(YAML::Mark const& mark) override { starts_.push_back(mark); }
  void OnDocumentEnd() override {}
  void OnNull(YAML::Mark const& /*mark*/, YAML::anchor_t /*anchor*/) override {}
  void OnAlias(YAML::Mark const& /*mark*/, YAML::anchor_t /*anchor*/) override {}
  void OnScalar(YAML::Mark const& /*mark*/, std::string const& /*tag*/, YAML::anchor_t /*anchor*/,
                std::string const& /*value*/) override {}
  void OnSequenceStart(YAML::Mark const& /*mark*/, std::string const& /*tag*/,
                       YAML::anchor_t /*anchor*/, YAML::EmitterStyle::value /*style*/) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(YAML::Mark const& /*mark*/, std::string const& /*tag*/, YAML::anchor_t /*anchor*/,
                  YAML::EmitterStyle::value /*style*/) override {}
  void OnMapEnd() override {}

 private:
  std::vector<YAML::Mark> starts_;
};

}  // namespace

bool engine_policy::names(std::string_view placeholder) const {
  auto const has = [&](std::string const& text) {
    return text.find(placeholder) != std::string::npos;
  };
  return std::any_of(command.begin(), command.end(), has) ||
         std::any_of(env.begin(), env.end(), [&](auto const& each) { return has(each.second); });
}

std::string problem::text() const {
  auto const place = fmt::format("{}:{}:{}: ", file, line, column);
  return path.empty() ? place + message : fmt::format("{}{}: {}", place, path, message);
}

policy_error::policy_error(error_kind kind, std::vector<problem> problems)
    : error(kind, join(problems)), problems_(std::move(problems)) {}

policy parse(std::string const& text, std::filesystem::path const& file) {
  detail::findings found{file.string()};
  policy wanted;
  wanted.file = file;
  auto const folder = std::filesystem::absolute(file).parent_path();
  try {
    auto const documents = document_starts::of(text);
    if (documents.size() > 2 && documents[1].pos == documents[2].pos) {
      throw YAML::ParserException{documents[1], "this belongs to no key and no value"};
    }
    if (documents.size() > 1) {
      found.add(documents[1], "", "a second document begins here; a policy is one document");
    }
    auto const root = documents.empty() ? YAML::Node{} : YAML::Load(text);
    if (root.IsMap()) {
      detail::reader reader{root, "", found};
      detail::describe(reader, wanted);
      reader.finish();
      if (auto& path = wanted.host_copies.disk_path; !path.empty()) {
        path = (folder / path).lexically_normal().string();
      }
      check_together(wanted, found);
    } else {
      found.add(root.Mark(), "",
                root.IsNull()
                    ? "the file is empty; a policy needs at least `version: 1` and `models:`"
                    : "this is not a policy; it must consist of keys, the first `version: 1`");
    }
  } catch (YAML::DeepRecursion const& wrong) {
    found.add(wrong.mark, "", "this is nested too deeply; a policy needs four levels");
  } catch (YAML::Exception const& wrong) {
    found.add(wrong.mark, "", "this is not valid YAML: " + wrong.msg);
  }
  if (auto problems = found.sorted(); !problems.empty()) {
    throw policy_error{error_kind::invalid_argument, std::move(problems)};
  }
  auto& server = wanted.server;
  for (auto* const each :
       {&server.model_repository, &server.token_file, &server.tls.certificate_file,
        &server.tls.key_file, &server.access_log}) {
    if (!each->empty() && !(each == &server.access_log && *each == "stderr"))
      *each = (folder / *each).lexically_normal();
  }
  return wanted;
}

std::string read_text(std::filesystem::path const& file) {
  std::error_code failed;
  auto const status = std::filesystem::status(file, failed);
  if (status.type() == std::filesystem::file_type::not_found) {
    refuse_file(error_kind::not_found, file,
                "there is no such file; give the path of a policy file");
  }
  if (status.type() == std::filesystem::file_type::directory) {
    refuse_file(error_kind::invalid_argument, file,
                "this is a folder; give the path of a policy file");
  }
  std::ifstream stream{file, std::ios::binary};
  std::string text;
  // Not by its size: a pipe has none, and a policy may come from one.
  for (std::istreambuf_iterator<char> next{stream}, end; next != end && text.size() <= largest_file;
       ++next) {
    text.push_back(*next);
  }
  if (!stream.is_open() || stream.bad()) {
    refuse_file(error_kind::invalid_argument, file,
                fmt::format("cannot be read: {}; check its permissions", std::strerror(errno)));
  }
  if (text.size() > largest_file) {
    refuse_file(error_kind::invalid_argument, file,
                fmt::format("is larger than {}, so it is no policy; give the path of a policy file",
                            write_bytes(largest_file)));
  }
  return text;
}

policy load(std::filesystem::path const& file) {
  return parse(read_text(file), file);
}

}  // namespace sluice::policy
