/// A library that gets itself preloaded before the gate, and has a launch of its own: a tracer, say.
extern "C" __attribute__((visibility("default"))) int cuLaunchKernel() {
  return 0;
}
