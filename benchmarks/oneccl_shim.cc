// oneCCL's C++ interface as a few C functions for ctypes: one communicator per process, float32, sums in place.
// Each function but the first three returns 0, or 1 with the reason in shim_error(). Compiled by oneccl.py.
#include <cstdio>
#include <cstring>
#include <memory>
#include <oneapi/ccl.hpp>
#include <string>

namespace {

std::shared_ptr<ccl::kvs> meeting;
std::unique_ptr<ccl::communicator> world;
char reason[1024];

template <class Work>
int guarded(Work work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(reason, sizeof reason, "%s", error.what());
    return 1;
  }
}

ccl::event start(float* values, size_t count) {
  return ccl::allreduce(values, values, count, ccl::reduction::sum, *world);
}

}  // namespace

extern "C" {

const char* shim_error() { return reason; }

// Of the headers, which are the library's: 2022.2.0
const char* shim_version() {
  static const std::string text = std::to_string(CCL_MAJOR_VERSION) + "." + std::to_string(CCL_MINOR_VERSION) + "." +
                                  std::to_string(CCL_UPDATE_VERSION);
  return text.c_str();
}

int shim_address_bytes() { return static_cast<int>(ccl::kvs::address_max_size); }

// On one rank: where the others find it; `out` has shim_address_bytes().
int shim_address(char* out) {
  return guarded([&] {
    ccl::init();
    meeting = ccl::create_main_kvs();
    const auto address = meeting->get_address();
    std::memcpy(out, address.data(), address.size());
  });
}

int shim_connect(const char* address, int rank, int size) {
  return guarded([&] {
    ccl::init();
    if (!meeting) {
      ccl::kvs::address_type where;
      std::memcpy(where.data(), address, where.size());
      meeting = ccl::create_kvs(where);
    }
    world = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, meeting));
  });
}

int shim_sum(float* values, size_t count) {
  return guarded([&] { start(values, count).wait(); });
}

int shim_close() {
  return guarded([] {
    world.reset();
    meeting.reset();
  });
}

}  // extern "C"
