// A FAKE of what NVRTC opens by its bare name when it compiles, built as libnvrtc-builtins.so.13.0 for the tests
// only. It lies beside the fake of NVRTC, where the loader does not look: whoever loads NVRTC has to load it, too.
extern "C" __attribute__((visibility("default"))) int hc_fake_builtins() { return 1; }
