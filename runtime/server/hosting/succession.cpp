// What a model_host takes over from a server that was killed, and leaves to the one that comes after it. The executor's.

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "runtime/server/hosting/detail/model_host_impl.hpp"
#include "runtime/telemetry/logging.hpp"

namespace sluice::server {
namespace {

/// Under which name it is left to a successor.
std::string key_of(detail::slot const& model) {
  auto key = model.is.name + '/' + model.is.version;
  if (key.size() > memhandover::max_warm_key) {
    key.resize(memhandover::max_warm_key);  // another one of that beginning has another fingerprint
  }
  return key;
}

constexpr std::size_t words_of_a_fingerprint = 512;

/// Empty: not known.
std::string identity_of(hosted_model const& model, memhandover::pool_shape const& where) {
  auto words = model.fingerprint();
  words.resize(std::min(words.size(), words_of_a_fingerprint));
  return words.empty() ? words
                       : fmt::format("{} bytes={} on={}", words, model.bytes(),
                                     where.backend == memhandover::backend_kind::cuda
                                         ? memhandover::to_string(where.gpu)
                                         : "host");
}

}  // namespace

/// What a host before this one has known of it.
void model_host::impl::recall(slot& model) const {
  if (!options_.learnt) {
    return;
  }
  model.stands_for = identity_of(*model.is.model, pool_->shape());
  auto const found = model.stands_for.empty()
                         ? std::nullopt
                         : options_.learnt->find(key_of(model), model.stands_for);
  if (!found) {
    return;
  }
  try {
    auto const now = clock::now();
    model.controller.recall(found->learnt, found->age, now);
    model.report = model.controller.tick(now);
  } catch (std::invalid_argument const& wrong) {
    spdlog::warn("what has been learnt of a model is not used model={} reason={}", model.is.name,
                 telemetry::quoted(wrong.what()));
  }
}

/// Where there is news.
void model_host::impl::keep_learnt(lock_type& lock) {
  if (!options_.learnt || !options_.learnt->is_due(clock::now())) {
    return;
  }
  std::uint64_t events = 0;
  for (auto const& each : slots_) {
    events += each.report.arrivals + each.report.services + each.report.loads;
  }
  if (std::exchange(learnt_events_, events) != events) {
    write_learnt(lock);
  }
}

void model_host::impl::write_learnt(lock_type& lock) {
  if (!options_.learnt) {
    return;
  }
  std::vector<model_experience> all;
  // Others may come meanwhile. NOLINTNEXTLINE(modernize-loop-convert)
  for (model_index place = 0; place < slots_.size(); ++place) {
    auto& each = slots_[place];
    if (!each.is_retired && !each.stands_for.empty()) {
      all.push_back({key_of(each), each.stands_for, each.controller.learnt(clock::now())});
    }
    lock.unlock();  // requests get in between two
    lock.lock();
  }
  lock.unlock();
  options_.learnt->keep(std::move(all));
  lock.lock();
}

/// What a server that has died had warm, and this one serves as well, is warm here.
void model_host::impl::take_over(lock_type& lock) {
  for (auto& each : slots_) {
    try {
      take_over(lock, each);
    } catch (...) {
      if (!lock.owns_lock()) {
        lock.lock();
      }
      spdlog::warn("a warm model cannot be taken over model={} reason={}", each.is.name,
                   telemetry::quoted(caught_error().what()));
    }
  }
  lock.unlock();
  heap_.release_rest();
  lock.lock();
  taken_over_ = true;
  computes_.notify_all();
  changed_.notify_all();
}

void model_host::impl::take_over(lock_type& lock, slot& model) {
  auto const fingerprint = model.is.model->fingerprint();
  if (fingerprint.empty() || model.is.model->bytes() == 0) {
    return;
  }
  auto const place = place_of(model);
  lock.unlock();
  auto const begin = clock::now();
  std::optional<detail::shown_action> shown{std::in_place, *board_, activity::loading, place};
  auto left = heap_.adopt({model.is.model->pieces(), model.is.name, detail::residence_of(model)},
                          key_of(model), fingerprint);
  if (left) {
    if (left->intact) {
      model.is.model->attach(left->tensors.addresses());
    } else {  // it died computing, which may have changed them
      model.is.model->load(left->tensors.addresses());
      heap_.set_in_use(left->tensors, false);
    }
    model.memory = std::move(left->tensors);
  }
  shown.reset();
  auto const end = clock::now();
  lock.lock();
  if (left) {
    set_state(model, model_state::warm);
    model.offered = model.published = true;
    model.image_wanted = false;  // its first answer comes first
    model.idle_since = end;
    spdlog::info(
        "took over a warm model model={} bytes={} copied_bytes={} read_bytes={} took_us={:.0f}",
        model.is.name, model.memory.bytes(), left->intact ? 0 : model.memory.bytes(),
        model.is.model->read_bytes(), detail::microseconds(end - begin));
  }
}

/// A successor may have it from now on. Off the path of requests.
void model_host::impl::publish(lock_type& lock, slot& model) {
  model.offered = true;
  auto const fingerprint = model.is.model->fingerprint();
  if (fingerprint.empty() || !model.memory) {
    return;
  }
  model.taken = true;
  lock.unlock();
  bool published = false;
  try {
    published = heap_.publish(model.memory, key_of(model), fingerprint);
    heap_.set_in_use(model.memory, !model.is.model->is_intact());
  } catch (...) {
    spdlog::warn("a warm model would not outlive this server model={} reason={}", model.is.name,
                 telemetry::quoted(caught_error().what()));
  }
  lock.lock();
  model.taken = false;
  computes_.notify_one();
  model.published = published;
}

}  // namespace sluice::server
