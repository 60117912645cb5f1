#include "runtime/server/http/model_search.hpp"

namespace sluice::server {

boost::system::error_code model_search::take(boost::beast::flat_buffer& from) {
  boost::system::error_code failure;
  (void)take_pieces(*parser_, from, failure, [this](std::string const& piece) {
    body_.take(piece);
    begun_ += piece;
    return true;
  });
  // Without a model it is refused here; with one the relay looks whether it is whole.
  if (!failure && parser_->is_done() && body_.model() == nullptr) body_.finish();
  return failure;
}

}  // namespace sluice::server
