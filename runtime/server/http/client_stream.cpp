#include "runtime/server/http/client_stream.hpp"

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <boost/asio/write.hpp>
#include <cerrno>

namespace sluice::server {
namespace {

/// Of a record beyond what is in it.
constexpr int most_of_record = 512;

/// Whether that many bytes and what TLS adds to them can be written at once.
bool has_room(int fd, std::size_t bytes) {
  int queued = 0, room = 0;
  socklen_t length = sizeof(room);
  if (::ioctl(fd, SIOCOUTQ, &queued) != 0 ||
      ::getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, &length) != 0) {
    return false;
  }
  return room / 2 - queued > static_cast<int>(bytes) + most_of_record;  // the kernel counts twice
}

}  // namespace

std::size_t client_stream::read_now(boost::asio::mutable_buffer into, error_code& failure) {
  socket_.non_blocking(true, failure);
  if (failure) return 0;
  return tls_ ? tls_->next_layer().read_some(into, failure) : socket_.read_some(into, failure);
}

void client_stream::wake_for(std::size_t bytes) noexcept {
  // Under TLS the rest of a record may be less than what has been sent in it.
  if (tls_ || wakes_for_ == bytes) return;
  auto const wanted = static_cast<int>(bytes);
  if (::setsockopt(socket_.native_handle(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof(wanted)) ==
      0) {
    wakes_for_ = bytes;
  }
}

bool client_stream::send_now(std::string_view text) {
  if (!tls_) {
    auto const sent =
        ::send(socket_.native_handle(), text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    // A full buffer is a client that reads slowly: what is in it finds out whether somebody is there.
    bool const is_full = sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    return sent == static_cast<ssize_t>(text.size()) || is_full;
  }
  if (!has_room(socket_.native_handle(), text.size())) return true;
  error_code failure;
  socket_.non_blocking(true, failure);
  boost::asio::write(tls_->next_layer(), boost::asio::buffer(text.data(), text.size()), failure);
  return !failure;
}

}  // namespace sluice::server
