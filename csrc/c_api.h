// Shared by the files of the C API: the objects behind the opaque pointers, and how a C++ result becomes a C one.
// Thread: any.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "horoclone.h"

struct hc_status {
  hc::Status status;
};

namespace hc {

inline hc_status* wrap(Status status) { return status.is_ok() ? nullptr : new hc_status{std::move(status)}; }

// No exception crosses into C.
template <class Call>
hc_status* guarded(Call&& call) {
  try {
    return wrap(call());
  } catch (const std::bad_alloc&) {
    return wrap(error(Code::kInternal, "out of memory"));
  } catch (const std::exception& e) {
    return wrap(error(Code::kInternal, e.what()));
  }
}

inline std::vector<std::pair<std::string, std::string>> settings_of(const char* const* names, const char* const* values,
                                                                    int32_t n) {
  std::vector<std::pair<std::string, std::string>> settings;
  for (int32_t i = 0; i < n; ++i) settings.emplace_back(names[i], values[i]);
  return settings;
}

// A text that the caller must read before the same thread asks for another one.
inline const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace hc
