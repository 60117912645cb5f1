/// The gate preloaded into a program that knows nothing of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "tests/runtime/gate/built_files.hpp"

namespace sluice::gate {
namespace {

using ::testing::HasSubstr;

/// What the probe printed, on both streams, and its exit status at the end.
std::string run(std::string const& environment, std::string const& arguments,
                std::string const& preloaded = gate_path()) {
  // The sanitizers' run-time libraries have to come first, which a preloaded library prevents; it
  // does no harm here.
  std::string const command = "ASAN_OPTIONS=verify_asan_link_order=0:detect_leaks=0 " +
                              environment + " LD_PRELOAD=" + preloaded + " " +
                              built("bin/sluice_preload_probe") + " " + arguments +
                              " 2>&1; echo status $?";
  std::unique_ptr<FILE, int (*)(FILE*)> const pipe{::popen(command.c_str(), "r"), &::pclose};
  std::string output;
  std::array<char, 4096> buffer{};
  while (pipe != nullptr &&
         std::fgets(buffer.data(), static_cast<int>(buffer.size()), pipe.get()) != nullptr) {
    output += buffer.data();
  }
  return output;
}

std::string const plugin_path = built("lib/libsluice_preload_plugin.so");
std::string const over_fake = "SLUICE_REAL_LIBCUDA=" + fake_driver_path();

TEST(preloaded, it_opens_no_driver_and_starts_no_thread_before_cuda_is_used) {
  EXPECT_EQ(run(over_fake, "inert"),
            "threads 1\ndriver not open\n"
            "dlopen libcuda.so.1: gate\ndriver not open\n"
            "init 0\ndriver open\nstatus 0\n");
}

TEST(preloaded, it_answers_every_request_for_libcuda_and_no_other) {
  std::string const output = run(over_fake, "open " + fake_driver_path() + " " + plugin_path);
  EXPECT_THAT(output, HasSubstr("dlopen libcuda.so.1: gate\n"));
  EXPECT_THAT(output, HasSubstr("dlopen libcuda.so: gate\n"));
  EXPECT_THAT(output, HasSubstr("dlopen libcuda.so.580.1: gate\n"));
  EXPECT_THAT(output, HasSubstr("dlopen path: gate\n"));
  EXPECT_THAT(output, HasSubstr("dlmopen: gate\n"));
  EXPECT_THAT(output, HasSubstr("itself opens\n"));
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // The sanitizers' own dlopen comes between, and hides the caller.
  EXPECT_THAT(output, HasSubstr("neighbour found\n"));
#endif
  EXPECT_THAT(output, HasSubstr("missing fails: libnosuchlibrary.so.7: cannot open"));
  EXPECT_THAT(output, HasSubstr("status 0\n"));
}

TEST(preloaded, a_driver_asked_for_by_path_is_used_where_no_other_is_found) {
  std::string const output =
      run("env -u SLUICE_REAL_LIBCUDA", "open " + fake_driver_path() + " " + plugin_path);
  EXPECT_THAT(output, HasSubstr("dlopen path: gate\n"));
}

TEST(preloaded, a_driver_on_the_library_path_is_found) {
  std::string const folder = std::filesystem::path{fake_driver_path()}.parent_path().string();
  EXPECT_EQ(run("LD_LIBRARY_PATH=/nonexistent:" + folder, "first"), "version 0 1\nstatus 0\n");
}

TEST(preloaded, the_very_first_call_keeps_its_arguments) {
  EXPECT_EQ(run(over_fake, "first"), "version 0 1\nstatus 0\n");
}

TEST(preloaded, without_a_driver_it_behaves_as_if_there_were_no_cuda) {
  EXPECT_EQ(run("SLUICE_REAL_LIBCUDA=/nonexistent/libcuda.so.1", "absent"),
            "dlopen libcuda.so.1: fails\ndlopen libcuda.so: fails\n"
            "init 100\nname CUDA_ERROR_NO_DEVICE\ncount 3\nlaunch 3\nstatus 0\n");
}

TEST(preloaded, it_never_takes_itself_for_the_driver) {
  EXPECT_THAT(run("SLUICE_REAL_LIBCUDA=" + gate_path(), "absent"), HasSubstr("init 100\n"));
}

TEST(preloaded, outside_sluice_run_the_driver_answers) {
  EXPECT_EQ(run(over_fake + " SLUICE_RUNTIME_LIBRARY=" + test_runtime_path(), "attach"),
            "init 0\ncontext 0 0\ninfo 0 1024 MiB\ninfo 0 1024 MiB\nstatus 0\n");
}

TEST(preloaded, under_sluice_run_the_runtime_answers) {
  EXPECT_EQ(
      run(over_fake + " SLUICE_RUN=1 SLUICE_RUNTIME_LIBRARY=" + test_runtime_path(), "attach"),
      "init 0\ncontext 0 0\ninfo 0 1048576 MiB\ninfo 0 1048576 MiB\nstatus 0\n");
}

TEST(preloaded, a_runtime_that_declines_is_asked_once_and_the_driver_answers) {
  EXPECT_EQ(run(over_fake + " TEST_RUNTIME_DECLINES=1 SLUICE_RUN=1 SLUICE_RUNTIME_LIBRARY=" +
                    test_runtime_path(),
                "attach"),
            "init 0\ncontext 0 0\ninfo 0 1024 MiB\ninfo 0 1024 MiB\nstatus 0\n");
}

TEST(preloaded, a_runtime_that_cannot_be_opened_is_named_once_and_the_job_runs) {
  std::string const output =
      run(over_fake + " SLUICE_RUN=1 SLUICE_RUNTIME_LIBRARY=/nonexistent/lib.so", "attach");
  EXPECT_THAT(
      output,
      HasSubstr("sluice: cannot open the runtime library; this process runs without sharing: "
                "/nonexistent/lib.so"));
  EXPECT_EQ(output.find("sluice:"), output.rfind("sluice:"));
  EXPECT_THAT(output, HasSubstr("info 0 1024 MiB\ninfo 0 1024 MiB\nstatus 0\n"));
}

TEST(preloaded, a_process_that_must_share_ends_where_it_cannot) {
  for (std::string const why : {"SLUICE_RUNTIME_LIBRARY=/nonexistent/lib.so",
                                "TEST_RUNTIME_DECLINES=1 SLUICE_RUNTIME_LIBRARY="}) {
    std::string const output = run(over_fake + " SLUICE_RUN=1 SLUICE_REQUIRE_POOL=1 " + why +
                                       (why.back() == '=' ? test_runtime_path() : std::string{}),
                                   "attach");
    EXPECT_THAT(output, HasSubstr("--require-pool does not let it run without sharing"));
    EXPECT_THAT(output, ::testing::EndsWith("status 125\n"));
    EXPECT_EQ(output.find("info"), std::string::npos) << output;
  }
}

TEST(preloaded, a_library_that_launches_past_the_gate_is_named_and_nothing_is_shared) {
  std::string const rival = built("lib/libsluice_preload_rival.so");
  std::string const output =
      run(over_fake + " SLUICE_RUN=1 SLUICE_RUNTIME_LIBRARY=" + test_runtime_path(), "attach",
          rival + ":" + gate_path());
  EXPECT_THAT(output, HasSubstr("sluice: launches would go past the gate: cuLaunchKernel, as "
                                "libraries are linked to it, is that of " +
                                rival));
  EXPECT_EQ(output.find("sluice:"), output.rfind("sluice:"));
  EXPECT_THAT(output, HasSubstr("info 0 1024 MiB\ninfo 0 1024 MiB\nstatus 0\n"));
}

TEST(preloaded, a_driver_that_cannot_be_loaded_is_named_and_counts_as_none) {
  std::string const output = run("SLUICE_REAL_LIBCUDA=/etc/passwd", "absent");
  EXPECT_THAT(output, HasSubstr("sluice: found the CUDA driver but could not load it"));
  EXPECT_THAT(output, HasSubstr("init 100\n"));
}

}  // namespace
}  // namespace sluice::gate
