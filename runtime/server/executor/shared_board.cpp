#include "runtime/server/executor/shared_board.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>
#include <utility>

#include "memhandover/base/standard_streams.hpp"
#include "memhandover/base/system_error.hpp"

namespace sluice::server {
namespace {

using memhandover::unique_fd;

void* map(unique_fd const& file) {
  void* const mapped =
      ::mmap(nullptr, sizeof(host_board), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) {
    throw memhandover::system_error("cannot map what a server and its executor share");
  }
  return mapped;
}

std::shared_ptr<host_board> owned(host_board* board) {
  return {board, [](host_board* mapped) { ::munmap(mapped, sizeof *mapped); }};
}

}  // namespace

shared_board make_shared_board() {
  auto file = memhandover::beside_standard_streams(
      unique_fd{::memfd_create("sluice-executor", MFD_CLOEXEC)});
  if (!file || ::ftruncate(file.get(), sizeof(host_board)) != 0) {
    throw memhandover::system_error("cannot make what a server and its executor share");
  }
  return {owned(new (map(file)) host_board), std::move(file)};
}

std::shared_ptr<host_board> open_shared_board(unique_fd file) {
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0 || facts.st_size < off_t{sizeof(host_board)}) {
    throw error{error_kind::invalid_argument,
                "what a server and its executor share is of another size than here"};
  }
  return owned(std::launder(static_cast<host_board*>(map(file))));
}

}  // namespace sluice::server
