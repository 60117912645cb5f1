/// What the access log gets to know of a connection's present request, step by step. Without a log nothing is kept.
///
/// To be used on the connection's thread alone.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/server/http/access_log.hpp"
#include "runtime/server/http/relay.hpp"
#include "runtime/server/http/request_head.hpp"

namespace sluice::server {

/// What an inference request calls itself, and whom it asks.
struct request_label {
  std::string model, version, id;
};

class request_record {
 public:
  request_record(std::shared_ptr<access_log> log, boost::asio::ip::tcp::socket const& socket);

  /// Its first bytes are there.
  void begin();
  void set_head(request_head const& head);
  void set_body(std::uint64_t bytes);
  void set_label(request_label label);
  void set_result(infer_result const& result);
  void set_reply(http_reply const& reply);
  void set_relayed(relay_end const& end);
  /// Once for each `begin`; without one it does nothing. `cause` is why it ends, where nothing else has failed.
  void end(std::string_view cause = {});

 private:
  std::shared_ptr<access_log> log_;
  std::string peer_;
  std::optional<access_entry> entry_;
};

}  // namespace sluice::server
