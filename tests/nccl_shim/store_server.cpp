#include "tests/nccl_shim/store_server.hpp"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <utility>

#include "tests/runtime/gate/built_files.hpp"

namespace sluice::nccl_shim::testing {

store_server::store_server(std::vector<std::string> const& command_in_front) {
  auto words = command_in_front;
  words.push_back(gate::built("bin/sluice_store_server"));
  std::vector<char*> arguments;
  for (auto& word : words) {
    arguments.push_back(word.data());
  }
  arguments.push_back(nullptr);
  std::array<int, 2> input{};
  std::array<int, 2> output{};
  if (::pipe2(input.data(), O_CLOEXEC) != 0 || ::pipe2(output.data(), O_CLOEXEC) != 0) {
    throw std::runtime_error{"no pipes"};
  }
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(input[0], STDIN_FILENO);
    ::dup2(output[1], STDOUT_FILENO);
    ::execvp(arguments.front(), arguments.data());
    ::_exit(127);
  }
  ::close(input[0]);
  ::close(output[1]);
  input_ = input[1];
  std::unique_ptr<FILE, int (*)(FILE*)> const said{::fdopen(output[0], "r"), ::fclose};
  std::array<char, 64> line{};
  if (std::fgets(line.data(), static_cast<int>(line.size()), said.get()) == nullptr) {
    kill(SIGKILL);
    ::close(input_);
    throw std::runtime_error{"the store does not start: " + words.back()};
  }
  port_ = static_cast<std::uint16_t>(std::atoi(line.data()));
}

store_server::~store_server() {
  kill(SIGKILL);
  ::close(input_);
}

void store_server::kill(int signal) {
  if (pid_ <= 0) {
    return;
  }
  ::kill(pid_, signal);
  if (signal == SIGKILL) {
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }
}

}  // namespace sluice::nccl_shim::testing
