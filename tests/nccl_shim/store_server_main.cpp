/// A server of torch's c10d::TCPStore, as torchrun has one, for tests: prints its port, and ends with its
/// standard input.
///
///   sluice_store_server [PORT]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

int main(int argc, char** argv) {
  try {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(argc > 1 ? std::atoi(argv[1]) : 0);
    options.isServer = true;
    options.waitWorkers = false;
    c10d::TCPStore const server{"localhost", options};
    std::printf("%u\n", unsigned{server.getPort()});
    std::fflush(stdout);
    for (char byte = 0; ::read(STDIN_FILENO, &byte, 1) > 0;) {
    }
  } catch (std::exception const& failure) {
    std::fprintf(stderr, "%s\n", failure.what());
    return 1;
  }
  return 0;
}
