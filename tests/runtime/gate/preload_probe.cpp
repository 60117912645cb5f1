/// A program that knows nothing of Sluice and asks for CUDA as programs do. preload_test.cpp runs
/// it with the gate preloaded; it prints what it sees, one fact a line.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

namespace {

bool maps_contain(char const* text) {
  std::ifstream maps{"/proc/self/maps"};
  for (std::string line; std::getline(maps, line);) {
    if (line.find(text) != std::string::npos) {
      return true;
    }
  }
  return false;
}

int thread_count() {
  std::ifstream status{"/proc/self/status"};
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("Threads:")) {
      return std::stoi(line.substr(8));
    }
  }
  return -1;
}

char const* where(void* function) {
  Dl_info info{};
  if (function == nullptr || dladdr(function, &info) == 0) {
    return "nowhere";
  }
  return std::strstr(info.dli_fname, "libsluice_gate") != nullptr ? "gate" : "elsewhere";
}

void report_open(char const* name) {
  void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  char const* base = std::strrchr(name, '/');
  std::printf("dlopen %s: %s\n", base != nullptr ? "path" : name,
              handle != nullptr ? where(dlsym(handle, "cuLaunchKernel")) : "fails");
}

int call_init() {
  auto const init = reinterpret_cast<int (*)(unsigned)>(dlsym(RTLD_DEFAULT, "cuInit"));
  return init != nullptr ? init(0) : -1;
}

}  // namespace

int main(int argc, char** argv) {
  std::string const what = argc > 1 ? argv[1] : "";
  if (what == "inert") {
    std::printf("threads %d\ndriver %s\n", thread_count(),
                maps_contain("fake_driver") ? "open" : "not open");
    report_open("libcuda.so.1");
    std::printf("driver %s\n", maps_contain("fake_driver") ? "open" : "not open");
    std::printf("init %d\n", call_init());
    std::printf("driver %s\n", maps_contain("fake_driver") ? "open" : "not open");
  } else if (what == "open") {
    report_open("libcuda.so.1");
    report_open("libcuda.so");
    report_open("libcuda.so.580.1");
    report_open(argv[2]);
    void* handle = dlmopen(LM_ID_BASE, "libcuda.so.1", RTLD_NOW);
    std::printf("dlmopen: %s\n",
                handle != nullptr ? where(dlsym(handle, "cuLaunchKernel")) : "fails");
    void* self = dlopen(nullptr, RTLD_NOW);
    std::printf("itself %s\n", self != nullptr ? "opens" : "fails");
    void* plugin = dlopen(argv[3], RTLD_NOW);
    auto const neighbour =
        plugin != nullptr ? reinterpret_cast<int (*)()>(dlsym(plugin, "plugin_opens_neighbour"))
                          : nullptr;
    std::printf("neighbour %s\n", neighbour != nullptr && neighbour() == 1 ? "found" : "lost");
    void* missing = dlopen("libnosuchlibrary.so.7", RTLD_NOW);
    std::printf("missing %s: %s\n", missing == nullptr ? "fails" : "opens", dlerror());
  } else if (what == "first") {
    // The first call of the process goes through a jump stub that has to open the driver and keep
    // the arguments.
    auto const version = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_DEFAULT, "cuDriverGetVersion"));
    int found = 0;
    int const result = version(&found);
    std::printf("version %d %d\n", result, found > 11000 ? 1 : 0);
  } else if (what == "absent") {
    report_open("libcuda.so.1");
    report_open("libcuda.so");
    std::printf("init %d\n", call_init());
    char const* text = nullptr;
    auto const name =
        reinterpret_cast<int (*)(int, char const**)>(dlsym(RTLD_DEFAULT, "cuGetErrorName"));
    name(100, &text);
    std::printf("name %s\n", text != nullptr ? text : "none");
    auto const count = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_DEFAULT, "cuDeviceGetCount"));
    int devices = 0;
    std::printf("count %d\n", count(&devices));
    auto const launch =
        reinterpret_cast<int (*)(void*, void*)>(dlsym(RTLD_DEFAULT, "cuGraphLaunch"));
    std::printf("launch %d\n", launch(nullptr, nullptr));
  } else if (what == "attach") {
    auto const retain =
        reinterpret_cast<int (*)(void**, int)>(dlsym(RTLD_DEFAULT, "cuDevicePrimaryCtxRetain"));
    auto const current = reinterpret_cast<int (*)(void*)>(dlsym(RTLD_DEFAULT, "cuCtxSetCurrent"));
    auto const info =
        reinterpret_cast<int (*)(size_t*, size_t*)>(dlsym(RTLD_DEFAULT, "cuMemGetInfo_v2"));
    void* context = nullptr;
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    std::printf("init %d\n", call_init());
    int const retained = retain(&context, 0);
    std::printf("context %d %d\n", retained, current(context));
    for (int i = 0; i < 2; ++i) {
      int const result = info(&free_bytes, &total_bytes);
      std::printf("info %d %zu MiB\n", result, total_bytes >> 20U);
    }
  } else {
    std::fprintf(stderr, "preload_probe: inert | open PATH PLUGIN | first | absent | attach\n");
    return 2;
  }
  return 0;
}
