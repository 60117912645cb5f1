// How a connection's requests reach engines: by their path, or by the model that the body names.

#include <fmt/format.h>

#include <boost/beast/core/string.hpp>
#include <utility>

#include "runtime/server/http/connection_handlers.hpp"
#include "runtime/server/http/endpoint_security.hpp"
#include "runtime/server/http/openai_form.hpp"
#include "runtime/server/http/reply_message.hpp"
#include "runtime/server/http/request_head.hpp"

namespace sluice::server {

namespace net = boost::asio;
namespace http = boost::beast::http;

namespace {

/// Of a body that names its engine: what is read at once.
constexpr std::size_t searched_at_once = std::size_t{16} << 10U;

/// Whether the body is JSON, as far as the head says.
bool may_be_json(request_head const& head) {
  auto const type = std_view(head[http::field::content_type]);
  auto const end = type.find_first_of("; \t");
  auto const name = type.substr(0, end);
  auto const ends_with = [&](std::string_view ending) {
    return name.size() >= ending.size() &&
           boost::beast::iequals(name.substr(name.size() - ending.size()), ending);
  };
  return name.empty() || ends_with("/json") || ends_with("+json");
}

}  // namespace

std::optional<engine_route> connection::find_engine(std::optional<http_reply>& refusal) const {
  auto const* const engines = context_.options.engines;
  if (engines == nullptr) return std::nullopt;
  auto const& head = parser_->get();
  try {
    auto const found = engines->find(std_view(head.target()));
    bool const may_pass =
        head.method() != http::verb::connect && head.method() != http::verb::trace;
    if (found && !may_pass)
      refusal = oip_api::failure(501, "this method is not relayed to engines");
    if (found && head.version() != 11 && parser_->chunked()) {
      refusal = oip_api::failure(400, "a body in chunks is of HTTP/1.1");
    }
    return found;
  } catch (error const& failure) {
    refusal = oip_api::from_error(failure);
    return std::nullopt;
  }
}

void connection::pass_to_engine(engine_route where) {
  if (where.by == engine_route::kind::path) {
    return relay_request(where.engine, std::make_unique<relay::request_parser>(std::move(*parser_)),
                         {});
  }
  auto const what = openai_resource_of(std_view(parser_->get().target()));
  if (auto refusal = refuse_named(what)) {
    bool const is_over = parser_->is_done() && parser_->get().keep_alive();
    return respond(std::move(*refusal), is_over);
  }
  if (what.is != openai_resource::kind::of_a_model) return answer_of_models(what);
  state_ = state_t::searching;
  bool const waits = parser_->get().count(http::field::expect) > 0 && !parser_->is_done();
  if (waits && buffer_.size() == 0 && !stream_.send_now(continue_line)) return close();
  search_.emplace(std::move(*parser_));
  arm(context_.options.transfer_timeout);
  search_engine();
}

/// For what is known before the body.
std::optional<http_reply> connection::refuse_named(openai_resource const& what) const {
  auto const& head = parser_->get();
  auto const target = std_view(head.target());
  bool const is_of_a_model = what.is == openai_resource::kind::of_a_model;
  bool const is_read = head.method() == http::verb::get || head.method() == http::verb::head;
  if (is_of_a_model ? head.method() != http::verb::post : !is_read) {
    auto const* const takes = is_of_a_model ? "POST" : "GET, HEAD";
    auto refusal = openai_failure(
        405, fmt::format("{} does not answer {}; it takes {}{}", target,
                         std_view(head.method_string()), takes,
                         is_of_a_model ? ", with the model's name in its body: what names none "
                                         "reaches an engine by a route of its own (engine.routes)"
                                       : ""));
    refusal.allow = takes;
    return refusal;
  }
  if (!is_of_a_model) return std::nullopt;
  if (auto const coding = std_view(head[http::field::content_encoding]);
      !coding.empty() && !boost::beast::iequals(head[http::field::content_encoding], "identity")) {
    return openai_failure(415, fmt::format("the body is compressed ('{}'), and the model's name in "
                                           "it is not read then; send it as it is",
                                           coding));
  }
  if (head.count(http::field::content_type) > 1 || !may_be_json(head)) {
    return openai_failure(
        415, fmt::format("Content-Type is '{}'; a body that names its model is application/json",
                         std_view(head[http::field::content_type])));
  }
  return std::nullopt;
}

void connection::answer_of_models(openai_resource const& what) {
  auto& engines = *context_.options.engines;
  auto const models = engines.models();
  auto reply = what.is == openai_resource::kind::models ? model_list_reply(models)
                                                        : one_model_reply(models, what.model);
  bool const is_over = parser_->is_done() && parser_->get().keep_alive();
  respond(reply ? std::move(*reply) : unknown_model(what.model, engines.model_names()), is_over);
}

void connection::search_engine() {
  try {
    auto const failure = search_->take(buffer_);
    if (failure) return on_body(failure, 0);
  } catch (error const& wrong) {
    disarm();
    auto const& found = *search_->parser();
    return respond(
        openai_failure(400, wrong.what(), {.param = search_->model() == nullptr ? "model" : ""}),
        found.is_done() && found.get().keep_alive());
  }
  auto const bytes = search_->bytes();
  if (bytes > small_body) {
    if (auto refusal = take_share(bytes)) {
      disarm();
      return respond(std::move(*refusal), false);
    }
  }
  auto const* const model = search_->model();
  if (model == nullptr) {
    return stream_.async_read_some(buffer_.prepare(searched_at_once), on(&connection::on_searched));
  }
  disarm();
  auto& engines = *context_.options.engines;
  auto const engine = engines.find_model(*model);
  if (!engine) {
    auto const& parser = *search_->parser();
    return respond(unknown_model(*model, engines.model_names()),
                   parser.is_done() && parser.get().keep_alive());
  }
  begun_body begun{std::move(search_->begun()), std::move(share_), std::move(search_->body())};
  auto parser = std::move(search_->parser());
  search_.reset();
  relay_request(*engine, std::move(parser), std::move(begun));
}

void connection::on_searched(error_code failure, std::size_t bytes) {
  buffer_.commit(bytes);
  if (failure) return on_body(failure, bytes);
  search_engine();
}

void connection::relay_request(std::size_t engine, std::unique_ptr<relay::request_parser> parser,
                               begun_body begun) {
  state_ = state_t::relaying;
  auto const& head = parser->get();
  auto& engines = *context_.options.engines;
  record_.set_label({engines.name_of(engine), {}, {}});
  error_code failure;
  auto const peer = stream_.socket().remote_endpoint(failure);
  auto const security = context_.options.security ? context_.options.security->current() : nullptr;
  relay::parts parts{
      .owner = shared_from_this(),
      .client = stream_,
      .ahead = buffer_,
      .gateway = engines,
      .life = context_.life,
      .engine = engine,
      .from = {.address = failure ? "unknown" : peer.address().to_string(),
               .is_encrypted = stream_.is_encrypted(),
               .has_token = security && security->tokens},
      .expects_continue = head.count(http::field::expect) > 0 && begun.named == std::nullopt,
      .may_keep_alive = head.keep_alive() && !context_.registry.is_closed(),
      .transfer_timeout = context_.options.transfer_timeout,
      .arrival = arrival_,
      .begun = std::move(begun),
      .done = [self = shared_from_this()](relay_end end) { self->on_relayed(std::move(end)); }};
  relay_ = std::make_shared<relay>(std::move(parts), std::move(parser));
  relay_->start();
}

void connection::on_relayed(relay_end end) {
  relay_.reset();
  if (state_ == state_t::closed) return;
  record_.set_relayed(end);
  if (end.refusal) return respond(std::move(*end.refusal), end.then == relay_end::next::keep_alive);
  if (end.then == relay_end::next::cut) return close();
  record_.end();
  if (end.then == relay_end::next::keep_alive) return await_request();
  linger();
}

}  // namespace sluice::server
