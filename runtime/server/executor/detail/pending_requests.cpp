#include "runtime/server/executor/detail/pending_requests.hpp"

namespace sluice::server::detail {

void pending_requests::add(request_ticket ticket, pending_request request) {
  auto& counts = counts_.at(request.model);
  ++counts.requests;
  ++counts.waiting;
  deadlines_.emplace(request.deadline, ticket);
  requests_.emplace(ticket, std::move(request));
}

pending_request* pending_requests::find(request_ticket ticket) {
  auto const found = requests_.find(ticket);
  return found == requests_.end() ? nullptr : &found->second;
}

pending_request pending_requests::remove(
    std::map<request_ticket, pending_request>::iterator which) {
  auto taken = std::move(which->second);
  auto const ticket = which->first;
  deadlines_.erase({taken.deadline, ticket});
  requests_.erase(which);
  --counts_.at(taken.model).waiting;
  if (gone_) {
    gone_(taken.model, ticket);
  }
  return taken;
}

std::optional<pending_request> pending_requests::take(request_ticket ticket) {
  auto const found = requests_.find(ticket);
  return found == requests_.end() ? std::nullopt : std::optional{remove(found)};
}

std::vector<std::pair<request_ticket, pending_request>> pending_requests::take_late(
    time_point now) {
  std::vector<std::pair<request_ticket, pending_request>> late;
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    auto const ticket = deadlines_.begin()->second;
    late.emplace_back(ticket, remove(requests_.find(ticket)));
  }
  return late;
}

std::vector<pending_request> pending_requests::take_all_of(std::size_t model) {
  std::vector<pending_request> taken;
  for (auto next = requests_.begin(); next != requests_.end();) {
    auto const each = next++;
    if (each->second.model == model) {
      taken.push_back(remove(each));
    }
  }
  return taken;
}

void pending_requests::separate(std::size_t model) {
  for (auto& each : requests_) {
    if (each.second.model == model) {
      each.second.request.is_alone = true;
    }
  }
}

std::vector<pending_request> pending_requests::take_all() {
  std::vector<pending_request> taken;
  while (!requests_.empty()) {
    taken.push_back(remove(requests_.begin()));
  }
  return taken;
}

std::vector<request_ticket> pending_requests::tickets() const {
  std::vector<request_ticket> found;
  found.reserve(requests_.size());
  for (auto const& each : requests_) {
    found.push_back(each.first);
  }
  return found;
}

std::optional<pending_requests::time_point> pending_requests::next_deadline() const {
  return deadlines_.empty() ? std::nullopt : std::optional{deadlines_.begin()->first};
}

std::optional<request_ticket> pending_requests::first() const {
  return requests_.empty() ? std::nullopt : std::optional{requests_.begin()->first};
}

void pending_requests::on_answer(std::size_t model, error const* failure) {
  auto& counts = counts_.at(model);
  counts.failed += failure != nullptr ? 1 : 0;
  counts.cancelled += failure != nullptr && failure->kind() == error_kind::cancelled ? 1 : 0;
}

void pending_requests::on_refusal(std::size_t model, bool would_be_late) {
  auto& counts = counts_.at(model);
  ++counts.requests;
  ++counts.failed;
  counts.refused += would_be_late ? 1 : 0;
}

request_counts pending_requests::total() const {
  request_counts sum;
  for (auto const& each : counts_) {
    sum.requests += each.requests;
    sum.failed += each.failed;
    sum.cancelled += each.cancelled;
    sum.refused += each.refused;
    sum.waiting += each.waiting;
  }
  return sum;
}

}  // namespace sluice::server::detail
