#include "runtime/torch/model_list.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"
#include "runtime/server/executor/parcel.hpp"
#include "runtime/server/hosting/absent_model.hpp"
#include "runtime/server/inference/caught_error.hpp"

namespace sluice::server {
namespace {

/// What a server wants, by place.
std::vector<offered_entry> models_of(settings const& given, policy::policy const& wanted,
                                     nlohmann::json const& left_out) {
  auto const there =
      given.models.empty() ? repository_contents{} : read_repository({given.model_repository});
  std::vector<offered_entry> found;
  for (auto const& order : given.models) {
    auto const& [name, version, stamp, is_retired] = order;
    auto& made = found.emplace_back(offered_entry{.order = order, .is = {}});
    made.is.entry.metadata.name = name;
    made.is.entry.version = version;
    if (is_retired) {
      continue;
    }
    auto const entry =
        std::find_if(there.models.begin(), there.models.end(), [&](model_entry const& one) {
          return one.metadata.name == name && one.version == version;
        });
    auto const fault = std::find_if(there.unservable.begin(), there.unservable.end(),
                                    [&](unservable_model const& one) { return one.name == name; });
    auto const model =
        std::find_if(wanted.models.begin(), wanted.models.end(),
                     [&](policy::model_policy const& one) { return one.name == name; });
    if (model == wanted.models.end()) {  // it is about to leave
      made.fault = not_served(name);
      continue;
    }
    made.is.wanted = *model;
    made.is_named = true;
    if (entry != there.models.end()) {
      made.is.entry = *entry;
    } else if (fault != there.unservable.end()) {
      made.fault = fault->reason;
    } else {
      made.fault =
          error{error_kind::not_found,
                fmt::format("version {} has gone from the repository {}; put it back, or load the "
                            "model again to serve what is there",
                            version, given.model_repository.string())};
    }
  }
  for (auto const& each : left_out) {
    if (auto const place = each.at("place").get<std::size_t>(); place < found.size()) {
      found[place].fault = failure_in(each);
    }
  }
  return found;
}

std::unique_ptr<hosted_model> prepare(model_entry const& entry,
                                      memhandover::pool_shape const& shape, torch_device device) {
  auto const& metadata = entry.metadata;
  auto model = prepare_torch_model(
      {metadata.name, entry.file, metadata.inputs, metadata.outputs, device, entry.computing});
  if (model->bytes() > shape.bytes()) {
    throw error{
        error_kind::out_of_memory,
        fmt::format("model '{}': it has {} of weights but the whole pool has {}; make "
                    "pool.memory larger",
                    metadata.name, format_bytes(model->bytes()), format_bytes(shape.bytes()))};
  }
  return model;
}

/// The failure without the words that name the model, which whoever shows it says.
error reason_for(std::string const& model, error const& failure) {
  auto const prefix = fmt::format("model '{}': ", model);
  std::string_view const text{failure.what()};
  return {failure.kind(), std::string{text.substr(text.starts_with(prefix) ? prefix.size() : 0)},
          failure.retry_after()};
}

}  // namespace

settings settings_in(nlohmann::json const& from) {
  try {
    settings made{from.at("policy_file").get<std::string>(),
                  from.at("model_repository").get<std::string>(),
                  from.at("endpoint"),
                  from.at("runtime_dir"),
                  from.at("experience").get<std::string>(),
                  from.at("threads"),
                  {},
                  from.at("unservable")};
    for (auto const& each : from.at("models")) {
      made.models.push_back(
          {each.at("name"), each.at("version"), each.at("stamp"), each.at("is_retired")});
    }
    return made;
  } catch (nlohmann::json::exception const& wrong) {
    throw error{error_kind::invalid_argument,
                fmt::format("the server's settings are not understood: {}", wrong.what())};
  }
}

std::vector<served_model> model_list::prepare(executor_orders const& orders,
                                              executor_session const& session) {
  auto const given = settings_in(orders.settings);
  auto const wanted = policy::parse(orders.policy, given.policy_file);
  auto const offered = models_of(given, wanted, orders.left_out);
  std::vector<served_model> made;
  for (auto const& each : offered) {
    if (session.end_wanted()) {
      return {};
    }
    made.push_back(model_for(made.size(), each, wanted));
    if (!orders.is_first) {
      made.back().warmup.clear();
    }
    models_.push_back(each.order);
    promises_.push_back(each.is.wanted);
  }
  auto const retired = std::count_if(models_.begin(), models_.end(),
                                     [](auto const& each) { return each.is_retired; });
  if (!faults_.empty() && faults_.size() + static_cast<std::size_t>(retired) == models_.size()) {
    throw all_faults(given);
  }
  return made;
}

void model_list::change(model_host& host, executor_orders const& orders) {
  auto const given = settings_in(orders.settings);
  auto const wanted = policy::parse(orders.policy, given.policy_file);
  auto const offered = models_of(given, wanted, orders.left_out);
  for (std::size_t place = 0; place < offered.size(); ++place) {
    auto const& to = offered[place];
    bool const is_new = place >= models_.size();
    if (!is_new && models_[place] == to.order) {
      if (to.is_named && promises_[place] != to.is.wanted) {
        host.revise(place, terms_of(place, to, wanted));
      }
    } else if (to.order.is_retired) {
      faults_.erase(place);
      if (is_new) {
        host.put(place, {});
      } else {
        host.retire(place);
      }
    } else {
      faults_.erase(place);
      host.put(place, model_for(place, to, wanted));
    }
    models_.resize(std::max(models_.size(), place + 1));
    promises_.resize(models_.size());
    models_[place] = to.order;
    promises_[place] = to.is_named ? to.is.wanted : promises_[place];
  }
}

nlohmann::json model_list::unservable() const {
  auto list = nlohmann::json::array();
  for (auto const& [place, why] : faults_) {
    list.push_back(failure_at(place, why));
  }
  return list;
}

served_model model_list::model_for(std::size_t place, offered_entry const& of,
                                   policy::policy const& wanted) {
  if (of.order.is_retired) {
    return {.name = of.order.name, .version = of.order.version};
  }
  auto fault = of.fault;
  std::unique_ptr<hosted_model> model;
  if (!fault) {
    board_->begin({.what = activity::preparing, .model = place});
    try {
      model = sluice::server::prepare(of.is.entry, shape_, device_);
    } catch (...) {
      fault = reason_for(of.order.name, caught_error());
    }
    board_->end();
  }
  if (fault) {
    faults_.emplace(place, *fault);
    model = std::make_unique<absent_model>(*fault);
  }
  auto made = served(of.is, std::move(model), wanted, shape_.backend);
  made.always_warm = made.always_warm && !fault;
  if (fault) {
    made.warmup.clear();
  }
  return made;
}

served_model model_list::terms_of(std::size_t place, offered_entry const& of,
                                  policy::policy const& wanted) const {
  auto made = served(of.is, nullptr, wanted, shape_.backend);
  made.always_warm = made.always_warm && !faults_.contains(place);
  return made;
}

error model_list::all_faults(settings const& given) const {
  std::vector<std::string> texts;
  texts.reserve(faults_.size());
  for (auto const& [place, why] : faults_) {
    texts.push_back(fmt::format("model '{}': {}", models_[place].name, why.what()));
  }
  texts.insert(texts.end(), given.unservable.begin(), given.unservable.end());
  return {faults_.begin()->second.kind(), fmt::format("{}", fmt::join(texts, "; "))};
}

}  // namespace sluice::server
