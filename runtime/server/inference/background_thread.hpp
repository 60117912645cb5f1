/// A thread for work that takes long and can wait: it gives way to all others of the machine.
///
///   background_thread bodies;
///   bodies.post([] { read_a_large_body(); });
///
/// All members may be called from any thread. What has not begun when it is destroyed is dropped.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <utility>

namespace sluice::server {

/// Waits are short where threads that compute for long give way to all others. The kernel owes each its share, which it takes in turns
/// of some milliseconds however little it is: so it is a small one, a tenth of a core that others would use all of.
inline void give_way() noexcept {
  constexpr int nicer = 10;
  auto const self = static_cast<id_t>(::gettid());
  (void)::setpriority(PRIO_PROCESS, self, ::getpriority(PRIO_PROCESS, self) + nicer);
}

class background_thread {
 public:
  background_thread() {
    post([] { give_way(); });
  }
  background_thread(background_thread const&) = delete;
  background_thread& operator=(background_thread const&) = delete;
  background_thread(background_thread&&) = delete;
  background_thread& operator=(background_thread&&) = delete;
  ~background_thread() {
    thread_.stop();
    thread_.join();
  }

  /// `work` must not throw.
  template <typename Work>
  void post(Work work) {
    boost::asio::post(thread_, std::move(work));
  }
  /// Until all has been done that was posted.
  void finish() { thread_.join(); }

 private:
  boost::asio::thread_pool thread_{1};
};

}  // namespace sluice::server
