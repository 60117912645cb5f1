/// Opens a library that only its own RUNPATH leads to: possible only if the C library sees the true
/// caller of dlopen.
#include <dlfcn.h>

extern "C" __attribute__((visibility("default"))) int plugin_opens_neighbour() {
  return dlopen("libsluice_preload_neighbour.so", RTLD_NOW) != nullptr ? 1 : 0;
}
