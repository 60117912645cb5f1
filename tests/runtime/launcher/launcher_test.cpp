#include "runtime/launcher/launcher.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "memhandover/base/bytes.hpp"
#include "memhandover/base/error.hpp"

namespace sluice::launcher {
namespace {

using namespace sluice::literals;
using testing::HasSubstr;

install_layout const installed{"/opt/bin/sluice",
                               "/opt/bin/sluice-server",
                               {"2.11"},
                               "/opt/lib/_torch/2.11/sluice-executor",
                               "/opt/lib/libsluice_runtime.so",
                               "/opt/lib/libsluice_gate.so",
                               "/opt/lib/libsluice_nccl.so",
                               "/opt/lib/python",
                               "/opt/lib/python/sluice/startup"};

TEST(sharing_environment, says_where_everything_is) {
  auto const env = sharing_environment(environment{{"HOME=/h", "PYTHONPATH=/mine"}}, installed, {},
                                       {"/run/sluice", "host"});
  EXPECT_EQ(env.get("HOME"), "/h");
  EXPECT_EQ(env.get("SLUICE_RUN"), "1");
  EXPECT_EQ(env.get("SLUICE_RUNTIME_DIR"), "/run/sluice");
  EXPECT_EQ(env.get("SLUICE_RUNTIME_LIBRARY"), "/opt/lib/libsluice_runtime.so");
  EXPECT_EQ(env.get("SLUICE_BROKER"), "/opt/bin/sluice");
  EXPECT_EQ(env.get("PYTHONPATH"), "/opt/lib/python/sluice/startup:/opt/lib/python:/mine");
}

TEST(sharing_environment, has_python_start_with_sluice_where_the_pool_is_on_the_host_alone) {
  auto const outer = sharing_environment({}, installed, {}, {"/r", "host"});
  EXPECT_EQ(sharing_environment(outer, installed, {}, {"/r", "host"}).get("PYTHONPATH"),
            "/opt/lib/python/sluice/startup:/opt/lib/python");
  EXPECT_EQ(sharing_environment(outer, installed, {}, {"/r", "cuda"}).get("PYTHONPATH"),
            "/opt/lib/python");
  EXPECT_EQ(plain_environment(outer, installed).get("PYTHONPATH"), "/opt/lib/python");
}

TEST(sharing_environment, leaves_out_a_folder_that_python_path_cannot_name) {
  auto elsewhere = installed;
  elsewhere.startup_folder = "/o:pt/sluice/startup";
  EXPECT_EQ(sharing_environment({}, elsewhere, {}, {"/r", "host"}).get("PYTHONPATH"),
            "/opt/lib/python");
}

TEST(sharing_environment, passes_on_what_was_asked_for_and_nothing_else) {
  run_options asked;
  asked.pool_bytes = 4_GiB;
  asked.host_copy_bytes = 1_GiB;
  asked.host_copy_disk = {"/disk", 2_GiB};
  asked.backend = "cuda";
  asked.device = 2;
  asked.name = "digits";
  asked.priority = "high";
  asked.min_memory = "25%";
  auto const env = sharing_environment({}, installed, asked, {"/run/sluice", "cuda"});
  EXPECT_EQ(env.get("SLUICE_POOL_BYTES"), "4294967296");
  EXPECT_EQ(env.get("SLUICE_HOST_COPY_BYTES"), "1073741824");
  EXPECT_EQ(env.get("SLUICE_HOST_COPY_DISK_BYTES"), "2147483648");
  EXPECT_EQ(env.get("SLUICE_HOST_COPY_DISK_PATH"), "/disk");
  EXPECT_EQ(env.get("SLUICE_BACKEND"), "cuda");
  EXPECT_EQ(env.get("SLUICE_DEVICE"), "2");
  EXPECT_EQ(env.get("SLUICE_NAME"), "digits");
  EXPECT_EQ(env.get("SLUICE_PRIORITY"), "high");
  EXPECT_EQ(env.get("SLUICE_MIN_MEMORY"), "25%");
  EXPECT_EQ(env.get("SLUICE_ROLE"), std::nullopt);
  asked.role = "engine";
  auto const engine = sharing_environment({}, installed, asked, {"/run/sluice", "cuda"});
  EXPECT_EQ(engine.get("SLUICE_ROLE"), "engine");
  auto const beside = sharing_environment(env, installed, asked, {"/run/sluice", "cuda"});
  for (auto const* name : {"SLUICE_PRIORITY", "SLUICE_MIN_MEMORY"}) {
    EXPECT_EQ(beside.get(name), std::nullopt) << "only jobs have a " << name;
  }
  // What an engine starts by itself with `sluice run` is a job.
  EXPECT_EQ(sharing_environment(engine, installed, {}, {"/run/sluice", "cuda"}).get("SLUICE_ROLE"),
            std::nullopt);
  auto const silent = sharing_environment({}, installed, {}, {"/run/sluice", "cuda"});
  for (auto const* name :
       {"SLUICE_POOL_BYTES", "SLUICE_HOST_COPY_BYTES", "SLUICE_HOST_COPY_DISK_BYTES",
        "SLUICE_HOST_COPY_DISK_PATH", "SLUICE_BACKEND", "SLUICE_DEVICE", "SLUICE_NAME",
        "SLUICE_PRIORITY", "SLUICE_MIN_MEMORY"}) {
    EXPECT_EQ(silent.get(name), std::nullopt) << name;
  }
}

TEST(sharing_environment, tells_processes_that_they_must_share_only_if_that_is_asked_for) {
  environment const outer{{"SLUICE_REQUIRE_POOL=1"}};
  run_options asked;
  EXPECT_EQ(sharing_environment(outer, installed, asked, {"/r", "host"}).get("SLUICE_REQUIRE_POOL"),
            std::nullopt);
  EXPECT_EQ(plain_environment(outer, installed).get("SLUICE_REQUIRE_POOL"), std::nullopt);
  asked.require_pool = true;
  EXPECT_EQ(sharing_environment({}, installed, asked, {"/r", "host"}).get("SLUICE_REQUIRE_POOL"),
            "1");
}

TEST(sharing_environment, preloads_the_gate_behind_the_users_own_for_a_pool_on_a_gpu) {
  environment const mine{{"LD_PRELOAD=/usr/lib/libjemalloc.so"}};
  EXPECT_EQ(sharing_environment(mine, installed, {}, {"/r", "cuda"}).get("LD_PRELOAD"),
            "/usr/lib/libjemalloc.so:/opt/lib/libsluice_gate.so:/opt/lib/libsluice_nccl.so");
  EXPECT_EQ(sharing_environment({}, installed, {}, {"/r", "cuda"}).get("LD_PRELOAD"),
            "/opt/lib/libsluice_gate.so:/opt/lib/libsluice_nccl.so");
}

TEST(sharing_environment, leaves_collectives_to_nccl_if_that_was_asked_for) {
  auto const plain = complete({}, environment{{"SLUICE_COLLECTIVES=plain"}});
  EXPECT_EQ(sharing_environment({}, installed, plain, {"/r", "cuda"}).get("LD_PRELOAD"),
            "/opt/lib/libsluice_gate.so");
  auto const agree = complete({}, environment{{"SLUICE_COLLECTIVES=agree"}});
  EXPECT_EQ(sharing_environment({}, installed, agree, {"/r", "cuda"}).get("LD_PRELOAD"),
            "/opt/lib/libsluice_gate.so:/opt/lib/libsluice_nccl.so");
  EXPECT_EQ(sharing_environment({}, installed, agree, {"/r", "host"}).get("LD_PRELOAD"),
            std::nullopt);
}

TEST(sharing_environment, leaves_the_preloads_alone_for_a_pool_on_the_host) {
  environment const mine{{"LD_PRELOAD=/usr/lib/libjemalloc.so"}};
  EXPECT_EQ(sharing_environment(mine, installed, {}, {"/r", "host"}).get("LD_PRELOAD"),
            "/usr/lib/libjemalloc.so");
}

TEST(plain_environment, does_not_let_a_command_believe_that_it_shares) {
  environment const inner{{"SLUICE_RUN=1", "SLUICE_RUNTIME_LIBRARY=/x.so", "SLUICE_NAME=n"}};
  auto const env = plain_environment(inner, installed);
  EXPECT_EQ(env.get("SLUICE_RUN"), std::nullopt);
  EXPECT_EQ(env.get("SLUICE_RUNTIME_LIBRARY"), std::nullopt);
  EXPECT_EQ(env.get("PYTHONPATH"), "/opt/lib/python") << "import sluice works all the same";
}

TEST(complete, what_is_asked_for_comes_before_what_the_environment_says) {
  environment const env{{"SLUICE_BACKEND=host", "SLUICE_DEVICE=1", "SLUICE_POOL_BYTES=1048576"}};
  auto const from_environment = complete({}, env);
  EXPECT_EQ(from_environment.backend, "host");
  EXPECT_EQ(from_environment.device, 1);
  EXPECT_EQ(from_environment.pool_bytes, 1_MiB);
  run_options asked;
  asked.backend = "auto";
  asked.device = 0;
  asked.pool_bytes = 2_MiB;
  auto const from_options = complete(asked, env);
  EXPECT_EQ(from_options.backend, "auto");
  EXPECT_EQ(from_options.device, 0);
  EXPECT_EQ(from_options.pool_bytes, 2_MiB);
}

TEST(complete, a_job_with_a_minimum_is_not_run_outside_of_the_pool) {
  EXPECT_FALSE(complete({}, environment{{"SLUICE_PRIORITY=low"}}).require_pool);
  EXPECT_FALSE(complete({}, environment{{"SLUICE_MIN_MEMORY=0"}}).require_pool);
  EXPECT_TRUE(complete({}, environment{{"SLUICE_MIN_MEMORY=10%"}}).require_pool);
  run_options asked;
  asked.min_memory = "1048576";
  asked.priority = "high";
  auto const completed =
      complete(asked, environment{{"SLUICE_MIN_MEMORY=0", "SLUICE_PRIORITY=low"}});
  EXPECT_TRUE(completed.require_pool);
  EXPECT_EQ(completed.min_memory, "1048576");
  EXPECT_EQ(completed.priority, "high");
}

TEST(complete, a_variable_with_an_impossible_value_is_named) {
  for (auto const* entry :
       {"SLUICE_BACKEND=gpu", "SLUICE_DEVICE=-1", "SLUICE_DEVICE=one", "SLUICE_POOL_BYTES=4GiB",
        "SLUICE_POOL_BYTES=-5", "SLUICE_COLLECTIVES=nccl", "SLUICE_PRIORITY=urgent",
        "SLUICE_MIN_MEMORY=4GiB", "SLUICE_MIN_MEMORY=120%"}) {
    std::string const text{entry};
    try {
      (void)complete({}, environment{{text}});
      ADD_FAILURE() << text << " was accepted";
    } catch (error const& why) {
      EXPECT_EQ(why.kind(), error_kind::invalid_argument);
      EXPECT_THAT(why.what(), HasSubstr(text.substr(0, text.find('='))));
      EXPECT_THAT(why.what(), HasSubstr("correct or unset it"));
    }
  }
}

}  // namespace
}  // namespace sluice::launcher
